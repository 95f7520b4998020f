"""The order of eviction.

All backends share these rules: the lowest score is evicted first, NaN ranks lowest, -0 equals +0, and among equal scores the newer token
stays. Protected slots are evicted only when no others are left, those in `ends` after other protected ones, and the newest token last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NAN = -(2**31) + 1  # below every number, above the key of a free slot

STAYS = 6
"""The reluctance of a slot that cannot be evicted; see `unwilling`."""


def grade(x: Tensor, position: Tensor) -> Tensor:
    """Return sort keys: by x (NaN lowest, -0 = +0), then by position.

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
    """Return how many slots have a lower key; among equal keys the lower slot counts as lower."""
    return key.argsort(dim=-1, stable=True).argsort(-1)


class Protection:
    """The union of a policy's `keep` lines over [batch, kv_heads, slots].

    Attributes:
        alive: which slots hold a token.
        live: their number, [batch, kv_heads, 1].
        mask: the protected slots.
        ends: protected slots that are evicted after all others, or None.
    """

    def __init__(self, position: Tensor) -> None:
        self.position = position
        self.alive = position >= 0
        self.live = self.alive.sum(-1, keepdim=True)
        self.mask = torch.zeros_like(self.alive)
        self.ends: Tensor | None = None

    def first(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """Protect the `count` live slots of smallest position. With `ends_last`, add them to `ends`."""
        key = torch.where(self.alive, self.position.long(), torch.iinfo(torch.int64).max)
        self._add(_standings(key) < _tokens(count), ends_last)

    def last(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        """Protect the `count` live slots of largest position. With `ends_last`, add them to `ends`."""
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
    """The slots that a selection must contain: the first and last tokens. Other `keep` lines protect from eviction only."""

    def top(self, by: Tensor | float, count: Tensor | float) -> None: ...

    def where(self, condition: Tensor | bool) -> None: ...


def _per_slot(x: Tensor | float, position: Tensor) -> Tensor:
    """Broadcast a value, [batch, kv_heads, 1, slots] or smaller, to [batch, kv_heads, slots]."""
    values = torch.as_tensor(x, device=position.device)
    return (values.squeeze(2) if values.dim() == 4 else values).expand_as(position)


def _tokens(count: Tensor | float) -> Tensor | int:
    return count.floor().clamp(min=0) if isinstance(count, Tensor) else max(0, int(count // 1))


class Ballot:
    """Records one layer's `keep` lines until all heads that decide together have voted. It has the methods of `Protection`."""

    def __init__(self, position: Tensor) -> None:
        self.position = position
        self.live = (position >= 0).sum(-1, keepdim=True)
        self.lines: list[tuple[str, Tensor, Tensor | float, dict[str, bool]]] = []

    def _note(self, form: str, by: Tensor | float | None, count: Tensor | float = 0, **more: bool) -> None:
        self.lines.append((form, self.position if by is None else _per_slot(by, self.position), count, more))

    # Methods that are written out, since `torch.compile` does not trace `partialmethod`.

    def first(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        self._note("first", None, count, ends_last=ends_last)

    def last(self, count: Tensor | float, *, ends_last: bool = False) -> None:
        self._note("last", None, count, ends_last=ends_last)

    def top(self, by: Tensor | float, count: Tensor | float) -> None:
        self._note("top", by, count)

    def where(self, condition: Tensor | bool) -> None:
        self._note("where", condition)


def agreed(ballots: Sequence[Ballot], own: int) -> Protection:
    """Return the joint protection of heads that decide together, for the layer of ballot `own`.

    Ranks are averaged over heads; a condition that holds in one head holds for all. All heads hold the same positions in the same order.
    """
    protection = Protection(ballots[own].position)
    for votes in zip(*(ballot.lines for ballot in ballots), strict=True):
        form, _, count, more = votes[own]
        values = torch.cat([value.to(protection.position.device) for _, value, *_ in votes], 1)
        if form == "where":
            protection.where((values != 0).any(1, keepdim=True))
        elif form == "top":
            protection.top(values.float().mean(1, keepdim=True), count)
        else:
            getattr(protection, form)(count, **more)
    return protection


def mean_score(scores: Sequence[Tensor | float], positions: Sequence[Tensor]) -> Tensor:
    """Return the mean score over all heads and layers, float32 [batch, 1, slots], on the first one's device; NaN if one is NaN."""
    values = [_per_slot(score, position).float() for score, position in zip(scores, positions, strict=True)]
    return torch.cat([value.to(values[0].device) for value in values], 1).mean(1, keepdim=True)


def eviction_order(score: Tensor | float, protection: Protection) -> Tensor:
    """Return each slot's place in the order of eviction, 0 first; free slots come last.

    Args:
        score: float32 [batch, kv_heads, 1, slots].
    """
    return by_places(graded(score, protection.position), unwilling(protection))


def graded(score: Tensor | float, position: Tensor) -> Tensor:
    """Return `grade` of a score, [batch, kv_heads, 1, slots], at positions [batch, kv_heads, slots]."""
    return grade(_per_slot(score, position), position)


def shared_order(score: Tensor | float, protection: Protection, floor: Tensor) -> Tensor:
    """Return each slot's place in the joint order of eviction of a layer's heads; free slots come last.

    The last `floor` slots, [batch, 1, 1], of each head's own order are not evicted. Among equal scores and positions, the lower head evicts
    first.
    """
    live = protection.alive.sum(-1, keepdim=True)
    reluctance = torch.where(eviction_order(score, protection) >= live - floor, STAYS, unwilling(protection))
    key = graded(score, protection.position)
    return by_places(key.flatten(1), reluctance.flatten(1)).view_as(key)


def unwilling(protection: Protection) -> Tensor:
    """Return the reluctance of slots: 0 unprotected, 2 protected, 4 in `ends`, 1 more for a protected newest token; STAYS if free."""
    newest = protection.position == protection.position.amax(-1, keepdim=True)
    reluctance = 2 * protection.mask.int() + (protection.mask & newest).int()
    if protection.ends is not None:
        reluctance += 2 * protection.ends.int()
    return torch.where(protection.alive, reluctance, STAYS)


def by_places(key: Tensor, reluctance: Tensor) -> Tensor:
    """Return places in the order by reluctance, then key."""
    lowest_first = key.argsort(dim=-1, stable=True)
    order = lowest_first.gather(-1, reluctance.gather(-1, lowest_first).argsort(dim=-1, stable=True))
    return order.argsort(-1)


def overflow(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Return how many tokens to evict, [batch, kv_heads, 1]: none before the trigger holds (Lazy Pruning, algorithm 1).

    Args:
        live: [batch, kv_heads, 1].
        numbers: `capacity`, and `trigger`, `slack`, `max_drop` where the policy states them; [batch, 1, 1] each.
    """
    over = live - numbers["capacity"]
    trigger = numbers.get("trigger", torch.ones_like(numbers["capacity"]))
    due = (over >= trigger) & (trigger > 0)
    return torch.where(due, live - _target(live, numbers), torch.zeros_like(over)).clamp(min=0)


def overflow_before_placing(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Return how many tokens to evict so that one more fits under the hard cap; shapes as in `overflow`."""
    most = numbers["capacity"] + numbers.get("slack", torch.zeros_like(numbers["capacity"]))
    leaving = live + 1 - _target(live + 1, numbers)
    return torch.where(live + 1 > most, leaving, torch.zeros_like(leaving)).clamp(min=0)


def _target(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Return how many tokens an eviction leaves."""
    capacity = numbers["capacity"].expand(live.shape)
    if "max_drop" not in numbers:
        return capacity
    drop = numbers["max_drop"]
    staged = torch.minimum(torch.maximum(live - drop, capacity), capacity + numbers["slack"])
    return torch.where(drop > 0, staged, capacity)
