"""Protection, the number of evictions, and the victims: pure functions of the live slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdsl.interp.evaluate import (
    Array,
    Indices,
    Mask,
    Scope,
    ascending,
    at_least_one,
    evaluate_number,
    evaluate_slots,
    floored,
)
from kvdsl.interp.numbers import Numbers
from kvdsl.ir.nodes import Expr, Keep, Number, Policy, is_call
from kvdsl.ir.visitors import rewrite


def overflow(live: int, numbers: Numbers) -> int:
    """Return how many slots to evict: none before the trigger fires, then down to the target."""
    capacity = numbers.capacity
    if np.isinf(capacity) or numbers.trigger == 0 or live - capacity < numbers.trigger:
        return 0
    return max(0, int(live - _target(live, numbers)))


def room(live: int, numbers: Numbers) -> int:
    """Return how many slots to evict before one more token is placed, under `cap hard`."""
    if live + 1 <= numbers.capacity + numbers.slack:
        return 0
    return max(0, int(live + 1 - _target(live + 1, numbers)))


def _target(live: int, numbers: Numbers) -> float:
    """Return the number of slots after a prune."""
    capacity = numbers.capacity
    if numbers.max_drop <= 0:
        return capacity
    return min(max(live - numbers.max_drop, capacity), capacity + numbers.slack)


def victims(score: Array, standing: Indices, position: Indices, k: int) -> Indices:
    """Return the indices of k victims, the first to be evicted first.

    Lower standing goes first, then lower score; among the protected the newest goes last.
    """
    order = ascending(score, position)
    order_of_yielding = reluctance(standing, position)
    return order[np.argsort(order_of_yielding[order], kind="stable")][:k]


def reluctance(standing: Indices, position: Indices) -> Indices:
    """Return a key that sorts slots, [n], by when they yield: by standing, and among the protected the newest last."""
    newest = (standing > 0) & (position == position.max(initial=-1))
    found: Indices = 2 * standing.astype(np.int64) + newest
    return found


def victims_across(heads: Sequence[tuple[Array, Indices, Indices]], numbers: Sequence[Numbers]) -> list[Indices]:
    """Return the indices of the victims of heads that share their budgets: those of a layer, or of all layers.

    Each head keeps its last `floor` slots in the order of eviction. Of all other slots of all heads the lowest are evicted; among
    equals the older, then the lower head's.

    Args:
        heads: score, standing and position of each, [n] per head.
        numbers: of each.
    """
    excess = sum(len(position) for _, _, position in heads) - sum(own.capacity for own in numbers)
    candidates = []
    for head, ((score, standing, position), own) in enumerate(zip(heads, numbers, strict=True)):
        order_of_yielding = reluctance(standing, position)
        for slot in victims(score, standing, position, max(0, int(len(position) - own.floor))):
            worth = (False, 0.0) if np.isnan(score[slot]) else (True, float(score[slot]))
            candidates.append((int(order_of_yielding[slot]), *worth, int(position[slot]), head, int(slot)))
    gone = sorted(candidates)[: int(max(0, min(excess, len(candidates))))]
    return [np.array([slot for *_, owner, slot in gone if owner == head], dtype=np.int64) for head in range(len(heads))]


def shares(weights: Sequence[float], budgets: Sequence[float], floors: Sequence[float], live: Sequence[int]) -> list[float]:
    """Return the tokens per KV head for each layer that shares its budget.

    Each gets its floor, and the rest in proportion to the weights. Weights that are not positive numbers count as 0; if all do, shares
    are equal. A layer never gets more than it holds; the others share what it leaves. Shares are rounded down.

    Args:
        live: the tokens that each layer holds.
    """
    worth = [weight if np.isfinite(weight) and weight > 0 else 0.0 for weight in weights]
    least = [min(floor, budget) for floor, budget in zip(floors, budgets, strict=True)]
    got: dict[int, float] = {}
    while True:
        sharing = [layer for layer in range(len(budgets)) if layer not in got]
        rest = sum(budgets) - sum(got.values()) - sum(least[layer] for layer in sharing)
        wants = {layer: worth[layer] for layer in sharing}
        if not sum(wants.values()):
            wants = dict.fromkeys(sharing, 1.0)
        found = {layer: least[layer] + rest * wants[layer] / sum(wants.values()) for layer in sharing}
        full = {layer: float(live[layer]) for layer in sharing if found[layer] >= live[layer]}
        if not full:
            return [float(np.floor((got | found)[layer])) for layer in range(len(budgets))]
        got |= full


def protected(keeps: Iterable[Keep], scope: Scope, position: Indices) -> Mask:
    """Return which live slots, [n], are protected: the union of the keep lines."""
    keeps = tuple(keeps)
    return standing(keeps, worths(keeps, scope), scope, position) > 0


def worths(keeps: Iterable[Keep], scope: Scope) -> tuple[Array | None, ...]:
    """Return what each keep line ranks or filters by, [n]; None for those by position."""
    return tuple(None if keep.by is None else evaluate_slots(keep.by, scope) for keep in keeps)


def standing(
    keeps: Iterable[Keep], by: Iterable[Array | None], scope: Scope, position: Indices, *, ends_last: bool = False
) -> Indices:
    """Return the standing of slots, [n], given the values of the keep lines.

    0 is unprotected. 1 is protected, evicted only after those. With `ends_last` the first and last tokens are 2, evicted after all
    others.
    """
    found = np.zeros(len(position), dtype=np.int64)
    for keep, values in zip(keeps, by, strict=True):
        count = 0.0 if keep.count is None else evaluate_number(keep.count, scope)
        step = 2 if ends_last and keep.row.place else 1
        found = np.where(PROTECTS[keep.scope](position, values, count), np.maximum(found, step), found)
    return found


PROTECTS: Mapping[str, Callable[[Indices, Any, float], Mask]] = {
    "first": lambda position, by, count: _lowest(np.argsort(position), count),
    "last": lambda position, by, count: _lowest(np.argsort(position)[::-1], count),
    "top": lambda position, by, count: _lowest(ascending(by, position)[::-1], count),
    "where": lambda position, by, count: by != 0,
}
"""Which slots each form of `keep` protects, by their positions, [n], what it ranks or filters by, [n], and its count. Among equals the
newer slot ranks higher.
"""


def _lowest(order: Indices, count: float) -> Mask:
    """Return the first `count` of an order, rounded down; negative counts and NaN are none."""
    count = floored(count)
    mask = np.zeros(len(order), dtype=bool)
    if count > 0:
        mask[order[: int(min(count, len(order)))]] = True
    return mask


def measured(
    policy: Policy, numbers: Sequence[Numbers], scopes: Sequence[Scope], groups: Sequence[Sequence[int]]
) -> list[Numbers]:
    """Return the heads' numbers with their budgets at this settle.

    Args:
        scopes: what each head's expressions see.
        groups: indices of heads that share victims, whose counts are averaged.
    """
    if policy.measured is None:
        return list(numbers)
    found = list(numbers)
    together = {index: group for group in groups for index in group}
    for index, own in enumerate(numbers):
        expr = _averaged(policy.measured, [scopes[other] for other in together.get(index, [index])])
        tokens = at_least_one(evaluate_number(expr, scopes[index]))
        found[index] = replace(own, budget=min(own.budget, tokens))
    return found


@np.errstate(all="ignore")
def _averaged(expr: Expr, scopes: Sequence[Scope]) -> Expr:
    """Replace what an expression finds of the slots by its mean over the heads."""

    def rule(part: Expr) -> Expr | None:
        if part.kind != "reduce" and not is_call(part, "enough"):
            return None
        return Number(value=float(np.mean([evaluate_number(part, scope) for scope in scopes])))

    return rewrite(expr, rule)
