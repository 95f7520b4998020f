"""Who may leave heads of which only ranges are known (`shadow`): the orders of eviction that a float32 backend may come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from kvdsl.interp.evaluate import counted, evaluate_number
from kvdsl.interp.settle import shares
from kvdsl.ir.nodes import Keep

from .precision import Scope, bounds, bounds_of_group, bounds_of_slots
from .ranges import Mask, Range, fold, holds, in_top, joined, may_precede, stack
from .shadow import Indices, Shadow, by_place

Doubt: TypeAlias = tuple[Mask, Mask]
"""Of slots: which perhaps, and which for certain."""


class Settle:
    """Who may leave the heads of a layer, or of several, which are listed layer by layer."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self.shadows, self.across = shadows, shadows[0].policy.heads_share
        self.shares = _shares(shadows)
        masks = protection(shadows)
        self.scores = scores(shadows, masks)
        self.orders = [_order(shadow, score, *mask) for shadow, score, mask in zip(shadows, self.scores, masks, strict=True)]
        self.masks = masks

    def allows(self, gone: Sequence[Mask]) -> bool:
        """Whether exactly these slots, [n] per head, may be the first to leave."""
        own = all(order[np.ix_(mine, ~mine)].all() for order, mine in zip(self.orders, gone, strict=True))
        return (
            own and self._has_floors(gone) and self._is_fair(gone, lambda earlier, later: bool(earlier.all()), surely=True)
        )

    def decides(self, gone: Sequence[Mask]) -> bool:
        """Whether no others than these may be the first to leave."""
        own = not any(order[np.ix_(~mine, mine)].any() for order, mine in zip(self.orders, gone, strict=True))
        known = all(low == high for low, high in self.shares)
        return own and known and self._is_fair(gone, lambda earlier, later: not later.any(), surely=False)

    def _has_floors(self, gone: Sequence[Mask]) -> bool:
        """Whether every head that shares a budget keeps what it cannot lose to the others."""
        kept = ((len(mine) - mine.sum(), min(len(mine), self._floor(head, most=False))) for head, mine in enumerate(gone))
        return not self.across or all(left >= least for left, least in kept)

    def as_many(self, gone: Sequence[Mask]) -> bool:
        """Whether layers that share their budgets by what they are worth may lose so many slots."""
        shared: dict[int, list[int]] = {}
        for index, shadow in enumerate(self.shadows):
            shared.setdefault(shadow.numbers.layer if self.across else -1 - index, []).append(index)
        for group in shared.values():
            held, left = sum(len(gone[i]) for i in group), sum(int(gone[i].sum()) for i in group)
            low, high = (len(group) * self.shares[group[0]][end] for end in (0, 1))
            if not max(0, held - high) <= left <= max(0, held - low):
                return False
        return True

    def _is_fair(self, gone: Sequence[Mask], good: Callable[[Mask, Mask], bool], *, surely: bool) -> bool:
        """Between heads that share a budget: those that left one head against those that another could still lose, or surely could."""
        if not self.across:
            return True
        for a, mine in enumerate(gone):
            for b, other in enumerate(gone):
                spare = len(other) - other.sum() > self._floor(b, surely)
                if a != b and spare and self._share(a, b):
                    earlier, later = self._between(a, b), self._between(b, a)
                    if not good(earlier[np.ix_(mine, ~other)], later[np.ix_(~other, mine)]):
                        return False
        return True

    def _share(self, a: int, b: int) -> bool:
        """Whether two heads lose slots to each other."""
        one, other = (self.shadows[head].numbers for head in (a, b))
        alike = one.layer == other.layer or self.shadows[a].policy.one_pool
        return alike and bool(np.isfinite(one.capacity) and np.isfinite(other.capacity))

    def _floor(self, head: int, most: bool) -> float:
        """What a head cannot lose: at least, or at most."""
        numbers = self.shadows[head].numbers
        low, high = self.shares[head]
        return numbers.with_share(high if most else low).floor if np.isfinite(high) else numbers.floor

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


def _shares(shadows: Sequence[Shadow]) -> list[tuple[float, float]]:
    """What each head's layer gets of the budgets that layers share, at least and at most; its capacity, where they do not."""
    found = [(shadow.numbers.capacity,) * 2 for shadow in shadows]
    by = None if shadows[0].policy.across_layers is None else shadows[0].policy.across_layers.by
    layers = dict.fromkeys(shadow.numbers.layer for shadow in shadows if np.isfinite(shadow.numbers.capacity))
    if by is None or not layers:
        return found
    groups = [[index for index, shadow in enumerate(shadows) if shadow.numbers.layer == layer] for layer in layers]
    worth = [_weight(bounds(by, _of_layer([shadows[index] for index in group]))) for group in groups]
    own = [shadows[group[0]].numbers for group in groups]
    live = [max(len(shadows[index].position) for index in group) for group in groups]

    def share(layer: int, end: int) -> float:
        weights = [one[end if other == layer else 1 - end] for other, one in enumerate(worth)]
        return shares(weights, [one.budget for one in own], [one.layer_floor for one in own], live)[layer]

    for layer, group in enumerate(groups):
        for index in group:
            found[index] = (share(layer, 0), share(layer, 1))
    return found


def _of_layer(shadows: Sequence[Shadow]) -> Scope:
    scopes = [shadow.live_scope() for shadow in shadows]
    return replace(scopes[0], heads=tuple((scope, bounds) for scope in scopes))


def _weight(found: Range) -> tuple[float, float]:
    """What counts of a layer's weight: what is no positive number is 0."""
    low, high, lost = float(found.lo.item()), float(found.hi.item()), bool(found.nan.item())
    least = low if low > 0 and np.isfinite(high) and not lost else 0.0
    return least, min(high, 1e300) if high > 0 and low != np.inf else 0.0


def _before(score: Range, low: Indices, high: Indices, tie: Indices) -> Mask:
    """[n, n]: whether a may leave before b, by classes that lie between low and high, then by score."""
    earlier = low[:, None] < high[None, :]
    same = (low[:, None] <= high[None, :]) & (low[None, :] <= high[:, None])
    return earlier | (same & may_precede(score, tie))


def _reluctance(shadow: Shadow, may: Mask, must: Mask) -> tuple[Indices, Indices]:
    """0 the unprotected, 2 the protected, 4 the ends where they leave last, one more of the newest: at least, and at most."""
    newest = shadow.position == shadow.position.max(initial=-1)
    ends = [keep for keep in shadow.policy.keeps if keep.by is None] if shadow.policy.ends_last else []
    masks = [by_place(keep, shadow.position, shadow.live_scope()) for keep in ends]
    last = np.logical_or.reduce(masks) if masks else np.zeros(len(newest), dtype=bool)
    return tuple(mask.astype(np.int64) * (2 + 2 * last + newest) for mask in (must, may))  # type: ignore[return-value]


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
    score = shadows[0].policy.score
    assert score is not None
    known = [None if (may != must).any() else ~must for may, must in masks]
    scopes = [replace(shadow.live_scope(), unprotected=one) for shadow, one in zip(shadows, known, strict=True)]
    made = []
    for index, shadow in enumerate(shadows):
        layer = [i for i, other in enumerate(shadows) if other.numbers.layer == shadow.numbers.layer]
        peers = tuple((scopes[i], bounds) for i in layer)
        made.append(bounds_of_group(score, replace(scopes[index], heads=peers, place=layer.index(index))))
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
