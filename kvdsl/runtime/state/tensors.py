"""Declarations of a layer's tensors: names, axes, and the policies that need them; and their allocation.

Allocation reuses a tensor of the same shape, because CUDA graphs of earlier steps hold its address.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.spec import PolicySpec

NOTHING = torch.empty(0)
"""A tensor that is not allocated."""


# Named functions, not lambdas, because states are pickled.


def _every(spec: PolicySpec) -> bool:
    return True


def _sketches(spec: PolicySpec) -> bool:
    return spec.sketches


def _pages(spec: PolicySpec) -> bool:
    return spec.bounds_pages


def _copies(spec: PolicySpec) -> bool:
    return spec.selects and (spec.sketches or spec.bounds_pages)


def _compact(spec: PolicySpec) -> bool:
    return spec.compact


def _halves(spec: PolicySpec) -> bool:
    return spec.rope_cached


def _tensors(spec: PolicySpec) -> bool:
    return spec.tensors is not None


@dataclass(frozen=True)
class Declared:
    """One tensor.

    Attributes:
        batch: its batch axis, or None if rows share it.
        slots: its slot axis, or None if it is not in slot order.
        changes: whether a decode step changes it.
        noted: whether it is small enough to be saved whole before a step that may be undone.
        of: whether a policy needs it.
    """

    name: str
    batch: int | None = 0
    slots: int | None = None
    changes: bool = True
    noted: bool = False
    of: Callable[[PolicySpec], bool] = _every


BY_SLOT = (
    Declared("position", slots=2, noted=True),
    Declared("columns", batch=1, slots=3),
    Declared("seen", noted=True),
    Declared("numbers", changes=False),
    Declared("sketch", noted=True, of=_sketches),
    Declared("prompt", changes=False, of=_sketches),
    Declared("sketch_keys", of=_sketches),
    Declared("page_bounds", of=_pages),
    Declared("copied", of=_copies),
    Declared("rank", slots=2, noted=True, of=_compact),
    Declared("length", of=_compact),
    Declared("half_keys", of=_halves),
    Declared("constants", batch=None, changes=False, of=_tensors),
)
"""Tensors beside keys and values; `SlotState` describes them."""

PACKED = ("key_rows", "value_rows")
"""Names of packed keys and values as stored; `keys` and `values` name the unpacked ones."""

SLOT_DIM = {"keys": 2, "values": 2} | {one.name: one.slots for one in BY_SLOT if one.slots is not None and one.of is _every}
"""The slot axis of tensors that every policy has in slot order. Keys and values count as such in every layout."""

EMPTY = {"sketch_keys": (0, 0, 0), "page_bounds": (0, 2, 0), "half_keys": (0, 0), "length": (0,)}
"""Derived tensors, and their shapes behind [batch, kv_heads] before they are computed."""

MARKED = frozenset({"sketch_keys", "page_bounds"})
"""Derived tensors whose validity `copied` marks. They keep their address, which CUDA graphs hold."""


# -- allocating --------------------------------------------------------------------------------------------------------


def allocated(like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor full of `value` on like's device, in its dtype unless `dtype` is given.

    Raises:
        KvdslError: if memory does not suffice.
    """
    dtype = like.dtype if dtype is None else dtype
    try:
        return like.new_full(shape, value, dtype=dtype)
    except RuntimeError as error:
        size = math.prod(shape) * dtype.itemsize
        raise KvdslError(f"no memory for {size / 2**30:,.1f} GiB of slots ({list(shape)}); lower the budget") from error


def filled(old: Tensor, like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype | None = None) -> Tensor:
    """Fill `old` with the value if shape, dtype and device fit; otherwise `allocated`."""
    dtype = like.dtype if dtype is None else dtype
    if (old.shape, old.dtype, old.device) == (shape, dtype, like.device):
        return old.fill_(value)
    return allocated(like, shape, value, dtype)


def in_place_of(old: Tensor, value: Tensor) -> Tensor:
    """Copy the value into `old` if shape, dtype and device fit, and return that; otherwise return the value."""
    same = (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device)
    return old.copy_(value) if same else value


def holding(old: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the value, in `old` if shape, dtype and device fit."""
    held = in_place_of(old, value)
    return held.clone() if held is value else held


def in_slots(name: str, old: Tensor, kept: Tensor, order: Tensor | None, slots: int, value: int = 0) -> Tensor:
    """Return a tensor of `slots` slots that begins with the kept ones.

    Args:
        name: in `SLOT_DIM`.
        old: a tensor to reuse, unless it is `kept`.
        order: which of the kept slots, [batch, kv_heads, at most slots]; None for all in order.
        value: fills the other slots.
    """
    dim = SLOT_DIM[name]
    shape = (*kept.shape[:dim], slots, *kept.shape[dim + 1 :])
    first = kept if order is None else taken(name, kept, order)
    if order is not None and first.shape == shape:
        return in_place_of(old, first)
    new = allocated(kept, shape, value) if old is kept else filled(old, kept, shape, value)
    new.narrow(dim, 0, first.shape[dim]).copy_(first)
    return new


def taken(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Gather slots, [batch, kv_heads, any], of a tensor by its name in `SLOT_DIM`."""
    dim = SLOT_DIM.get(name, 2)
    if tensor.dim() > dim + 1:
        rows, heads = _pairs(*order.shape[:2], order.device)
        return tensor[rows, heads, order]  # copies whole rows, twice the speed of a gather
    return tensor.gather(dim, order.expand(*tensor.shape[:dim], order.shape[-1]))


@lru_cache
def _pairs(rows: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of rows, int64 [rows, 1, 1], and of heads, [heads, 1]."""
    with plain_tensors():
        return torch.arange(rows, device=device)[:, None, None], torch.arange(heads, device=device)[:, None]


def with_rows(old: Tensor, dim: int, rows: Tensor) -> Tensor:
    """Select rows along the batch axis `dim`, in place if their number stays the same."""
    chosen = old.index_select(dim, rows.to(old.device))
    return old.copy_(chosen) if chosen.shape == old.shape else chosen


def stays_where_it_is(*tensors: Tensor) -> None:
    """Mark tensors as static for `torch.compile`, so that a CUDA graph may change them in place."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch._dynamo.mark_static_address(tensor)
