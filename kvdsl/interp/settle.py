"""Who is protected, how many must leave, and who they are: pure functions of the live slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask, Scope, ascending, evaluate_number, evaluate_slots, floored
from kvdsl.interp.numbers import Numbers
from kvdsl.ir.nodes import Keep


def overflow(live: int, numbers: Numbers) -> int:
    """How many slots must leave: none before the trigger holds, then down to the target."""
    capacity = numbers.capacity
    if np.isinf(capacity) or numbers.trigger == 0 or live - capacity < numbers.trigger:
        return 0
    return max(0, int(live - _target(live, numbers)))


def room(live: int, numbers: Numbers) -> int:
    """How many slots must leave before one more token is placed, under `cap hard`."""
    if live + 1 <= numbers.capacity + numbers.slack:
        return 0
    return max(0, int(live + 1 - _target(live + 1, numbers)))


def _target(live: int, numbers: Numbers) -> float:
    """How many slots a prune leaves of so many."""
    capacity = numbers.capacity
    if numbers.max_drop <= 0:
        return capacity
    return min(max(live - numbers.max_drop, capacity), capacity + numbers.slack)


def victims(score: Array, protected: Mask, position: Indices, k: int) -> Indices:
    """Indices of the k slots that leave, the first to leave first.

    The lowest-scored unprotected ones leave; when there are too few, the lowest-scored protected ones too,
    the newest last of all.
    """
    order = ascending(score, position)
    reluctant = reluctance(protected, position)
    return order[np.argsort(reluctant[order], kind="stable")][:k]


def reluctance(protected: Mask, position: Indices) -> Indices:
    """Who leaves only after whom, [n]: 0 the unprotected, 1 the protected, 2 the newest if it is protected."""
    return protected.astype(np.int64) * np.where(position == position.max(initial=-1), 2, 1)


def victims_across(heads: Sequence[tuple[Array, Mask, Indices]], numbers: Numbers) -> list[Indices]:
    """Indices of the slots that leave each of the heads that share heads * C tokens.

    A head's last `numbers.floor` slots in the order of leaving stay. Of all the others of all heads the lowest leave;
    of equals the older, then the lower head's.

    Args:
        heads: score, protected and position of each, [n] of its own.
    """
    excess = sum(len(position) for _, _, position in heads) - len(heads) * numbers.capacity
    willing = []
    for head, (score, shield, position) in enumerate(heads):
        reluctant = reluctance(shield, position)
        for slot in victims(score, shield, position, max(0, int(len(position) - numbers.floor))):
            worth = (False, 0.0) if np.isnan(score[slot]) else (True, float(score[slot]))
            willing.append((int(reluctant[slot]), *worth, int(position[slot]), head, int(slot)))
    gone = sorted(willing)[: int(max(0, min(excess, len(willing))))]
    return [np.array([slot for *_, owner, slot in gone if owner == head], dtype=np.int64) for head in range(len(heads))]


def protected(keeps: Iterable[Keep], scope: Scope, position: Indices) -> Mask:
    """Which live slots, [n], may not leave: the union of the keep lines."""
    keeps = tuple(keeps)
    return union(keeps, worths(keeps, scope), scope, position)


def worths(keeps: Iterable[Keep], scope: Scope) -> tuple[Array | None, ...]:
    """What each keep line ranks or chooses by, [n]; None for those that go by position."""
    return tuple(None if keep.by is None else evaluate_slots(keep.by, scope) for keep in keeps)


def union(keeps: Iterable[Keep], by: Iterable[Array | None], scope: Scope, position: Indices) -> Mask:
    """Which slots, [n], the keep lines protect together, where they rank by these values."""
    mask = np.zeros(len(position), dtype=bool)
    for keep, values in zip(keeps, by, strict=True):
        count = 0.0 if keep.count is None else evaluate_number(keep.count, scope)
        if keep.scope == "first":
            mask |= first(position, count)
        elif keep.scope == "last":
            mask |= last(position, count)
        else:
            assert values is not None
            mask |= top(values, position, count) if keep.scope == "top" else values != 0
    return mask


def first(position: Indices, count: float) -> Mask:
    """The `count` slots with the smallest positions."""
    return _lowest(np.argsort(position), count)


def last(position: Indices, count: float) -> Mask:
    """The `count` slots with the largest positions."""
    return _lowest(np.argsort(position)[::-1], count)


def top(by: Array, position: Indices, count: float) -> Mask:
    """The `count` slots that rank highest; of equals the newer ranks higher."""
    return _lowest(ascending(by, position)[::-1], count)


def _lowest(order: Indices, count: float) -> Mask:
    """The first `count` of an order: floored, at least none (a NaN is none) and at most all."""
    count = floored(count)
    mask = np.zeros(len(order), dtype=bool)
    if count > 0:
        mask[order[: int(min(count, len(order)))]] = True
    return mask
