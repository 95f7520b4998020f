"""Rotary positions: rotate a vector from one position to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from kvdsl.interp.evaluate import Array, Indices


@dataclass(frozen=True)
class Rope:
    """A model's rotary positions: each pair of dims rotates by its own frequency times the position.

    Attributes:
        inv_freq: [pairs], radians per position.
        pairing: the dims of a pair: `half` d and d + pairs, `interleaved` 2 d and 2 d + 1.
        offset: the first rotated dim; only offset .. offset + 2 * pairs are rotated.
    """

    inv_freq: Array
    pairing: Literal["half", "interleaved"] = "half"
    offset: int = 0

    @np.errstate(all="ignore")
    def rotate(self, x: ArrayLike, shift: ArrayLike) -> Array:
        """Rotate vectors, [..., dim], by `shift` positions, [...]; negative shifts rotate back."""
        turned = np.array(x, dtype=np.float64)
        angle = np.asarray(shift, dtype=np.float64)[..., None] * self.inv_freq
        first, second = self._pairs()
        a, b = turned[..., first], turned[..., second]
        turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., second] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    @np.errstate(all="ignore")
    def pairs(self, x: ArrayLike) -> Array:
        """Return at each dim of vectors, [..., dim], the L2 norm of its pair, or the magnitude of a dim that is not rotated."""
        lengths = np.abs(np.array(x, dtype=np.float64))
        first, second = self._pairs()
        lengths[..., first] = lengths[..., second] = np.sqrt(lengths[..., first] ** 2 + lengths[..., second] ** 2)
        return lengths

    def _pairs(self) -> tuple[Indices, Indices]:
        """Return the first and the second dim of each pair, [pairs] each."""
        pair = np.arange(len(self.inv_freq), dtype=np.int64)
        if self.pairing == "half":
            return self.offset + pair, self.offset + len(pair) + pair
        return self.offset + 2 * pair, self.offset + 2 * pair + 1
