"""Who leaves: the order of eviction, in torch.

The rules are design corners that every backend shares: the lowest score leaves first, a NaN ranks lowest, -0 equals +0, of equal
scores the newer is kept; protected slots leave only when there are no others, those that are `ends` last, and of either the newest last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NAN = -(2**31) + 1  # below every number, above what marks a free slot

STAYS = 6
"""How unwilling a slot is that cannot leave; see `unwilling`."""


def grade(x: Tensor, position: Tensor) -> Tensor:
    """Integers in the order in which slots rank: by `x` (NaN lowest, -0 = +0), then by position.

    Args:
        x: float32 [..., slots].
        position: int32 [..., slots], at least 0.

    Returns:
        int64 [..., slots].
    """
    bits = (x.float() + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(x.isnan(), _NAN, ordered)
    return (ordered.long() << 32) | position.long().clamp(min=0)


def _standings(key: Tensor) -> Tensor:
    """How many slots have a lower key than each; of equal keys the lower slot counts as lower."""
    return key.argsort(dim=-1, stable=True).argsort(-1)


class Protection:
    """The union of a policy's `keep` lines over [batch, kv_heads, slots]; `live` tells the slots that hold a token.

    Attributes:
        mask: what they protect.
        ends: of that, what leaves only when nothing else is left.
    """

    def __init__(self, position: Tensor) -> None:
        self.position = position
        self.alive = position >= 0
        self.live = self.alive.sum(-1, keepdim=True)
        self.mask = torch.zeros_like(self.alive)
        self.ends: Tensor | None = None

    def first(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """Protect the `count` live slots with the smallest positions; with `ends_last` they leave only when nothing else is left."""
        key = torch.where(self.alive, self.position.long(), torch.iinfo(torch.int64).max)
        self._add(_standings(key) < _tokens(count), ends_last)

    def last(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """Protect the `count` live slots with the largest positions, likewise."""
        self._add(_standings(self.position.long()) >= self.mask.shape[-1] - _tokens(count), ends_last)

    def top(self, by: Tensor | float, count: Tensor | float) -> None:
        """Protect the `count` live slots that rank highest by `by`, [batch, kv_heads, 1, slots]."""
        key = torch.where(self.alive, grade(_per_slot(by, self.position), self.position), torch.iinfo(torch.int64).min)
        self._add(_standings(key) >= self.mask.shape[-1] - _tokens(count))

    def where(self, condition: Tensor | bool) -> None:
        """Protect the slots where the condition, [batch, kv_heads, 1, slots], holds."""
        self._add(_per_slot(condition, self.position) != 0)

    def _add(self, mask: Tensor, ends_last: bool = False) -> None:
        mask = mask & self.alive
        self.mask |= mask
        if ends_last:
            self.ends = mask if self.ends is None else self.ends | mask


class Places(Protection):
    """What a selection cannot leave out: the first and last tokens. Ranks and conditions protect from eviction only."""

    def top(self, by: Tensor | float, count: Tensor | float) -> None:
        """Nothing."""

    def where(self, condition: Tensor | bool) -> None:
        """Nothing."""


def _per_slot(x: Tensor | float, position: Tensor) -> Tensor:
    """A value over slots, [batch, kv_heads, 1, slots] or with any of these axes of size 1, as [batch, kv_heads, slots]."""
    values = torch.as_tensor(x, device=position.device)
    return (values.squeeze(2) if values.dim() == 4 else values).expand_as(position)


def _tokens(count: Tensor | float) -> Tensor | int:
    """Counts of tokens are floored."""
    return count.floor().clamp(min=0) if isinstance(count, Tensor) else max(0, int(count // 1))


class Ballot:
    """What one layer's `keep` lines ask for, noted until all heads that must agree have voted; made like a `Protection`."""

    def __init__(self, position: Tensor) -> None:
        self.position = position
        self.live = (position >= 0).sum(-1, keepdim=True)
        self.lines: list[tuple[str, Tensor, Tensor | float]] = []
        self.ends_last = False

    def first(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """See `Protection.first`."""
        self.ends_last = ends_last
        self.lines.append(("first", self.position, count))

    def last(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """See `Protection.last`."""
        self.ends_last = ends_last
        self.lines.append(("last", self.position, count))

    def top(self, by: Tensor | float, count: Tensor | float) -> None:
        """See `Protection.top`."""
        self.lines.append(("top", _per_slot(by, self.position), count))

    def where(self, condition: Tensor | bool) -> None:
        """See `Protection.where`."""
        self.lines.append(("where", _per_slot(condition, self.position), 0))


def agreed(ballots: Sequence[Ballot], own: int) -> Protection:
    """What heads protect that must agree, for the layer of ballot `own`: what a line ranks by is averaged, a condition of one
    head holds for all.

    Their slots hold the same positions in the same order, since they have always agreed.
    """
    protection = Protection(ballots[own].position)
    for votes in zip(*(ballot.lines for ballot in ballots), strict=True):
        scope, _, count = votes[own]
        values = torch.cat([value.to(protection.position.device) for _, value, _ in votes], 1)
        if scope == "top":
            protection.top(values.float().mean(1, keepdim=True), count)
        elif scope == "where":
            protection.where((values != 0).any(1, keepdim=True))
        else:
            (protection.first if scope == "first" else protection.last)(count, ends_last=ballots[own].ends_last)
    return protection


def mean_score(scores: Sequence[Tensor | float], positions: Sequence[Tensor]) -> Tensor:
    """The mean over all heads of all layers, float32 [batch, 1, slots], on the first one's device; NaN where one is."""
    values = [_per_slot(score, position).float() for score, position in zip(scores, positions, strict=True)]
    return torch.cat([value.to(values[0].device) for value in values], 1).mean(1, keepdim=True)


def eviction_order(score: Tensor | float, protection: Protection) -> Tensor:
    """Each slot's place in the order of leaving, 0 first; free slots come last.

    Args:
        score: float32 [batch, kv_heads, 1, slots].
    """
    return by_places(graded(score, protection.position), unwilling(protection))


def graded(score: Tensor | float, position: Tensor) -> Tensor:
    """`grade` of a score, [batch, kv_heads, 1, slots], at [batch, kv_heads, slots] positions."""
    return grade(_per_slot(score, position), position)


def shared_order(score: Tensor | float, protection: Protection, floor: Tensor) -> Tensor:
    """Each slot's place in the order in which a layer's heads lose slots to each other; free slots come last.

    Every head's last `floor` slots, [batch, 1, 1], in its own order cannot leave. Of equal scores and positions the lower head's
    leaves first.
    """
    live = protection.alive.sum(-1, keepdim=True)
    reluctance = torch.where(eviction_order(score, protection) >= live - floor, STAYS, unwilling(protection))
    key = graded(score, protection.position)
    return by_places(key.flatten(1), reluctance.flatten(1)).view_as(key)


def unwilling(protection: Protection) -> Tensor:
    """0 free to leave, 2 protected, 4 one of `ends`, and one more for the newest if it is protected; STAYS where there is no token."""
    newest = protection.position == protection.position.amax(-1, keepdim=True)
    reluctance = 2 * protection.mask.int() + (protection.mask & newest).int()
    if protection.ends is not None:
        reluctance += 2 * protection.ends.int()
    return torch.where(protection.alive, reluctance, STAYS)


def by_places(key: Tensor, reluctance: Tensor) -> Tensor:
    """Each one's place in the order by unwillingness, then by key."""
    lowest_first = key.argsort(dim=-1, stable=True)
    order = lowest_first.gather(-1, reluctance.gather(-1, lowest_first).argsort(dim=-1, stable=True))
    return order.argsort(-1)


def overflow(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """How many must leave, [batch, kv_heads, 1]: none before the trigger holds (Lazy Pruning, algorithm 1).

    Args:
        live: [batch, kv_heads, 1].
        numbers: `capacity`, and `trigger`, `slack`, `max_drop` where the policy states them; [batch, 1, 1] each.
    """
    over = live - numbers["capacity"]
    trigger = numbers.get("trigger", torch.ones_like(numbers["capacity"]))
    due = (over >= trigger) & (trigger > 0)
    return torch.where(due, live - _target(live, numbers), torch.zeros_like(over)).clamp(min=0)


def overflow_before_placing(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """How many must leave so that one more token does not exceed the hard cap; shapes as in `overflow`."""
    most = numbers["capacity"] + numbers.get("slack", torch.zeros_like(numbers["capacity"]))
    leaving = live + 1 - _target(live + 1, numbers)
    return torch.where(live + 1 > most, leaving, torch.zeros_like(leaving)).clamp(min=0)


def _target(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """To how many a prune goes."""
    capacity = numbers["capacity"].expand(live.shape)
    if "max_drop" not in numbers:
        return capacity
    drop = numbers["max_drop"]
    staged = torch.minimum(torch.maximum(live - drop, capacity), capacity + numbers["slack"])
    return torch.where(drop > 0, staged, capacity)
