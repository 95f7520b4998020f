"""What differs between releases of transformers, in one place.

Supported: 4.57 and 5.x. The layers' own methods accept every release's arguments:

    lazy_initialization(k)          4.57        (k, v)                  5.x
    update(k, v, cache_kwargs)      .. 5.3      (k, v)                  5.5 ..
    get_mask_sizes(cache_position)  .. 5.3      (query_length: int)     5.5 ..
    get_max_cache_shape()           .. 5.12     get_max_length()        5.16 ..
    crop(length)                    .. 5.12     crop(-tokens)           5.16 ..
    -                               .. 5.12     activate_past_recording 5.16 ..

A model's forward, and what generation hands it, name the cache differently:

    past_key_values                 .. 5.23     cache                   5.24 ..
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

OLDEST = (4, 57)


def check_version() -> None:
    """Refuse a transformers whose caches have another shape.

    Raises:
        ImportError: below 4.57.
    """
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        raise ImportError(
            f"kvdsl needs transformers >= {OLDEST[0]}.{OLDEST[1]}, found {transformers.__version__}: "
            f"pip install --upgrade transformers"
        )


check_version()


CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""The name by which models take a cache. `generate`, and releases that know the new name, take the old one as well."""


def with_cache(cache: Any) -> dict[str, Any]:
    """The argument of a model's forward that gives it a cache: `model(input_ids, **with_cache(cache))`."""
    return {CACHE: cache}


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache among what a forward or generation was given, by whichever name; None without one."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def token_count(query_length: int | Tensor) -> int:
    """How many tokens a forward brings, from what `get_mask_sizes` is given: a number, or their cache positions."""
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


def mask_tokens(arguments: dict[str, Any]) -> int:
    """How many tokens a forward brings, from what a mask function is given."""
    if "q_length" in arguments:
        return int(arguments["q_length"])
    return int(arguments["cache_position"].shape[0])


def text_config(model: nn.Module) -> Any:
    """The config of the part that generates text: the whole config, or a multimodal model's text config."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def native_layers(config: Any) -> list[Any]:
    """The layers that transformers' own cache has for this model, one per decoder layer."""
    return list(DynamicCache(config=config).layers)


def layer_types(config: Any) -> list[str] | None:
    """The config's word for each layer's kind, where it has one."""
    return getattr(config, "layer_types", None)


def is_full(layer: Any) -> bool:
    """Whether a native layer caches all tokens for ordinary attention, and nothing beside them."""
    return type(layer) is DynamicLayer


def sliding_window(layer: Any) -> int | None:
    """The window of a native layer that caches a sliding window for ordinary attention, else None."""
    return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else None


def can_roll_back(layer: Any) -> bool:
    """Whether tokens can be taken back from a layer, ours or native: not from a recurrent one, nor from a window of an old release."""
    recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if recurrent is not None and isinstance(layer, recurrent):
        return False
    return sliding_window(layer) is None or hasattr(layer, "activate_past_recording")


def roll_back(layer: Any, removed: int) -> None:
    """Take the last tokens back from a native layer; a window that keeps more for this purpose then lets go of what lies before it."""
    if removed or getattr(layer, "record_past", False):
        layer.crop(-removed)
