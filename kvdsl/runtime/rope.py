"""Rotary positions: turning a key, or a query, that was rotated at one position so that it stands at another.

RoPE (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 14 and 15) turns every pair of
dims by an angle that grows with the position p:

    (a, b)  ->  (a cos(p f) - b sin(p f),  a sin(p f) + b cos(p f)),      f the pair's frequency

Two turns add up, R(p + s) = R(s) R(p), so what stands at p moves to p + s by a turn of s alone: neither p nor the vector
before its first turn is needed. A factor on the rotated vector (YaRN's attention scaling) stays what it is.
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
        inv_freq: the angle per position of each pair, in radians, float64 [pairs]; negative where the model turns backwards.
        pairing: which dims are a pair: i and i + pairs (`half`), or 2i and 2i + 1 (`interleaved`), counted from `offset`.
        offset: the first rotated dim; rotated are offset .. offset + 2 pairs.
        name: a name for what it does, the same for all that rotate alike; an operator can take no more than a name.
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
        """The first rotation of that name."""
        return _enlisted[name]

    @property
    def pairs(self) -> int:
        """How many pairs of dims are rotated."""
        return self.inv_freq.shape[0]

    def rotate(self, x: Tensor, shift: Tensor) -> Tensor:
        """The vectors moved by `shift` positions, float32 [..., dim].

        Angles are found in float64, because float32 is off by 6e-8 of an angle that may be thousands of turns; the rest is
        float32, whatever the dtype of `x`. A shift of 0 changes nothing at all.

        Args:
            x: rotated queries or keys, [..., dim].
            shift: whole positions, positive or negative, [...]; of a shape that broadcasts with that of `x`.
        """
        cos, sin = self._angles(x, shift)
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shift.shape), -1)
        return self._turned(x, cos, sin)

    def rotate_mean(self, x: Tensor, angle: Tensor, weight: Tensor) -> Tensor:
        """The weighted mean of the vectors turned by several angles, float32 [..., dim].

        Args:
            angle, weight: of each pair, in radians, float64 [turns, ..., pairs].
        """
        cos, sin = ((f(angle) * weight).sum(0).float() for f in (torch.cos, torch.sin))
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1]), -1)
        return self._turned(x, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = self._split(self._rotated(x))
        return self._among_the_others(x, self._join(a * cos - b * sin, a * sin + b * cos))

    def pair_lengths(self, x: Tensor) -> Tensor:
        """At each dim the length of the pair that turns together, float32 [..., dim]; of a dim that does not turn its own."""
        x = x.float()
        length = torch.hypot(*self._split(self._rotated(x)))
        return self._among_the_others(x.abs(), self._join(length, length))

    def rotate_half(self, x: Tensor) -> Tensor:
        """The rotated dims a quarter of a turn further, (a, b) -> (-b, a): [..., 2 pairs] in the dtype of `x`, exact.

        It turns as the vector itself does, so that it may be kept beside it (EQUIP, section 4.3).
        """
        a, b = self._split(self._rotated(x))
        return self._join(-b, a)

    def rotate_by(self, x: Tensor, half: Tensor, shift: Tensor) -> Tensor:
        """`rotate`, given `rotate_half(x)`: x cos + half sin (EQUIP, equation 11); to the bit the same."""
        cos, sin = self._angles(x, shift)
        x = x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shift.shape), -1)
        (a, b), (half_a, half_b) = self._split(self._rotated(x)), self._split(half.float())
        return self._among_the_others(x, self._join(a * cos + half_a * sin, b * cos + half_b * sin))

    def _angles(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the turns, [..., pairs]."""
        angle = shift.unsqueeze(-1) * self.frequencies(x.device)
        return angle.cos().float(), angle.sin().float()

    def _rotated(self, x: Tensor) -> Tensor:
        """The dims that are rotated, [..., 2 pairs]."""
        return x[..., self.offset : self.offset + 2 * self.pairs]

    def _among_the_others(self, x: Tensor, turned: Tensor) -> Tensor:
        """The vectors with their rotated dims replaced."""
        return torch.cat([x[..., : self.offset], turned, x[..., self.offset + 2 * self.pairs :]], dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second dim of each pair, [..., pairs] each."""
        if self.pairing == "half":
            return x[..., : self.pairs], x[..., self.pairs :]
        return x[..., ::2], x[..., 1::2]

    def _join(self, a: Tensor, b: Tensor) -> Tensor:
        """What `_split` took apart, [..., 2 pairs]."""
        return torch.cat([a, b], dim=-1) if self.pairing == "half" else torch.stack([a, b], dim=-1).flatten(-2)

    def frequencies(self, device: torch.device) -> Tensor:
        """`inv_freq` on a device, to which it is moved once."""
        if device == self.inv_freq.device:
            return self.inv_freq
        if device not in self._moved:
            self._moved[device] = self.inv_freq.to(device)
        return self._moved[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rope:
        """Itself: nothing in it ever changes."""
        return self
