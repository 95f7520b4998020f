"""Differences between releases of transformers, in one place.

Supported: 4.57 and 5.x. The layers' methods accept every release's arguments:

    lazy_initialization(k)          4.57        (k, v)                  5.x
    update(k, v, cache_kwargs)      .. 5.3      (k, v)                  5.5 ..
    get_mask_sizes(cache_position)  .. 5.3      (query_length: int)     5.5 ..
    get_max_cache_shape()           .. 5.12     get_max_length()        5.16 ..
    crop(length)                    .. 5.12     crop(-tokens)           5.16 ..
    -                               .. 5.12     activate_past_recording 5.16 ..

A model's forward and `generate` name the cache differently:

    past_key_values                 .. 5.23     cache                   5.24 ..
"""

from __future__ import annotations

from typing import Any, TypeGuard

import transformers
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

OLDEST = (4, 57)


def check_version() -> None:
    """Refuse an unsupported release of transformers.

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
"""Name of the forward's cache argument. `generate` and newer releases also accept the old name."""


def with_cache(cache: Any) -> dict[str, Any]:
    """Return the forward's cache argument: `model(input_ids, **with_cache(cache))`."""
    return {CACHE: cache}


def cache_of(arguments: dict[str, Any]) -> Any:
    """Return the cache among arguments, under either name, or None."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def token_count(query_length: int | Tensor) -> int:
    """Return a forward's number of tokens from the argument of `get_mask_sizes`: a number, or cache positions."""
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


def mask_tokens(arguments: dict[str, Any]) -> int:
    """Return a forward's number of tokens from a mask function's arguments."""
    if "q_length" in arguments:
        return int(arguments["q_length"])
    return int(arguments["cache_position"].shape[0])


def is_of_tokens(mask: Any) -> TypeGuard[Tensor]:
    """Return whether a mask, or positions, is a tensor with a number per token, [batch, tokens]."""
    return isinstance(mask, Tensor) and mask.ndim == 2


def text_config(model: nn.Module) -> Any:
    """Return the config of the part that generates text, such as a multimodal model's text config."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def native_layers(config: Any) -> list[Any]:
    """Return the layers of transformers' own cache for this model, one per decoder layer."""
    return list(DynamicCache(config=config).layers)


def layer_types(config: Any) -> list[str] | None:
    """Return the kind of each layer from the config, or None."""
    return getattr(config, "layer_types", None)


def is_full(layer: Any) -> bool:
    """Whether a native layer caches all tokens for ordinary attention, and nothing else."""
    return type(layer) is DynamicLayer


def sliding_window(layer: Any) -> int | None:
    """Return the window of a native layer that caches a sliding window for ordinary attention, else None."""
    return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else None


def can_roll_back(layer: Any) -> bool:
    """Whether tokens can be taken back from a layer. Not from recurrent layers, nor from sliding windows of old releases."""
    recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if recurrent is not None and isinstance(layer, recurrent):
        return False
    return sliding_window(layer) is None or hasattr(layer, "activate_past_recording")


def roll_back(layer: Any, removed: int) -> None:
    """Take the last tokens back from a native layer. A sliding window that kept extra tokens for this then drops them."""
    if removed or getattr(layer, "record_past", False):
        layer.crop(-removed)
