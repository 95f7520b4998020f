"""The attention and mask functions that a bound model calls.

`SlotLayer.update` hands the new keys back with itself attached (`mark`), so the attention function finds the layer on the
key: nothing global, any number of caches and threads. A key without that mark belongs to no layer of ours (no cache, a
foreign cache, a layer that stays native) and goes to the model's own attention.

The mask function does the same: a cache reports its length as a `SlotLength`, which transformers passes through, and then
only the padding of the new tokens is wanted; any other length gets the mask of the model's own attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import mask_tokens

if TYPE_CHECKING:
    from kvdsl.runtime.hf.layer import SlotLayer

PREFIX = "kvdsl_"
"""Names of our attention: the prefix and the name of the model's own attention, to which unmarked keys go."""

NATIVE = ("sdpa", "eager")
"""What unmarked keys can be delegated to."""

_MARK = "_kvdsl_layer"

_WINDOW = "_kvdsl_window"
"""What a mask of ours knows: the window that the model asked for, None for the whole text."""

UNTOLD = -1
"""The window where no mask tells."""


class SlotLength(int):
    """The logical length of a cache of ours: tells the mask function that it serves slots."""


UNCOUNTED = SlotLength(-1)
"""The length where none can be told, in a compiled forward."""


def mark(key: Tensor, layer: SlotLayer) -> Tensor:
    """The key as a new view that knows its layer."""
    marked = key.view(key.shape)
    setattr(marked, _MARK, layer)
    return marked


