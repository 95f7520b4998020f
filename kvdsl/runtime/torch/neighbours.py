"""Pooling over neighbours in the text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
