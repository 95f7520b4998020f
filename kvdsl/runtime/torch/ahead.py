"""The places ahead of a query, one after the other or further and further apart, as angles of the pairs of dims that turn."""

from __future__ import annotations

import torch
from torch import Tensor

_FARTHEST, _MOST_STEPS = 65_536, 32
"""How far `ahead` looks at most; see `kvdsl.ir.ops`, which generated packages do not need."""


def places(count: Tensor | float, like: Tensor) -> Tensor:
    """How many places, at least one: float64 [batch or 1, kv_heads or 1, 1, 1, 1]."""
    made = torch.as_tensor(count, dtype=torch.float64, device=like.device)
    made = made if made.dim() == 4 else made.view(1, 1, 1, 1)
    return torch.where(made >= 1, made.floor(), 1.0).unsqueeze(-1)


def series(frequencies: Tensor, newest: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """One angle of each pair, and its weight, that stand for the mean over the next places: the sum of a geometric series."""
    count, half = count.clamp(max=_FARTHEST), frequencies / 2
    angle = 2 * half * (newest.unsqueeze(-1) + (count + 1) / 2)
    weight = torch.where(half.sin() == 0, 1.0, (half * count).sin() / (count * half.sin()))
    return angle.unsqueeze(0), weight.unsqueeze(0)


def steps(frequencies: Tensor, newest: Tensor, count: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """The angles of each pair at places that grow by a factor, and their weights, [steps, batch, kv_heads or 1, 1, 1, pairs]."""
    count = count.clamp(max=_MOST_STEPS)
    step = torch.arange(_MOST_STEPS, dtype=torch.float64, device=newest.device).view(-1, 1, 1, 1, 1, 1)
    by = torch.as_tensor(factor, dtype=torch.float64, device=newest.device)
    place = newest.unsqueeze(-1) + (by if by.dim() == 4 else by.view(1, 1, 1, 1)).unsqueeze(-1) ** step
    return place * frequencies, ((step < count) / count).expand(*place.shape[:-1], len(frequencies))
