"""Rotary positions: move a rotated key or query from one position to another.

RoPE (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 14 and 15) rotates every pair of
dims by an angle that grows with the position p:

    (a, b)  ->  (a cos(p f) - b sin(p f),  a sin(p f) + b cos(p f)),      f the pair's frequency

Rotations add up, R(p + s) = R(s) R(p). So a vector at position p moves to p + s by a rotation by s: neither p nor the unrotated
vector is needed. A constant factor on the rotated vector (YaRN's attention scaling) is preserved.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Pairing = Literal["half", "interleaved"]


_enlisted: dict[str, Rope] = {}


@dataclass(frozen=True, eq=False)
class Rope:
    """How one layer rotates its queries and keys.

    Attributes:
        inv_freq: the angle per position of each pair, in radians, float64 [pairs]; negative if the model rotates backwards.
        pairing: which dims form a pair: i and i + pairs (`half`), or 2i and 2i + 1 (`interleaved`), counted from `offset`.
        offset: the first rotated dim; dims offset .. offset + 2 pairs are rotated.
        name: the same for equal rotations. Operators take it in place of the object.
    """

    inv_freq: Tensor
    pairing: Pairing
    offset: int = 0
    name: str = field(default="", init=False)
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        frequencies = hashlib.sha256(self.inv_freq.double().cpu().numpy().tobytes()).hexdigest()
        object.__setattr__(self, "name", f"{self.pairing} {self.offset} {frequencies}")
        _enlisted.setdefault(self.name, self)

    @staticmethod
    def named(name: str) -> Rope:
        """Return the rotation registered under this name."""
        return _enlisted[name]

    @property
    def pairs(self) -> int:
        """The number of rotated pairs."""
        return self.inv_freq.shape[0]

    def rotate(self, x: Tensor, shift: Tensor) -> Tensor:
        """Move vectors by `shift` positions, float32 [..., dim].

        Angles are computed in float64: in float32 the relative error of 6e-8 matters for angles of thousands of radians. The rest is
        float32 for any dtype of `x`. A shift of 0 changes nothing.

        Args:
            x: rotated queries or keys, [..., dim].
            shift: whole positions, positive or negative; broadcasts with x's shape without `dim`.
        """
        cos, sin = self._angles(x, shift)
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shift.shape), -1)
        return self._turned(x, cos, sin)

    def rotate_mean(self, x: Tensor, angle: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted mean of the vectors rotated by several angles, float32 [..., dim].

        Args:
            angle, weight: of each pair, in radians, float64 [angles, ..., pairs].
        """
        cos, sin = ((f(angle) * weight).sum(0).float() for f in (torch.cos, torch.sin))
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1]), -1)
        return self._turned(x, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = self._split(self._rotated(x))
        return self._among_the_others(x, self._join(a * cos - b * sin, a * sin + b * cos))

    def pair_lengths(self, x: Tensor) -> Tensor:
        """Return at each rotated dim the length of its pair, at other dims the absolute value: float32 [..., dim]."""
        x = x.float()
        length = torch.hypot(*self._split(self._rotated(x)))
        return self._among_the_others(x.abs(), self._join(length, length))

    def rotate_half(self, x: Tensor) -> Tensor:
        """Rotate the rotary dims by a quarter turn, (a, b) -> (-b, a): [..., 2 pairs] in x's dtype, exact.

        The result can be cached beside the key, because it rotates like the key (EQUIP, section 4.3).
        """
        a, b = self._split(self._rotated(x))
        return self._join(-b, a)

    def rotate_by(self, x: Tensor, half: Tensor, shift: Tensor) -> Tensor:
        """Compute `rotate` from `half = rotate_half(x)`, bit for bit: x cos + half sin (EQUIP, equation 11)."""
        cos, sin = self._angles(x, shift)
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shift.shape), -1)
        (a, b), (half_a, half_b) = self._split(self._rotated(x)), self._split(half.float())
        return self._among_the_others(x, self._join(a * cos + half_a * sin, b * cos + half_b * sin))

    def _angles(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the shifts, float32 [..., pairs]."""
        angle = shift.unsqueeze(-1) * self.frequencies(x.device)
        return angle.cos().float(), angle.sin().float()

    def _rotated(self, x: Tensor) -> Tensor:
        """Return the rotated dims, [..., 2 pairs]."""
        return x[..., self.offset : self.offset + 2 * self.pairs]

    def _among_the_others(self, x: Tensor, turned: Tensor) -> Tensor:
        """Put rotated dims back between the others."""
        return torch.cat([x[..., : self.offset], turned, x[..., self.offset + 2 * self.pairs :]], dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second dim of each pair, [..., pairs] each."""
        if self.pairing == "half":
            return x[..., : self.pairs], x[..., self.pairs :]
        return x[..., ::2], x[..., 1::2]

    def _join(self, a: Tensor, b: Tensor) -> Tensor:
        """Undo `_split`: [..., 2 pairs]."""
        return torch.cat([a, b], dim=-1) if self.pairing == "half" else torch.stack([a, b], dim=-1).flatten(-2)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return `inv_freq` on a device, cached per device."""
        if device == self.inv_freq.device:
            return self.inv_freq
        if device not in self._moved:
            self._moved[device] = self.inv_freq.to(device)
        return self._moved[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rope:
        """Return itself: it is immutable."""
        return self
