"""The cache for Hugging Face transformers; only this package imports them.

- `versions`: differences between releases of transformers.
- `attention`: attention and mask functions that route marked keys to a cache's layers.
- `mask`: the masks of forwards with a kvdsl cache, and how attention reads them.
- `forwards`: hooks before and after a model's forward.
- `generation`: hooks in `generate`.
- `watch`: what a cache records in these hooks, and what it refuses.
- `layer`: one layer's slots as a transformers cache layer.
- `layers`: the layers of a cache, by kind.
- `checks`: checks of a layer's forward.
- `models`: which models can be served, and which KV heads a process has.
- `admission`: preparation of a model, with a self-test.
- `rope`: the rotation of a model's keys.
- `speculation`: `crop`, and forwards with guessed tokens.
- `supplying`: per-token values from the caller.
- `cache`: KVCache, the base of every generated cache class.
"""

from kvdsl.runtime.hf.cache import KVCache
from kvdsl.runtime.hf.models import release
from kvdsl.runtime.hf.supplying import Supplier

__all__ = ["KVCache", "Supplier", "release"]
