"""Masks of forwards with a kvdsl cache.

kvdsl's attention only needs the padding of new tokens. Other attention in the model, if there is any, needs a causal mask. `SlotMask`
serves both: it stores the padding, and becomes the whole causal mask when an operation reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.checks import UNTOLD
from kvdsl.runtime.hf.layer import UNCOUNTED, SlotLayer, SlotLength
from kvdsl.runtime.hf.versions import mask_tokens

_WINDOW = "_kvdsl_window"
"""Attribute of masks: the window that the model asked for, None for the whole text."""


class SlotMask(Tensor):
    """A lazy causal mask [batch, 1, tokens, columns] for the last columns, allocated when an operation reads it.

    Attributes:
        text: bool [batch, columns], False for padding; None without padding.
    """

    text: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # Python never looks into it

    @staticmethod
    def __new__(cls, text: Tensor | None, size: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> SlotMask:
        made: SlotMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made.text = text
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(SlotMask, SlotMask.whole, (args, kwargs or {}))
        return operator(*args, **kwargs)

    def whole(self) -> Tensor:
        """Allocate the mask."""
        return _causal(self.text, self.shape, self.dtype, self.device)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"SlotMask({list(self.shape)}, {self.dtype}, padded={self.text is not None})"


def _causal(text: Tensor | None, size: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    """Return a causal mask: bool, True where visible; or for eager attention, 0 where visible and the dtype's minimum elsewhere."""
    tokens, columns = size[2:]
    causal = torch.ones(tokens, columns, dtype=torch.bool, device=device).tril(columns - tokens)
    seen = causal.expand(tuple(size)) if text is None else causal & text[:, None, None]
    if dtype == torch.bool:
        return seen.contiguous()
    return torch.zeros(tuple(size), dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)


class Read(NamedTuple):
    """What a mask says: `real`, bool [batch, tokens], False for padding, or None; and the model's `window`, or `UNTOLD`."""

    real: Tensor | None
    window: int | None


# -- making masks ------------------------------------------------------------------------------------------------------


def make(arguments: dict[str, Any], *, additive: bool) -> Tensor | None:
    """Return the mask of a forward with a kvdsl cache, from the arguments of a mask function of transformers; None if nothing is masked.

    If the policy manages every layer, the mask has a column per new token, so its shape is the same for every compiled step. If
    transformers' own layers also read it, it has a column per cached token too.

    Args:
        additive: whether the model adds masks to logits, as eager attention does.

    Raises:
        KvdslError: if the attention mask does not cover exactly the cached and new tokens, or hides cached ones, or if the model asks for
            more than causal attention.
    """
    if arguments.get("use_vmap") or not _only_causal(arguments):
        raise KvdslError(
            "the model asks for attention that is not causal (image blocks, packed texts or a mask of its own), which a "
            "cache of slots does not serve: pass plain text, one per row"
        )
    tokens, length, window = mask_tokens(arguments), arguments["kv_length"], arguments.get("local_size")
    text = _checked(arguments.get("attention_mask"), length, tokens)
    if text is not None and (length.layer is None or length.layer.sync.is_alone):
        # A copy, because torch would recompile for every new stride of a slice of a growing mask.
        text = text[:, -tokens:].to(torch.bool, copy=True, memory_format=torch.contiguous_format)
    if tokens == 1:
        made = None if text is None else text[:, None, None]
    elif text is None and window is None and not additive and arguments.get("allow_is_causal_skip", True):
        made = None  # attention without a mask is causal, except for eager attention
    else:
        size = _rows(arguments), 1, tokens, _columns(text, length, tokens)
        dtype = arguments.get("dtype", torch.float32) if additive else torch.bool
        make_one = _causal if torch.compiler.is_compiling() else SlotMask
        made = make_one(text, size, dtype, _device(arguments))
    if made is not None and not torch.compiler.is_compiling():
        setattr(made, _WINDOW, window)
    return made


def _columns(text: Tensor | None, length: SlotLength, tokens: int) -> int:
    """Return how many keys the mask covers."""
    if text is not None:
        return text.shape[1]
    return tokens if length == UNCOUNTED or length.layer is None or length.layer.sync.is_alone else int(length)


