"""Who is protected, how many must leave, and who they are: pure functions of the live slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask, Scope, evaluate_number, evaluate_slots
from kvdsl.interp.numbers import Numbers, floored
from kvdsl.ir.nodes import Keep


def overflow(live: int, numbers: Numbers) -> int:
    """How many slots must leave: none before the trigger holds, then down to the target."""
    capacity = numbers.budget
    if np.isinf(capacity) or numbers.trigger == 0 or live - capacity < numbers.trigger:
        return 0
    target = capacity
    if numbers.max_drop > 0:
        target = min(max(live - numbers.max_drop, capacity), capacity + numbers.slack)
    return max(0, int(live - target))


def victims(score: Array, protected: Mask, position: Indices, k: int) -> Indices:
    """Indices of the k slots that leave, the first to leave first.

    The lowest-scored unprotected ones leave; when there are too few, the lowest-scored protected ones too,
    the newest last of all.
    """
    order = ascending(score, position)
    newest = position.argmax()
    last_of_all = [slot for slot in order if protected[slot] and slot == newest]
    unwilling = [slot for slot in order if protected[slot] and slot != newest]
    willing = [slot for slot in order if not protected[slot]]
    return np.array((willing + unwilling + last_of_all)[:k], dtype=np.int64)


def ascending(x: Array, position: Indices) -> Indices:
    """Indices from lowest to highest: NaN below everything, -0 equal to +0, of equals the older first."""
    is_number = ~np.isnan(x)
    return np.lexsort((position, np.where(is_number, x, 0), is_number)).astype(np.int64)


def protected(keeps: Iterable[Keep], scope: Scope, position: Indices) -> Mask:
    """Which live slots, [n], may not leave: the union of the keep lines."""
    mask = np.zeros(len(position), dtype=bool)
    for keep in keeps:
        mask |= _KEEPS[keep.scope](keep, scope, position)
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


def _count(keep: Keep, scope: Scope) -> float:
    assert keep.count is not None
    return evaluate_number(keep.count, scope)


def _by(keep: Keep, scope: Scope) -> Array:
    assert keep.by is not None
    return evaluate_slots(keep.by, scope)


_KEEPS: dict[str, Callable[[Keep, Scope, Indices], Mask]] = {
    "first": lambda keep, scope, position: first(position, _count(keep, scope)),
    "last": lambda keep, scope, position: last(position, _count(keep, scope)),
    "top": lambda keep, scope, position: top(_by(keep, scope), position, _count(keep, scope)),
    "where": lambda keep, scope, position: _by(keep, scope) != 0,
}
