"""Operations on whole vectors: rotation, and reductions over a sketch's dims."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl.runtime.torch.numerics import masked_reduce

_FARTHEST, _MOST_STEPS = 65_536, 32
"""Limits of `ahead`, as in `kvdsl.ir.ops`, which generated packages do not import."""


@dataclass(frozen=True)
class Rotation:
    """The model's rotation of vectors.

    Attributes:
        rope: None without rotary positions.
        newest: int32 [batch, 1, any, 1], the newest token's position.
    """

    rope: Rope | None
    newest: Tensor

    def turn(self, x: Tensor, shift: Tensor | float) -> Tensor:
        """Rotate vectors, [batch, kv_heads, ..., dim], by `shift` positions, [batch, kv_heads, ...]."""
        by = torch.as_tensor(shift, dtype=torch.float64, device=x.device)
        shape = torch.broadcast_shapes(x.shape[:-1], by.shape)
        if self.rope is None:
            return x.float().expand(*shape, x.shape[-1])
        return self.rope.rotate(x, by)

    def pairs(self, x: Tensor) -> Tensor:
        """Return at each dim the length of its rotary pair."""
        return x.float().abs() if self.rope is None else self.rope.pair_lengths(x)

    def ahead(self, x: Tensor, count: Tensor | float, factor: Tensor | float | None = None) -> Tensor:
        """Rotate keys, [batch, kv_heads, ..., dim], back by the next positions, on average; see `kvdsl.ir.nodes.Rotate`."""
        if self.rope is None:
            return x.float()
        newest = self.newest.double()
        frequencies = self.rope.frequencies(x.device)
        places = _places(count, newest)
        angle, weight = (
            _series(frequencies, newest, places) if factor is None else _steps(frequencies, newest, places, factor)
        )
        for _ in range(x.dim() - 5):  # group axis
            angle, weight = angle.unsqueeze(3), weight.unsqueeze(3)
        return self.rope.rotate_mean(x, -angle, weight)


def _places(count: Tensor | float, like: Tensor) -> Tensor:
    """Return the number of positions, at least one: float64 [batch or 1, kv_heads or 1, 1, 1, 1]."""
    made = torch.as_tensor(count, dtype=torch.float64, device=like.device)
    made = made if made.dim() == 4 else made.view(1, 1, 1, 1)
    return torch.where(made >= 1, made.floor(), 1.0).unsqueeze(-1)


def _series(frequencies: Tensor, newest: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return an angle per pair, and its weight, equivalent to the mean over the next positions: the sum of a geometric series."""
    count, half = count.clamp(max=_FARTHEST), frequencies / 2
    angle = 2 * half * (newest.unsqueeze(-1) + (count + 1) / 2)
    weight = torch.where(half.sin() == 0, 1.0, (half * count).sin() / (count * half.sin()))
    return angle.unsqueeze(0), weight.unsqueeze(0)


def _steps(frequencies: Tensor, newest: Tensor, count: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return angles at positions that grow by a factor, and their weights, [steps, batch, kv_heads or 1, 1, 1, pairs]."""
    count = count.clamp(max=_MOST_STEPS)
    step = torch.arange(_MOST_STEPS, dtype=torch.float64, device=newest.device).view(-1, 1, 1, 1, 1, 1)
    by = torch.as_tensor(factor, dtype=torch.float64, device=newest.device)
    place = newest.unsqueeze(-1) + (by if by.dim() == 4 else by.view(1, 1, 1, 1)).unsqueeze(-1) ** step
    return place * frequencies, ((step < count) / count).expand(*place.shape[:-1], len(frequencies))


@dataclass(frozen=True)
class Sketch:
    """The few dims of keys and queries by which a query selects.

    Attributes:
        dims: int32 [batch, kv_heads, any], -1 for none.
        size: dims of a key.
    """

    dims: Tensor
    size: int

    def over(self, op: str, x: Tensor) -> Tensor:
        """Reduce the last axis, of size dim or 1, over the sketch's dims."""
        chosen, valid = self._of(x.float())
        return masked_reduce(op, chosen, valid, -1).squeeze(-1)

    def dot(self, query: Tensor, key: Tensor) -> Tensor:
        """Return unscaled dot products over the sketch's dims: [batch, kv_heads, group, queries, slots]."""
        (q, valid), (k, _) = self._of(query.float()), self._of(key.float())
        return torch.einsum("bhgqd,bhsd->bhgqs", q.masked_fill(~valid, 0), k.masked_fill(~valid.squeeze(2), 0))

    def _of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sketch's dims of x [batch, kv_heads, ..., dim], and which of them are valid, bool, broadcast with them."""
        batch, heads, count = self.dims.shape
        index = self.dims.long().view(batch, heads, *(1,) * (x.dim() - 3), count)
        between = x.shape[2:-1]
        full = x.expand(batch, heads, *between, self.size)
        return full.gather(-1, index.clamp(min=0).expand(batch, heads, *between, count)), index >= 0
