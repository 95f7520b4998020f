"""Pages: tokens that lie together in the text, whether or not their slots do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def page_of(position: Tensor, size: Tensor) -> Tensor:
    """The page of each slot, int64 [batch, kv_heads, slots]; negative for free slots.

    Args:
        position: int [batch, kv_heads, slots].
        size: [batch, 1, 1], whole: tokens a page.
    """
    return torch.div(position.long(), size.long(), rounding_mode="floor")


def numbered(page: Tensor) -> Tensor:
    """The pages that there are, numbered from 0 in their order: int64, below the number of slots."""
    ordered, order = page.sort(dim=-1)
    begins = torch.zeros_like(ordered)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.empty_like(page).scatter(-1, order, begins.cumsum(-1))


def spread(op: str, x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
    """Give every slot what its page has: `op` of the page's visible slots.

    Args:
        op: one of `SPREAD`.
        x: with the slots in dimension `dim`; `visible` likewise.
        index: `numbered` pages, with axes where x has them.
    """
    x, visible = torch.broadcast_tensors(x, visible)
    return SPREAD[op](x, visible, index.expand(x.shape), dim)


def _extreme(op: str, none: float) -> Spread:
    def extreme(x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
        seen = torch.where(visible, x, none)
        return torch.zeros_like(seen).scatter_reduce(dim, index, seen, f"a{op}", include_self=False).gather(dim, index)

    return extreme


def _sum(x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
    seen = torch.where(visible, x, 0.0)
    return torch.zeros_like(seen).scatter_add(dim, index, seen).gather(dim, index)


def _mean(x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
    return _sum(x, visible, index, dim) / _sum(visible.to(x.dtype), visible, index, dim)


def _var(x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
    """In two passes: no cancellation."""
    return _mean((x - _mean(x, visible, index, dim)) ** 2, visible, index, dim)


Spread = Callable[[Tensor, Tensor, Tensor, int], Tensor]
SPREAD: dict[str, Spread] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda x, visible, index, dim: _var(x, visible, index, dim).sqrt(),
    "max": _extreme("max", -torch.inf),
    "min": _extreme("min", torch.inf),
}
"""The reductions over a page that `kvdsl/lower/torch.py` says there are."""
