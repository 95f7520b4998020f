"""Arithmetic that all backends share: masked reductions, correctly rounded roots, random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor


def masked_reduce(op: str, x: Tensor, visible: Tensor, dim: int, argument: Tensor | float | None = None) -> Tensor:
    """Reduce an axis to size 1 over visible entries by an op of `MASKED`, or of `WITH_ARGUMENT` with its argument."""
    return MASKED[op](x, visible, dim) if argument is None else WITH_ARGUMENT[op](x, visible, dim, argument)


def _sum(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    return torch.where(visible, x, 0.0).sum(dim, keepdim=True)


def _mean(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    return _sum(x, visible, dim) / visible.sum(dim, keepdim=True)


def _var(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    """Two passes avoid cancellation."""
    return _mean((x - _mean(x, visible, dim)) ** 2, visible, dim)


def _median(x: Tensor, visible: Tensor, dim: int) -> Tensor:
    """NaN if a value is NaN or none is visible."""
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
"""The reductions named in `kvdsl/lower/torch_expressions.py`."""


def _quantile(x: Tensor, visible: Tensor, dim: int, p: Tensor | float) -> Tensor:
    """Interpolate at rank p * (n - 1). NaN if a value is NaN or none is visible."""
    count = visible.sum(dim, keepdim=True)
    ordered = torch.where(visible, x, torch.inf).sort(dim).values
    place = (count - 1).clamp(min=0) * torch.as_tensor(p, dtype=torch.float64, device=x.device).clamp(0, 1)
    rest = (place - place.floor()).to(x.dtype)
    low, high = (ordered.gather(dim, nth.long()) for nth in (place.floor(), place.ceil()))
    lost = (visible & x.isnan()).any(dim, keepdim=True) | (count == 0)
    return torch.where(lost, torch.nan, torch.where(rest == 0, low, (1 - rest) * low + rest * high))


WITH_ARGUMENT: dict[str, Callable[[Tensor, Tensor, int, Tensor | float], Tensor]] = {"quantile": _quantile}
"""Reductions with a number as argument, which broadcasts."""


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded root of float32 or float64 numbers.

    On CPUs, torch's vector library may be off by one unit in the last place, which would break ties that other backends have. For float32,
    rounding a double's root gives the correct result.
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    if x.device.type != "cpu":
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):  # negative numbers give NaN, without a warning
        return torch.from_numpy(numpy.sqrt(x.detach().numpy()))


_WORD = 0xFFFFFFFF


def counter_random(seed: int, layer: int, head: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Return a 24-bit random number in [0, 1) for each (layer, head, position, step): murmur3's finalizer over these words."""
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
