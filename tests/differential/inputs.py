"""Vectors that traces are fed with: random and nasty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Make = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def _peaky(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Large logits: a few slots get nearly everything."""
    return rng.standard_normal(shape) * 3


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Few different vectors: many scores are equal."""
    return rng.integers(0, 2, (*shape[:-1], 1)) * np.ones(shape) * 0.5


def _with(value: float, rate: float = 0.02) -> Make:
    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        x = rng.standard_normal(shape)
        bad = rng.random(shape[:-1]) < rate
        x[..., 0] = np.where(bad, value, x[..., 0])
        return x

    return make


INPUTS: dict[str, Make] = {
    "normal": _normal,
    "peaky": _peaky,
    "ties": _ties,
    "zeros": lambda rng, shape: np.zeros(shape),
    "nan": _with(np.nan),
    "inf": _with(np.inf),
    "large": _with(30.0),
}
