"""The cache of Hugging Face transformers; the only package that imports them.

- `versions`: what differs between releases of transformers.
- `attention`: the attention and mask functions that models call, and how they find a layer.
- `mask`: the mask that a forward with a cache of ours gets, and what attention reads from it.
- `forwards`: a forward, from the arguments that it is given to the check that every layer has been through it.
- `watch`: what a cache learns from these, and refuses of them.
- `generation`: what generation says of the text that it continues.
- `layer`: one layer's slots, seen as a transformers cache layer.
- `checks`: what must not happen to it in a forward.
- `models`: which models can be served, and which of their KV heads a process has.
- `admission`: preparing a model, and the self-test that its attention is really reached.
- `rope`: how the model's layers rotate keys, for compact positions.
- `speculation`: taking tokens back, and forwards of which some tokens are guesses.
- `supplying`: what the caller gives of each token.
- `cache`: KVCache, the base of every generated cache class.
"""

from kvdsl.runtime.hf.cache import KVCache
from kvdsl.runtime.hf.models import release
from kvdsl.runtime.hf.supplying import Supplier

__all__ = ["KVCache", "Supplier", "release"]
