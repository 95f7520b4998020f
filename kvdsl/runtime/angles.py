"""Cosines and sines for turning keys and queries inside a kernel; see cpu/src/rotate.hpp and gpu/rotate.py."""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope

NEAR_TURNS = 128
"""`near_turns` of cpu/src/rotate.hpp."""

DIGITS = (2**7, 2**12, 2**12)
"""On a GPU, where nobody waits to know how long the text is, a turn of any 31 bits is composed of three: bases, the lowest first."""

_FIRST_REACH = 64 * NEAR_TURNS

_tables: weakref.WeakKeyDictionary[Rope, Angles] = weakref.WeakKeyDictionary()


class Angles:
    """The angles of every turn shorter than `reach` positions, in two factors that are short enough to stay in a cache.

    Found in float64 and rounded once: the sum of two angles is then as exact as one of them.

    Attributes:
        near: float32 [NEAR_TURNS, 2, pairs], cosines and sines of turns by 0, 1, ... positions.
        far: float32 [reach / NEAR_TURNS, 2, pairs], of turns by whole multiples of NEAR_TURNS.
    """

    def __init__(self, rope: Rope, reach: int) -> None:
        self.near = _table(rope, torch.arange(NEAR_TURNS))
        self.far = _table(rope, torch.arange(0, reach, NEAR_TURNS))

    @property
    def reach(self) -> int:
        """The number of turns, that by 0 included."""
        return len(self.far) * NEAR_TURNS


def angles(rope: Rope, length: int) -> Angles:
    """The rotation's tables for a text of that length; layers that rotate alike share them, and they grow by doubling."""
    known = _tables.get(rope)
    if known is not None and length <= known.reach:
        return known
    reach = _FIRST_REACH if known is None else known.reach
    while reach < length:
        reach *= 2
    _tables[rope] = made = Angles(rope, reach)
    return made


def digits(rope: Rope, device: torch.device) -> Tensor:
    """The angles of every digit of a turn, float32 [sum(DIGITS), 2, pairs] on a device: cosines and sines of turns by 0, 1, ...,
    then by multiples of what the digits before can say. All that rotate alike share it.
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
