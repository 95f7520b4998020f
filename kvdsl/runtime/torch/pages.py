"""Pages: tokens that lie together in the text, whether or not their slots do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_NONE = -(2**40)  # behind which there is no next page


def page_of(position: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """The page of each slot, int64 [batch, kv_heads, slots]; far below 0 for free slots.

    Args:
        position: int [batch, kv_heads, slots].
        numbers: `page`, the tokens of a page, and perhaps `page_after`, those before the first one: whole, [batch, 1, 1] each.
    """
    after = numbers["page_after"].long() if "page_after" in numbers else 0
    page = torch.div(position.long() - after, numbers["page"].long(), rounding_mode="floor")
    return torch.where(position < 0, _NONE, page)


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


def following(op: str, own: Tensor, page: Tensor, index: Tensor, dim: int) -> Tensor:
    """Give every slot what the page behind its own has; where there is none, what `op` is of nothing.

    Args:
        own: what `spread` gave. page, index: of the slots, with axes where `own` has them.
    """
    index, page = index.expand(own.shape), page.expand(own.shape)
    behind = (index + 1).clamp(max=own.shape[dim] - 1)
    there = torch.full_like(page, _NONE).scatter(dim, index, page).gather(dim, behind) == page + 1
    found = torch.zeros_like(own).scatter(dim, index, own).gather(dim, behind)
    return torch.where(there, found, _OF_NOTHING.get(op, torch.nan))


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


_OF_NOTHING = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}
Spread = Callable[[Tensor, Tensor, Tensor, int], Tensor]
SPREAD: dict[str, Spread] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda x, visible, index, dim: _var(x, visible, index, dim).sqrt(),
    "max": _extreme("max", -torch.inf),
    "min": _extreme("min", torch.inf),
}
"""The reductions over a page that `kvdsl/lower/torch_expressions.py` says there are."""
