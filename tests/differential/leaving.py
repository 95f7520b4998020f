"""Who may leave heads of which only ranges are known (`shadow`): the orders of eviction that a float32 backend may come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from kvdsl.interp.evaluate import counted, evaluate_number
from kvdsl.ir.nodes import Keep

from .precision import Scope, bounds_of_slots
from .ranges import Mask, Range, fold, holds, in_top, joined, may_precede, stack
from .shadow import Indices, Shadow, by_place

Doubt: TypeAlias = tuple[Mask, Mask]
"""Of slots: which perhaps, and which for certain."""


class Settle:
    """Who may leave the heads of a layer, or of several, which are listed layer by layer."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self.shadows, self.across = shadows, shadows[0].policy.across is not None
        masks = protection(shadows)
        self.scores = scores(shadows, masks)
        self.orders = [_order(shadow, score, *mask) for shadow, score, mask in zip(shadows, self.scores, masks, strict=True)]
        self.masks = masks

    def allows(self, gone: Sequence[Mask]) -> bool:
        """Whether exactly these slots, [n] per head, may be the first to leave."""
        own = all(order[np.ix_(mine, ~mine)].all() for order, mine in zip(self.orders, gone, strict=True))
        return own and self._is_fair(gone, lambda earlier, later: bool(earlier.all()))

    def decides(self, gone: Sequence[Mask]) -> bool:
        """Whether no others than these may be the first to leave."""
        own = not any(order[np.ix_(~mine, mine)].any() for order, mine in zip(self.orders, gone, strict=True))
        return own and self._is_fair(gone, lambda earlier, later: not later.any())

    def _is_fair(self, gone: Sequence[Mask], good: Callable[[Mask, Mask], bool]) -> bool:
        """Between heads that share a budget: those that left one head against those that another could still lose."""
        if not self.across:
            return True
        for a, mine in enumerate(gone):
            for b, other in enumerate(gone):
                spare = len(other) - other.sum() > self.shadows[b].numbers.floor
                if a != b and spare and self.shadows[a].numbers.layer == self.shadows[b].numbers.layer:
                    earlier, later = self._between(a, b), self._between(b, a)
                    if not good(earlier[np.ix_(mine, ~other)], later[np.ix_(~other, mine)]):
                        return False
        return True

    def _between(self, a: int, b: int) -> Mask:
        """Whether each slot of head a may leave before each of head b."""
        both = (a, b)
        score = joined([self.scores[head] for head in both])
        low, high = zip(*(_reluctance(self.shadows[head], *self.masks[head]) for head in both), strict=True)
        position = np.concatenate([self.shadows[head].position for head in both])
        index = np.repeat(both, [len(self.shadows[head].position) for head in both])
        tie = position * (1 + max(both)) + index
        order = _before(score, np.concatenate(low), np.concatenate(high), tie)
        own = len(self.shadows[a].position)
        return order[:own, own:]


def _before(score: Range, low: Indices, high: Indices, tie: Indices) -> Mask:
    """[n, n]: whether a may leave before b, by classes that lie between low and high, then by score."""
    earlier = low[:, None] < high[None, :]
    same = (low[:, None] <= high[None, :]) & (low[None, :] <= high[:, None])
    return earlier | (same & may_precede(score, tie))


def _reluctance(shadow: Shadow, may: Mask, must: Mask) -> tuple[Indices, Indices]:
    """0 the unprotected, 1 the protected, 2 the newest if it is protected: at least, and at most."""
    newest = shadow.position == shadow.position.max(initial=-1)
    return tuple(mask.astype(np.int64) * np.where(newest, 2, 1) for mask in (must, may))  # type: ignore[return-value]


def _order(shadow: Shadow, score: Range, may: Mask, must: Mask) -> Mask:
    return _before(score, *_reluctance(shadow, may, must), shadow.position)


def protection(shadows: Sequence[Shadow]) -> list[Doubt]:
    """Whom the keeps protect, per head."""
    scopes = [shadow.live_scope() for shadow in shadows]
    masks = [(np.zeros(scope.slots, dtype=bool), np.zeros(scope.slots, dtype=bool)) for scope in scopes]
    for keep in shadows[0].policy.keeps:
        for index, (may, must) in enumerate(_kept(keep, shadows, scopes)):
            masks[index] = (masks[index][0] | may, masks[index][1] | must)
    return masks


def _kept(keep: Keep, shadows: Sequence[Shadow], scopes: Sequence[Scope]) -> list[Doubt]:
    if keep.by is None:
        exact = [by_place(keep, shadow.position, scope) for shadow, scope in zip(shadows, scopes, strict=True)]
        return [(mask, mask) for mask in exact]
    by = [bounds_of_slots(keep.by, scope) for scope in scopes]
    if keep.count is not None:
        by = _agreed(by, shadows, lambda x: fold("mean", x, 0)[0])
        tops = [counted(evaluate_number(keep.count, scope.numbers)) for scope in scopes]
        return [in_top(one, n, shadow.position) for one, n, shadow in zip(by, tops, shadows, strict=True)]
    truths = [holds(one) for one in by]
    ranges = [Range(surely.astype(float), perhaps.astype(float), np.zeros(len(surely), bool)) for surely, perhaps in truths]
    ranges = _agreed(ranges, shadows, lambda x: fold("max", x, 0)[0])
    return [(one.hi > 0, one.lo > 0) for one in ranges]


def scores(shadows: Sequence[Shadow], masks: Sequence[Doubt]) -> list[Range]:
    """The score of every live slot, [n] per head."""
    made = []
    for shadow, (may, must) in zip(shadows, masks, strict=True):
        assert shadow.policy.score is not None
        known = None if (may != must).any() else ~must
        made.append(bounds_of_slots(shadow.policy.score, replace(shadow.live_scope(), unprotected=known)))
    return _agreed(made, shadows, lambda x: fold("mean", x, 0)[0])


def _agreed(values: list[Range], shadows: Sequence[Shadow], agree: Callable[[Range], Range]) -> list[Range]:
    """What heads agree on, where they have to; they hold the same positions, perhaps in different slots."""
    agreed = list(values)
    for group in together(shadows):
        orders = [np.argsort(shadows[index].position) for index in group]
        shared = agree(stack([values[index][order] for index, order in zip(group, orders, strict=True)]))
        for index, order in zip(group, orders, strict=True):
            agreed[index] = shared[np.argsort(order)]
    return agreed


def together(shadows: Sequence[Shadow]) -> list[list[int]]:
    victims = shadows[0].policy.victims
    if victims == "own":
        return []
    if victims == "layers":
        group = [index for index, shadow in enumerate(shadows) if shadow.numbers.evicts]
        return [group] if group else []
    layers = dict.fromkeys(shadow.numbers.layer for shadow in shadows)
    return [[index for index, shadow in enumerate(shadows) if shadow.numbers.layer == layer] for layer in layers]
