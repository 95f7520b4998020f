"""Pages: ranges of the text, wherever their tokens' slots are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.torch.visible import Visible, standing

_NONE = -(2**40)  # the page of free slots: no page follows it


def page_of(position: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """Return the page of each slot, int64 [batch, kv_heads, slots]; far below 0 for free slots.

    Args:
        position: int [batch, kv_heads, slots].
        numbers: `page`, tokens per page, and optionally `page_after`, tokens before the first page: whole, [batch, 1, 1] each.
    """
    after = numbers["page_after"].long() if "page_after" in numbers else 0
    page = torch.div(position.long() - after, numbers["page"].long(), rounding_mode="floor")
    return torch.where(position < 0, _NONE, page)


def numbered(page: Tensor) -> Tensor:
    """Number the existing pages from 0 in order: int64."""
    ordered, order = page.sort(dim=-1)
    begins = torch.zeros_like(ordered)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.empty_like(page).scatter(-1, order, begins.cumsum(-1))


def spread(op: str, x: Tensor, visible: Tensor, index: Tensor, dim: int) -> Tensor:
    """Reduce over the visible slots of each page, and give every slot its page's result.

    Args:
        op: in `SPREAD`.
        x, visible: have slots in axis `dim`.
        index: from `numbered`, broadcasts with x.
    """
    x, visible = torch.broadcast_tensors(x, visible)
    return SPREAD[op](x, visible, index.expand(x.shape), dim)


def _following(op: str, own: Tensor, page: Tensor, index: Tensor, dim: int) -> Tensor:
    """Give every slot the result of the next page; if there is none, that of an empty page.

    Args:
        own: from `spread`.
        page, index: of the slots, broadcast with `own`.
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
    """Two passes avoid cancellation."""
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
"""The reductions over pages named in `kvdsl/lower/torch_expressions.py`."""


@dataclass(frozen=True)
class Pages:
    """The pages of visible slots.

    Attributes:
        page: of each slot, [batch, kv_heads, 1, slots].
    """

    visible: Visible
    page: Tensor

    def over(self, op: str, x: Tensor, *, grouped: bool = False, dims: bool = False, following: bool = False) -> Tensor:
        """Reduce over the page's slots that the query sees, and give every slot its page's result.

        Args:
            op: in `SPREAD`.
            grouped: whether x has a group axis.
            dims: whether x has a last axis of dims.
            following: take the next page's result.
        """
        page, visible = self.page, self.visible.mask
        if grouped:
            page, visible = page.unsqueeze(2), visible.unsqueeze(2)
        if dims:
            page, visible = page.unsqueeze(-1), visible.unsqueeze(-1)
        index = numbered(self.page).view(page.shape)
        own = spread(op, x.float(), visible, index, -2 if dims else -1)
        return _following(op, own, page, index, -2 if dims else -1) if following else own

    def rank(self, x: Tensor, *, grouped: bool = False) -> Tensor:
        """Return how many visible slots of the same page rank lower, [batch, kv_heads, (group,) queries, slots]."""
        position, visible = self.visible.axes(grouped)
        index = numbered(self.page).view(position.shape)
        standings = standing(x, position, visible)
        order = standings.argsort(-1)
        by_page = order.gather(-1, index.expand(standings.shape).gather(-1, order).argsort(dim=-1, stable=True))
        place = by_page.argsort(-1)
        return (place - spread("min", place, visible, index, -1)).float()
