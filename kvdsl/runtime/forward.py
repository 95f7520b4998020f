"""What the layers of a forward share: results that are the same for all, and one read that answers all questions to the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Later:
    """Questions to the device that wait until one read answers them all.

    Attributes:
        doubts: scalars, and the largest absolute value for which the result is right.
        warnings: conditions, and functions that warn if they hold.
    """

    def __init__(self) -> None:
        self.doubts: list[tuple[Tensor, float]] = []
        self.warnings: list[tuple[Tensor, Callable[[], None]]] = []

    def is_right(self) -> bool:
        """Wait for the device: whether no doubt is justified. In that case give the warnings and forget all."""
        limits = [most for _, most in self.doubts]
        numbers = read([x for x, _ in (*self.doubts, *self.warnings)])
        right = all(abs(number) <= most for number, most in zip(numbers, limits, strict=False))
        if right:
            conditions, warnings = numbers[len(limits) :], self.warnings
            self.doubts, self.warnings = [], []
            for holds, (_, give) in zip(conditions, warnings, strict=True):
                if holds:
                    give()
        return right


def read(scalars: list[Tensor]) -> list[float]:
    """Return scalars as Python numbers, waiting once."""
    return torch.stack([x.to(scalars[0].device) for x in scalars]).tolist() if scalars else []


class Forward:
    """What the layers of a forward share.

    Attributes:
        later: questions for the forward's end; None if every layer asks.
    """

    def __init__(self, later: Later | None = None) -> None:
        self.later = later
        self._made: dict[Hashable, tuple[Tensor | None, Any]] = {}

    def once(self, what: Hashable, of: Tensor | None, make: Callable[[], T]) -> T:
        """Return what the first layer made, of a tensor that does not change during the forward."""
        key = what if of is None else (what, of.data_ptr(), of.shape, of.stride(), of.device)
        if key not in self._made:
            self._made[key] = of, make()  # holding the tensor: no other takes its address
        found: T = self._made[key][1]
        return found
