"""How many slots a layer has: after a prompt, while it grows, and at most."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.state.settings import Settings

AT_ONCE = 1024
"""Slots per KV head allocated at the end of a prompt even if fewer are needed, where the number of slots has a limit."""

_GROWTH = 64
"""The slots of a growing cache are a multiple of this."""

_ALIGNED = 16
"""On accelerators, a cache of fixed size has a multiple of this many slots. Each head's row of positions and columns is then aligned, and
Triton loads several slots at once. With an odd number of slots, `settle` takes 88 registers, not 64, and twice as many instructions.
"""


class Room:
    """Plans the number of slots per KV head.

    Attributes:
        filled: slots in use, an upper bound over all rows with padding counted. A growing cache compares it with its slots.
        limit: the largest number of slots ever needed, or None if there is none.
        grows: whether fewer than `limit` slots are allocated.
        longest: the length of the longest text to come, if known. So many slots suffice for any policy.
        reserves: whether to allocate `limit` slots when the prompt ends, however short it was. Accelerators always do: CUDA graphs need
            tensors that stay in place.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.longest: int | None = None
        self.reserves = False
        self._fixed: bool | None = None
        self.forget()

    def forget(self) -> None:
        """Reset, as if nothing were allocated."""
        self.filled = 0
        self.limit: int | None = None
        self.grows = False

    def plan(self, numbers: Tensor, filled: int, device: torch.device, *, evicts: bool) -> int:
        """Return the slots to allocate at the end of a prompt that fills `filled` of them.

        A cache that will grow gets no spare slots now, while later layers still read the prompt. It grows with the first tokens.

        Args:
            evicts: whether a decode step may evict.
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
        """Return the slots for what a settle keeps, plus the tokens before the next settle.

        A prompt may leave more than that until the first settle; that must fit too.
        """
        _, most = self._settings.table(numbers).most
        if most == torch.inf:  # a head never evicts
            return self.longest
        slots = whole(most if self.longest is None else min(most, self.longest))
        slots = max(slots, self.filled if self._settings.spec.hard_cap else self.filled + 1)
        return slots if device.type == "cpu" else _multiple(slots, _ALIGNED)

    def _bounded(self, numbers: Tensor) -> bool:
        """Whether evictions during decoding ever happen."""
        return self._settings.spec.hard_cap or not self._settings.table(numbers).never_settles

    def most_by_head(self, numbers: Tensor, *, evicts: bool) -> Tensor:
        """Return the most tokens that each KV head holds while decoding, once the prompt has settled: [batch, kv_heads or 1], or inf."""
        if not evicts or not self._bounded(numbers):
            return numbers.new_full((len(numbers), 1), torch.inf)
        return self._settings.most_while_attending(numbers).view(len(numbers), -1)

    @property
    def shrinks(self) -> bool:
        """Whether a KV head's number of tokens may fall, because its budget depends on the data."""
        return self._settings.spec.measures

    def block_size(self, numbers: Tensor) -> int:
        """Return the slots per block."""
        size = self._settings.spec.block or int(self._settings.named(numbers)["block"].max())
        return size if self.limit is None else min(size, self.limit)

    def is_even(self, numbers: Tensor) -> bool:
        """Whether every head of every row comes to fill all slots, except a few."""
        if self._settings.spec.across or (self.limit is not None and self.limit == self.longest):
            return False
        if self.limit is None:
            return True
        least, _ = self._settings.table(numbers).most
        return whole(least) >= self.limit - _ALIGNED

    def grown(self) -> int:
        """Return the slots of a grown cache: a quarter more than filled, so that copying costs little beside attention."""
        return _multiple(self.filled + self.filled // 4, _GROWTH)

    def align(self) -> None:
        """Round the limit up as on an accelerator."""
        self.limit = None if self.limit is None else _multiple(self.limit, _ALIGNED)

    def widen(self, tokens: int) -> None:
        """Raise the limit by `tokens`, at most to the longest text."""
        if self.limit is not None:
            self.limit = self.limit + tokens if self.longest is None else min(self.limit + tokens, self.longest)

    def stays_fixed(self) -> bool:
        """Whether the slots will not grow while decoding, whatever the prompt; asked before it is known."""
        if self._fixed is None:
            most = self._settings.bounded_by()
            self._fixed = most is not None and (self.reserves or bool((most <= AT_ONCE).all()))
        return self._fixed

    def reserve(self) -> None:
        """Allocate all slots at the end of each prompt from now on."""
        self.reserves, self._fixed = True, None


def whole(count: float, what: str = "slots per KV head") -> int:
    """Return the count as an int.

    Raises:
        KvdslError: if it has more than 31 bits.
    """
    if count >= 2**31:
        raise KvdslError(f"{count:g} {what} are more than any cache can have; lower the number")
    return int(count)


def _multiple(count: int, of: int) -> int:
    """Round `count` up to a multiple of `of`."""
    return -(-count // of) * of
