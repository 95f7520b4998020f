"""The tensors of one layer, declared: what each is called, which dimensions its rows and slots are, and which policies have it; and how
they come to be, in place of older ones wherever these have the same shape, because graphs of earlier steps know where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.spec import PolicySpec

NOTHING = torch.empty(0)
"""What a tensor is that has not been allocated."""


# Named functions, because states are pickled.


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
        batch: the batch's dimension, or None where the rows share it.
        slots: the dimension in which its slots lie one after the other, or None where they do not.
        changes: whether a decoded token changes it.
        noted: whether it is so small that all of it is noted before a token that may be taken back.
        of: whether a policy has it.
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
"""What every layer has beside keys and values, of the policies that need it; `SlotState` says what each is."""

PACKED = ("key_rows", "value_rows")
"""Keys and values as they are stored, of a cache with another `kv_dtype` than the model's; `keys` and `values` are what is read then."""

SLOT_DIM = {"keys": 2, "values": 2} | {one.name: one.slots for one in BY_SLOT if one.slots is not None and one.of is _every}
"""What has slots one after the other under any policy, and which dimension they are; keys and values so, however a layout stores them."""

EMPTY = {"sketch_keys": (0, 0, 0), "page_bounds": (0, 2, 0), "half_keys": (0, 0), "length": (0,)}
"""The tensors that are made from others, and the shape that each has behind [batch, kv_heads] while it is not made."""

MARKED = frozenset({"sketch_keys", "page_bounds"})
"""Those of which `copied` says whether they hold: they stay where they are, for those who know where."""


# -- allocating --------------------------------------------------------------------------------------------------------


def allocated(like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor full of one value, on the device of another and, unless told otherwise, of its dtype.

    Raises:
        KvdslError: if there is no memory for it.
    """
    dtype = like.dtype if dtype is None else dtype
    try:
        return like.new_full(shape, value, dtype=dtype)
    except RuntimeError as error:
        size = math.prod(shape) * dtype.itemsize
        raise KvdslError(f"no memory for {size / 2**30:,.1f} GiB of slots ({list(shape)}); lower the budget") from error


def filled(old: Tensor, like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype | None = None) -> Tensor:
    """`allocated`, or the old one full of the value if that is such a tensor."""
    dtype = like.dtype if dtype is None else dtype
    if (old.shape, old.dtype, old.device) == (shape, dtype, like.device):
        return old.fill_(value)
    return allocated(like, shape, value, dtype)


def in_place_of(old: Tensor, value: Tensor) -> Tensor:
    """The value, copied into the old tensor if that has its shape; else itself."""
    same = (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device)
    return old.copy_(value) if same else value


def holding(old: Tensor, value: Tensor) -> Tensor:
    """A copy of the value, in the old tensor if that has its shape."""
    held = in_place_of(old, value)
    return held.clone() if held is value else held


def in_slots(name: str, old: Tensor, kept: Tensor, order: Tensor | None, slots: int, value: int = 0) -> Tensor:
    """A tensor of so many slots that begins with the kept ones, in `order` [batch, kv_heads, at most slots] if it is given.

    Args:
        name: in `SLOT_DIM`.
        old: in which it may lie, unless that is what is kept.
        value: what the other slots hold.
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
    """These slots, [batch, kv_heads, any], of the tensor of that name in `SLOT_DIM`."""
    dim = SLOT_DIM.get(name, 2)
    if tensor.dim() > dim + 1:
        rows, heads = (torch.arange(n, device=order.device) for n in order.shape[:2])
        return tensor[rows[:, None, None], heads[:, None], order]  # whole rows: twice as fast as a gather
    return tensor.gather(dim, order.expand(*tensor.shape[:dim], order.shape[-1]))


def with_rows(old: Tensor, dim: int, rows: Tensor) -> Tensor:
    """These rows of the batch, which is that dimension; in the old tensor if they are as many."""
    chosen = old.index_select(dim, rows.to(old.device))
    return old.copy_(chosen) if chosen.shape == old.shape else chosen


def stays_where_it_is(*tensors: Tensor) -> None:
    """Tell `torch.compile` that these keep their addresses, so that a CUDA graph may change them in place."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch._dynamo.mark_static_address(tensor)
