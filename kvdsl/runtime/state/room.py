"""How many slots a layer has room for: at the end of a prompt, while it grows, and for ever."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.state.settings import Settings

AT_ONCE = 1024
"""Slots per KV head that are allocated at the end of a prompt without need, where they are enough for ever."""

_GROWTH = 64
"""A cache that grows has a multiple of this many slots."""

_ALIGNED = 16
"""And so has one on an accelerator of this many: then every head's row of positions and columns begins where a vector may, and Triton
reads several slots at once. An odd number of them costs `settle` 88 registers in place of 64, and twice as many instructions."""


class Room:
    """How many slots per KV head there are to be.

    Attributes:
        filled: slots that a KV head may need by now, tokens of every row and padding counted; a cache that grows goes by it.
        limit: slots that are enough for ever, or None where nothing is.
        grows: whether there are fewer slots than that.
        longest: tokens of the longest text that will come, where somebody knows: slots for these are enough under any policy.
        reserves: whether as many as `limit` are allocated as soon as the prompt ends, however short it was. Accelerators, whose graphs
            want tensors that stay where they are, always do.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.longest: int | None = None
        self.reserves = False
        self._fixed: bool | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing is allocated."""
        self.filled = 0
        self.limit: int | None = None
        self.grows = False

    def plan(self, numbers: Tensor, filled: int, device: torch.device, *, evicts: bool) -> int:
        """Slots to allocate at the end of a prompt that has filled so many.

        Where the cache will grow just what is there, while later layers read the prompt; the first tokens make it grow.

        Args:
            evicts: whether a decoded token may make others leave.
        """
        self.filled = filled
        self.limit = self._enough_for_ever(numbers, device) if evicts and self._bounded(numbers) else self.longest
        if self.limit is None:
            slots = max(1, filled)
        elif self.reserves or device.type != "cpu":
            slots = self.limit
        else:
            slots = min(self.limit, max(AT_ONCE, filled + 1))
        self.grows = slots != self.limit
        return slots

    def _enough_for_ever(self, numbers: Tensor, device: torch.device) -> int | None:
        """What a settle keeps and what comes in before the next.

        A prompt may leave more than that, of which the first settle rids the cache: that must fit as well.
        """
        _, most = self._settings.table(numbers).most
        if most == torch.inf:  # some heads keep everything
            return self.longest
        slots = whole(most if self.longest is None else min(most, self.longest))
        slots = max(slots, self.filled if self._settings.spec.hard_cap else self.filled + 1)
        return slots if device.type == "cpu" else _multiple(slots, _ALIGNED)

    def _bounded(self, numbers: Tensor) -> bool:
        """Whether decoded tokens that may make others leave do so, sooner or later."""
        return self._settings.spec.hard_cap or not self._settings.table(numbers).never_settles

    def most_by_head(self, numbers: Tensor, *, evicts: bool) -> Tensor:
        """Tokens that each KV head holds at most while decoding, once what a prompt left has settled: [batch, kv_heads or 1], or inf."""
        if not evicts or not self._bounded(numbers):
            return numbers.new_full((len(numbers), 1), torch.inf)
        return self._settings.most_while_attending(numbers).view(len(numbers), -1)

    @property
    def shrinks(self) -> bool:
        """Whether a KV head may come to hold fewer tokens than it did, because its budget reads the data."""
        return self._settings.spec.measures

    def block_size(self, numbers: Tensor) -> int:
        """Slots of a block, of a policy whose slots lie in blocks."""
        size = self._settings.spec.block or int(self._settings.named(numbers)["block"].max())
        return size if self.limit is None else min(size, self.limit)

    def is_even(self, numbers: Tensor) -> bool:
        """Whether every head of every row comes to fill its slots, all but a few."""
        if self._settings.spec.across or (self.limit is not None and self.limit == self.longest):
            return False
        if self.limit is None:
            return True
        least, _ = self._settings.table(numbers).most
        return whole(least) >= self.limit - _ALIGNED

    def grown(self) -> int:
        """Slots for what is filled and a quarter more, so that what growing copies stays a small part of what attention reads."""
        return _multiple(self.filled + self.filled // 4, _GROWTH)

    def align(self) -> None:
        """Be content with as many slots as on an accelerator."""
        self.limit = None if self.limit is None else _multiple(self.limit, _ALIGNED)

    def widen(self, tokens: int) -> None:
        """Be content with so many slots more than are enough for ever, or with those for the longest text."""
        if self.limit is not None:
            self.limit = self.limit + tokens if self.longest is None else min(self.limit + tokens, self.longest)

    def stays_fixed(self) -> bool:
        """Whether, before a prompt is known, the slots will not grow while decoding even after a long one."""
        if self._fixed is None:
            most = self._settings.bounded_by()
            self._fixed = most is not None and (self.reserves or bool((most <= AT_ONCE).all()))
        return self._fixed

    def reserve(self) -> None:
        """From the next prompt's end on, have all slots that will ever be needed."""
        self.reserves, self._fixed = True, None


def whole(count: float, what: str = "slots per KV head") -> int:
    """The count as an int.

    Raises:
        KvdslError: if no cache can have so many.
    """
    if count >= 2**31:
        raise KvdslError(f"{count:g} {what} are more than any cache can have; lower the number")
    return int(count)


def _multiple(count: int, of: int) -> int:
    """The smallest one that is not below `count`."""
    return -(-count // of) * of
