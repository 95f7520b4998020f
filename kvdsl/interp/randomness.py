"""The language's `random()`: counter-based, so that every backend draws the same numbers."""

from __future__ import annotations

import numpy as np

from kvdsl.interp.evaluate import Array, Indices

_WORD = 0xFFFFFFFF


def uniform(seed: int, layer: int, head: int, position: Indices, step: int) -> Array:
    """One number in [0, 1) per slot, [n], of 24 bits; `step` is the newest position."""
    return np.array([_one(seed, (layer, head, int(slot), step)) for slot in position], dtype=np.float64)


def _one(seed: int, words: tuple[int, ...]) -> float:
    state = seed & _WORD
    for word in words:
        state = _mix(state ^ (word * 0x9E3779B9 & _WORD))
    return (state >> 8) * 2.0**-24


def _mix(x: int) -> int:
    """MurmurHash3's finalizer of 32 bits."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & _WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _WORD
    return x ^ x >> 16
