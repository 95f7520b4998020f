"""The cache of Hugging Face transformers; the only package that imports them.

- `versions`: what differs between releases of transformers.
- `attention`: the registered attention and mask functions, and how they find a layer.
- `layer`: one layer's slots, seen as a transformers cache layer.
- `binding`: which models can be served; giving and taking back their attention.
- `probe`: the self-test that a model's attention is really reached.
- `rope`: how the model's layers rotate keys, for compact positions.
- `speculation`: taking tokens back, and forwards of which some tokens are guesses.
- `supplying`: what the caller gives of each token.
- `tensor_parallel`: which KV heads a process has.
- `cache`: KVCache, the base of every generated cache class.
"""

from kvdsl.runtime.hf.binding import release
from kvdsl.runtime.hf.cache import KVCache
from kvdsl.runtime.hf.supplying import Supplier

__all__ = ["KVCache", "Supplier", "release"]
