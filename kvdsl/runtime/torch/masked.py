"""Reductions over what is visible of an axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def masked_reduce(op: str, x: Tensor, visible: Tensor, dim: int) -> Tensor:
    """Reduce an axis to size 1 over what is visible, by one of `MASKED`."""
    return MASKED[op](x, visible, dim)


def _sum(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    return torch.where(visible, x, 0.0).sum(dim, keepdim=True)


def _mean(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    return _sum(x, visible, dim) / visible.sum(dim, keepdim=True)


def _var(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    """In two passes: no cancellation."""
    return _mean((x - _mean(x, visible, dim)) ** 2, visible, dim)


def _median(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    """NaN if any value is, and of nothing."""
    count = visible.sum(dim, keepdim=True)
    ordered = torch.where(visible, x, torch.inf).sort(dim).values
    shape = list(ordered.shape)
    shape[dim] = 1
    low, high = (ordered.gather(dim, nth.clamp(min=0).expand(shape)) for nth in ((count - 1) // 2, count // 2))
    lost = (visible & x.isnan()).any(dim, keepdim=True) | (count == 0)
    return torch.where(lost, torch.nan, 0.5 * low + 0.5 * high)


MASKED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda x, visible, dim: _var(x, visible, dim).sqrt(),
    "max": lambda x, visible, dim: torch.where(visible, x, -torch.inf).amax(dim, keepdim=True),
    "median": _median,
    "min": lambda x, visible, dim: torch.where(visible, x, torch.inf).amin(dim, keepdim=True),
}
"""The reductions that `kvdsl/lower/torch_expressions.py` says there are."""