def _checked(text: Tensor | None, length: SlotLength, tokens: int) -> Tensor | None:
    """Check the mask of the whole text and return it as bool [batch, columns], or None."""
    if text is None:
        return None
    if length != UNCOUNTED and text.shape[-1] != length:
        raise KvdslError(
            f"the attention mask covers {text.shape[-1]} tokens, but {length - tokens} are cached and {tokens} are new: "
            f"pass the mask of the whole text, or call `cache.reset()` before an unrelated prompt"
        )
    if length != UNCOUNTED and length.layer is not None:
        length.layer.check_mask(text, one_token=tokens == 1)
    return text.to(torch.bool)


def _only_causal(arguments: dict[str, Any]) -> bool:
    """Whether the mask is causal, perhaps with a sliding window; the window is compared with the layer's later."""
    return arguments.get("local_size") is not None or arguments.get("mask_function") in (None, causal_mask_function)


def _rows(arguments: dict[str, Any]) -> int:
    padding = arguments.get("attention_mask")
    return int(arguments["batch_size"]) if padding is None else len(padding)


def _device(arguments: dict[str, Any]) -> Any:
    """Return the mask's device; in transformers 4.57 that of the cache positions."""
    padding, positions = arguments.get("attention_mask"), arguments.get("cache_position")
    found = padding if padding is not None else positions
    return arguments.get("device", "cpu") if found is None else found.device


# -- reading masks -----------------------------------------------------------------------------------------------------


def read(mask: Tensor | None, query: Tensor, layer: SlotLayer) -> Read:
    """Return what a layer's mask says, given the query [batch, heads, tokens, dim].

    Raises:
        KvdslError: for a mask that hides more than padding.
    """
    tokens = query.shape[2]
    if mask is None:
        return Read(None, UNTOLD)
    if torch.compiler.is_compiling():
        return Read(_read_in_a_graph(mask, tokens, layer), UNTOLD)
    if isinstance(mask, SlotMask):
        return Read(None if mask.text is None else mask.text[:, -tokens:], getattr(mask, _WINDOW, UNTOLD))
    if hasattr(mask, _WINDOW):
        return Read(mask[:, 0, 0, -tokens:], getattr(mask, _WINDOW))
    if mask.dtype == torch.bool and mask.shape[1:] == (1, 1, 1) and tokens == 1:
        return Read(mask[:, 0, 0], UNTOLD)
    return Read(_read_ready_made(mask, query, layer), UNTOLD)


def _read_in_a_graph(mask: Tensor, tokens: int, layer: SlotLayer) -> Tensor:
    """Return the padding of a mask whose values cannot be read; only masks from `make` have this shape."""
    rows, columns = mask.shape[2:]
    if rows != tokens or (layer.sync.is_alone and columns != tokens):
        raise _refusal(mask)
    last = mask[:, 0, -1, -tokens:]
    return last if mask.dtype == torch.bool else last == 0


def _read_ready_made(mask: Tensor, query: Tensor, layer: SlotLayer) -> Tensor:
    """Return the padding of a whole mask, [batch or 1, 1, tokens, columns], which must be causal otherwise.

    It is bool, or 0 where visible and the dtype's minimum elsewhere (eager attention).
    """
    batch, _, tokens, _ = query.shape
    columns = mask.shape[-1]
    if mask.ndim != 4 or mask.shape[1:3] != (1, tokens) or columns not in (tokens, layer.length + tokens):
        raise _refusal(mask)
    seen = mask if mask.dtype == torch.bool else mask == 0
    added = mask.is_floating_point() and bool((seen | (mask <= torch.finfo(mask.dtype).min)).all())
    last = seen[:, 0, -1]
    causal = torch.ones(tokens, columns, dtype=torch.bool, device=mask.device).tril(columns - tokens)
    is_causal = torch.equal(seen[:, 0], last[:, None] & causal)
    if layer.window is not None or not is_causal or not (mask.dtype == torch.bool or added):
        raise _refusal(mask)
    last = last.expand(batch, -1)
    layer.check_mask(last, one_token=False)
    return last[:, -tokens:]


def _refusal(mask: Tensor) -> KvdslError:
    return KvdslError(
        f"attention was given a ready-made mask ({str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}), but a "
        f"cache of slots only understands padding: pass a 2-D `attention_mask` [batch, tokens] of zeros and ones"
    )
