"""Text order among slots: ranks, and pooling over neighbouring tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FREE = -1
"""The position and the rank of a free slot."""


def text_order(position: Tensor) -> Tensor:
    """Return the slots in text order, free ones last; int64 of position's shape."""
    return _place(position).argsort(dim=-1, stable=True)


def in_text_order(position: Tensor) -> Tensor:
    """Whether slots are already in text order, as after a prompt without evictions: bool []."""
    place = _place(position)
    return (place[..., 1:] >= place[..., :-1]).all()


def _place(position: Tensor) -> Tensor:
    return position ^ torch.iinfo(torch.int32).min  # FREE becomes the largest number


def ranks(position: Tensor) -> Tensor:
    """Return how many slots hold an earlier token, int32 of position's shape; -1 for a free slot."""
    return text_order(position).argsort(-1).int().masked_fill_(position < 0, FREE)


def free(position: Tensor, rank: Tensor | None, leaving: Tensor) -> None:
    """Free slots in place, [batch, kv_heads, slots].

    Args:
        rank: int32 or None. Ranks behind a gap move up, without sorting.
        leaving: bool; live slots only.
    """
    if rank is not None:
        _close_gaps(rank, leaving)
    position.masked_fill_(leaving, FREE)


def _close_gaps(rank: Tensor, leaving: Tensor) -> None:
    place = rank.long().clamp(min=0)
    gone = torch.zeros_like(rank).scatter_add_(-1, place, leaving.int()).cumsum(-1, dtype=torch.int32)
    rank.sub_(gone.gather(-1, place)).masked_fill_(leaving, FREE).clamp_(min=FREE)


def pool(op: str, x: Tensor, position: Tensor, apart: Tensor, size: Tensor) -> Tensor:
    """Return at each slot the `max` or `mean` of x over slots at most size // 2 places away in the text.

    Slots in `apart` keep their x and count for no other slot. The host reads nothing back, whatever the sizes: each range is composed of
    ranges of 1, 2, 4, ... slots, by the binary digits of its length.

    Args:
        x: float32 [batch, kv_heads, slots].
        position: int [batch, kv_heads, slots].
        apart: bool [batch, kv_heads, slots].
        size: floored, at least 1; broadcasts with [batch, kv_heads, slots].
    """
    slots = x.shape[-1]
    order = torch.where(apart, torch.iinfo(torch.int32).max, position).argsort(dim=-1, stable=True)
    place = order.argsort(-1)
    radius = torch.div(size.floor().clamp(min=1, max=2 * slots).long(), 2, rounding_mode="floor")
    begin = (place - radius).clamp(min=0)
    end = torch.minimum(place + radius + 1, (~apart).sum(-1, keepdim=True))
    length = (end - begin).clamp(min=0)
    pooled = _stretch(op, x.gather(-1, order), begin, length)
    return torch.where(apart, x, pooled if op == "max" else pooled / length)


_JOINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "max": (torch.maximum, -torch.inf),
    "mean": (torch.add, 0.0),
}


def _stretch(op: str, x: Tensor, begin: Tensor, length: Tensor) -> Tensor:
    """Return the maximum or the sum of x over begin .. begin + length, within the last axis."""
    join, nothing = _JOINS[op]
    found = torch.full_like(x, nothing)
    step = 1
    while step <= x.shape[-1]:
        taken = (length & step) > 0
        found = torch.where(taken, join(found, x.gather(-1, begin.clamp(max=x.shape[-1] - 1))), found)
        begin = begin + step * taken
        behind = torch.full_like(x, nothing)
        behind[..., :-step] = x[..., step:]
        x = join(x, behind)
        step *= 2
    return found
