"""Arithmetic on which all backends agree: reductions over what is visible, roots that are rounded correctly, and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor


def masked_reduce(op: str, x: Tensor, visible: Tensor, dim: int, argument: Tensor | float | None = None) -> Tensor:
    """Reduce an axis to size 1 over what is visible, by one of `MASKED`, or of `WITH_ARGUMENT` with the argument of its own."""
    return MASKED[op](x, visible, dim) if argument is None else WITH_ARGUMENT[op](x, visible, dim, argument)


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


def _quantile(x: Tensor, visible: Tensor, dim: int, p: Tensor | float) -> Tensor:
    """Between the two values around the place p * (n - 1) of them in order; NaN if any value is, and of nothing."""
    count = visible.sum(dim, keepdim=True)
    ordered = torch.where(visible, x, torch.inf).sort(dim).values
    place = (count - 1).clamp(min=0) * torch.as_tensor(p, dtype=torch.float64, device=x.device).clamp(0, 1)
    rest = (place - place.floor()).to(x.dtype)
    low, high = (ordered.gather(dim, nth.long()) for nth in (place.floor(), place.ceil()))
    lost = (visible & x.isnan()).any(dim, keepdim=True) | (count == 0)
    return torch.where(lost, torch.nan, torch.where(rest == 0, low, (1 - rest) * low + rest * high))


WITH_ARGUMENT: dict[str, Callable[[Tensor, Tensor, int, Tensor | float], Tensor]] = {"quantile": _quantile}
"""Those that take a number, which broadcasts over the rest."""


def sqrt(x: Tensor) -> Tensor:
    """The root of float32 or float64 numbers, rounded correctly.

    On CPUs torch takes that of a vector library, which may be off by one unit in the last place: two tokens that tie elsewhere would
    not tie here. A float32's root is never so near to the middle between two that a double's error would count.
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    if x.device.type != "cpu":
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):  # below zero there is none, which is nothing to warn of
        return torch.from_numpy(numpy.sqrt(x.detach().numpy()))


_WORD = 0xFFFFFFFF


def counter_random(seed: int, layer: int, head: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """A 24-bit random number in [0, 1) for every (layer, head, position, step): murmur3's finaliser over the words."""
    state = torch.full((), seed & _WORD, dtype=torch.int64, device=position.device)
    for word in (torch.full_like(state, layer), head.long(), position, step):
        state = _mix(state ^ (word * 0x9E3779B9 & _WORD))
    return (state >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _WORD
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)
