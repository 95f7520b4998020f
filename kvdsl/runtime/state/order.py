"""The order of the text among slots, in which tokens lie wherever they found room: ranks, and pooling over neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FREE = -1
"""The position, and the rank, of a slot that holds no token."""


def text_order(position: Tensor) -> Tensor:
    """The slots in the order of the text, the free ones last; int64, of the shape of `position`."""
    return _place(position).argsort(dim=-1, stable=True)


def in_text_order(position: Tensor) -> bool:
    """Whether they lie so already, as those of a prompt do that nobody left."""
    return bool((_place(position).diff(dim=-1) >= 0).all())


def _place(position: Tensor) -> Tensor:
    return torch.where(position >= 0, position, torch.iinfo(torch.int32).max)


def ranks(position: Tensor) -> Tensor:
    """How many slots hold an earlier token, int32 of the shape of `position`; -1 where the slot is free."""
    return text_order(position).argsort(-1).int().masked_fill_(position < 0, FREE)


def free(position: Tensor, rank: Tensor | None, leaving: Tensor) -> None:
    """Free slots in place, [batch, kv_heads, slots].

    Args:
        rank: int32, where it is known: it is updated without sorting, those behind a gap move up.
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
    """At every slot the `max` or `mean` of x over the slots at most size // 2 places before or behind it in the text.

    Slots that stand apart are neither counted nor pooled: they keep their x. Nothing is read back to the host, whatever the
    sizes: a stretch of the text is put together from stretches of 1, 2, 4, ... slots, as its length has binary digits.

    Args:
        x: float32 [batch, kv_heads, slots].
        position: int [batch, kv_heads, slots].
        apart: bool [batch, kv_heads, slots].
        size: floored, at least 1; anything that broadcasts with [batch, kv_heads, slots].
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
    """The maximum or the sum of x over begin .. begin + length, which may not pass the end."""
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