def register() -> None:
    """Make the names known to transformers; registering again changes nothing."""
    for native in NATIVE:
        AttentionInterface.register(PREFIX + native, _attention_over(native))
        AttentionMaskInterface.register(PREFIX + native, _mask_over(native))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention_over(native: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function for models whose own attention is `native`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        _refuse_chosen(module, kwargs)
        layer: SlotLayer | None = getattr(key, _MARK, None)
        if layer is None:
            _refuse_to_forget(native, kwargs)
            return native_function(module, native)(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
        _refuse(module, dropout, kwargs)
        scaling = kwargs.get("scaling")
        out = layer.attend(
            module,
            query,
            key,
            value,
            real_tokens(attention_mask, query.shape[2]),
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            slopes=_slopes(kwargs, query.shape[1]),
            positions=kwargs.get("position_ids"),
            asked_window=_window_of(attention_mask),
        )
        return out, None

    return attention


def native_function(module: nn.Module, native: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention that the module would call by itself under the name `native`."""
    modeling = sys.modules[type(module).__module__]
    if native == "eager":
        eager: Callable[..., tuple[Tensor, Tensor | None]] | None = getattr(modeling, "eager_attention_forward", None)
        if eager is not None:
            return eager
        native = "sdpa"
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found: Callable[..., tuple[Tensor, Tensor | None]] = functions[native]
    return found


def real_tokens(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Which of the new tokens are no padding, bool [batch, tokens]; None when all are.

    Args:
        mask: what the model hands to its attention: None or bool [batch, 1, 1, columns], whose last columns are the new.

    Raises:
        KvdslError: for any other mask.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.shape[3] < tokens:
        raise KvdslError(
            f"attention was given a ready-made mask ({str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}), but a "
            f"cache of slots only understands padding: pass a 2-D `attention_mask` [batch, tokens] of zeros and ones"
        )
    return mask[:, 0, 0, -tokens:]


_REFUSED = {
    "output_attentions": "`output_attentions=True` needs a matrix of all probabilities, which fused attention never builds: "
    "leave it out, or read what the policy keeps with `cache.state(layer)`",
    "position_bias": "attention with a ready-made position bias (T5, MPT) is not supported: its slots would have to be known; "
    "a bias that grows with the distance (ALiBi) is, where the model passes `alibi_slopes`",
    "head_mask": "`head_mask` is not supported together with a kvdsl cache: leave it out",
}


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError on an argument that would silently change what attention means."""
    for name in _REFUSED.keys() & kwargs.keys():
        if kwargs[name] is not None and kwargs[name] is not False:
            raise KvdslError(_REFUSED[name])
    if dropout:
        raise KvdslError("attention dropout is active, so cached statistics would be random: call `model.eval()` first")
    if getattr(module, "is_causal", True) is False:  # the argument of that name only tells what the mask leaves to do
        raise KvdslError(f"{type(module).__name__} attends in both directions, but a cache serves causal attention only")


def _window_of(mask: Tensor | None) -> int | None:
    """The window that the model asked for with this mask, None for the whole text, `UNTOLD` without padding and in compiled forwards."""
    if mask is None or torch.compiler.is_compiling():
        return UNTOLD
    window: int | None = getattr(mask, _WINDOW, UNTOLD)
    return window


_CHOSEN = ("block_indices", "indices")
"""By what names kernels are told which keys a sparse layer attends to; under attention that cannot be told, models make masks of them."""


def _refuse_chosen(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError where a layer attends to a choice of its own, ours or not: transformers' attention would see everything instead."""
    for name in _CHOSEN:
        if kwargs.get(name) is not None:
            raise KvdslError(
                f"{type(module).__name__} chooses itself which tokens it attends to (`{name}`), and masks the others only for attention "
                f"under transformers' own names: kvdsl does not serve models with such layers"
            )


def _slopes(kwargs: dict[str, Any], query_heads: int) -> Tensor | None:
    """The slopes of a bias that grows with the distance (ALiBi), [query_heads], by the name that flash attention has for them.

    Raises:
        KvdslError: if they differ from row to row, or are not one for each query head.
    """
    slopes: Tensor | None = kwargs.get("alibi_slopes")
    if slopes is not None and slopes.shape != (query_heads,):
        raise KvdslError(
            f"`alibi_slopes` is {list(slopes.shape)}, but a cache of slots takes one for each of {query_heads} query heads"
        )
    return slopes


def _refuse_to_forget(native: str, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError where transformers' attention would drop slopes that the model's own (flash) attention knows."""
    if native == "sdpa" and kwargs.get("alibi_slopes") is not None:
        raise KvdslError(
            "the model passes `alibi_slopes`, which transformers' `sdpa` does not know: run it with its kvdsl cache, or "
            "give it its own attention back first (`release(model)` of the cache's class)"
        )


# -- masks -------------------------------------------------------------------------------------------------------------


def _mask_over(native: str) -> Callable[..., Tensor | None]:
    """The mask function for models whose own attention is `native`."""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if isinstance(kwargs.get("kv_length"), SlotLength):
            return _padding_of_new_tokens(kwargs)
        made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[native](*args, **kwargs)
        return made

    return mask


def _padding_of_new_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Bool [batch, 1, 1, tokens], or None without padding information.

    Raises:
        KvdslError: if the attention mask does not cover exactly what was cached and what is new, or if the model asks for
            more than causal attention.
    """
    if arguments.get("use_vmap") or not _only_causal(arguments):
        raise KvdslError(
            "the model asks for attention that is not causal (image blocks, packed texts or a mask of its own), which a "
            "cache of slots does not serve: pass plain text, one per row"
        )
    padding: Tensor | None = arguments.get("attention_mask")
    if padding is None:
        return None
    tokens, columns = mask_tokens(arguments), int(arguments["kv_length"])
    if columns != UNCOUNTED and padding.shape[-1] != columns:
        raise KvdslError(
            f"the attention mask covers {padding.shape[-1]} tokens, but {columns - tokens} are cached and {tokens} are new: "
            f"pass the mask of the whole text, or call `cache.reset()` before an unrelated prompt"
        )
    # A copy, because a compiled forward would be compiled anew for every stride that a part of a growing mask has.
    made = padding[:, None, None, -tokens:].to(torch.bool, copy=True, memory_format=torch.contiguous_format)
    if not torch.compiler.is_compiling():
        setattr(made, _WINDOW, arguments.get("local_size"))
    return made


def _only_causal(arguments: dict[str, Any]) -> bool:
    """Whether the mask is causal, or causal in a sliding window (which the mask then knows, to be compared with the layer's own)."""
    return arguments.get("local_size") is not None or arguments.get("mask_function") in (None, causal_mask_function)
