"""Tables of cosines and sines with which kernels rotate keys and queries; see cpu/src/rotate.hpp and gpu/rotate.py."""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope

NEAR_TURNS = 128
"""`near_turns` of cpu/src/rotate.hpp."""

DIGITS = (2**7, 2**12, 2**12)
"""Bases of the three digits of a shift, lowest first, used on GPUs. They cover 31 bits, so the host need not know the text's length."""

_FIRST_REACH = 64 * NEAR_TURNS

_tables: weakref.WeakKeyDictionary[Rope, Angles] = weakref.WeakKeyDictionary()


class Angles:
    """Angles of every shift below `reach` positions, in two tables small enough for the CPU's cache.

    A shift is a multiple of NEAR_TURNS plus a rest. Both angles are computed in float64 and rounded once, so that their sum is as exact
    as either.

    Attributes:
        near: float32 [NEAR_TURNS, 2, pairs], cosines and sines of shifts by 0, 1, ... positions.
        far: float32 [reach / NEAR_TURNS, 2, pairs], of shifts by multiples of NEAR_TURNS.
    """

    def __init__(self, rope: Rope, reach: int) -> None:
        self.near = _table(rope, torch.arange(NEAR_TURNS))
        self.far = _table(rope, torch.arange(0, reach, NEAR_TURNS))

    @property
    def reach(self) -> int:
        """The number of shifts covered, from 0."""
        return len(self.far) * NEAR_TURNS


def angles(rope: Rope, length: int) -> Angles:
    """Return the tables for texts up to `length` tokens. Layers with the same rotation share them; they grow by doubling."""
    known = _tables.get(rope)
    if known is not None and length <= known.reach:
        return known
    reach = _FIRST_REACH if known is None else known.reach
    while reach < length:
        reach *= 2
    _tables[rope] = made = Angles(rope, reach)
    return made


def digits(rope: Rope, device: torch.device) -> Tensor:
    """Return the angles of every digit of a shift, float32 [sum(DIGITS), 2, pairs]: cosines and sines for each digit, lowest first.

    Layers with the same rotation share them.
    """
    return _digits(rope.name, device)


@cache
def _digits(name: str, device: torch.device) -> Tensor:
    units = (1, DIGITS[0], DIGITS[0] * DIGITS[1])
    turns = torch.cat([torch.arange(base) * unit for base, unit in zip(DIGITS, units, strict=True)])
    return _table(Rope.named(name), turns).to(device)


def _table(rope: Rope, turns: Tensor) -> Tensor:
    angle = turns[:, None] * rope.inv_freq.cpu()
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()
