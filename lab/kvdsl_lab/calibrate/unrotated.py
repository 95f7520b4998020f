"""What a query head's queries are like before they are rotated: their mean, a root of their covariance, how long their pairs are.

Devoto et al., "Expected Attention", 2025 (2510.00636), and Mao et al., "TriAttention", 2026 (2604.04921). The first queries of a stretch
are left out, as kvpress does: they are unlike the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl_lab.calibrate.moments import Moments
from kvdsl_lab.eval.recording import Recording

FIRST = 4
"""Queries of a stretch that are left out."""


@dataclass
class Lengths:
    """Of queries [kv_heads, group, count, dim]: how many came, their sum, and that of the lengths of their pairs, at each dim."""

    count: int
    total: Tensor
    lengths: Tensor
    rope: Rope | None

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(self.count + other.count, self.total + other.total, self.lengths + other.lengths, self.rope)


def _pairs(x: Tensor, rope: Rope | None) -> Tensor:
    return x.abs() if rope is None else rope.pair_lengths(x)


def queries(found: Recording) -> Tensor:
    """As they were before they were rotated, [kv_heads, group, length, dim]."""
    query, rope = found.query[0], found.call.rope
    kept = query if rope is None else rope.rotate(query, -torch.arange(query.shape[2], device=query.device))
    return kept[:, :, FIRST:]


def seen(found: Recording) -> Moments:
    """What a stretch of text adds, [kv_heads, group] vectors."""
    return Moments.of(queries(found))


def centre(moments: Moments) -> Tensor:
    """The mean, [kv_heads, group, dims]."""
    return moments.mean


def root(moments: Moments) -> Tensor:
    """A matrix of which root · rootᵀ is the covariance, [kv_heads, group, dims, dims]."""
    values, vectors = torch.linalg.eigh(moments.covariance)
    made: Tensor = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return made


def seen_pairs(found: Recording) -> Lengths:
    """What a stretch of text adds."""
    query, rope = queries(found), found.call.rope
    return Lengths(query.shape[2], query.double().sum(2), _pairs(query, rope).double().sum(2), rope)


def excess(lengths: Lengths) -> Tensor:
    """How much longer a pair is on average than the pair of the mean, at each dim, [kv_heads, group, dims]."""
    return (lengths.lengths - _pairs(lengths.total, lengths.rope)) / lengths.count
