"""How many tokens a count that reads the data may come to, where a backend's float32 decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdsl.interp.evaluate import at_least_one, evaluate_number
from kvdsl.interp.settle import overflow
from kvdsl.ir.nodes import ColumnRef, Expr, Number, is_call
from kvdsl.ir.visitors import rewrite

from .precision import Scope, bounds
from .ranges import Range, fold, stack
from .shadow import Shadow

Least = tuple[float, float]
"""At least, and at most."""


def leaving(shadows: Sequence[Shadow], groups: Sequence[Sequence[int]]) -> list[Least]:
    """How many tokens may leave each head at a settle."""
    together = {index: group for group in groups for index in group}
    scopes = [shadow.live_scope() for shadow in shadows]
    found = []
    for index, shadow in enumerate(shadows):
        least, most = 0.0, np.inf
        if shadow.policy.measured is not None:
            heads = [scopes[other] for other in together.get(index, [index])]
            least, most = tokens(shadow.policy.measured, heads, scopes[index])
        own = shadow.numbers
        gone = [
            overflow(len(shadow.position), replace(own, budget=min(own.budget, budget)))
            for budget in ({least, most} if shadow.policy.measured is not None else {own.budget})
        ]
        found.append((float(min(gone)), float(max(gone))))
    return found


def tokens(expr: Expr, heads: Sequence[Scope], own: Scope) -> Least:
    """A count that reads the data, of a head that agrees with these or is the only one."""
    found = value(expr, heads, own)
    if found.nan.any():
        return 1.0, np.inf
    return at_least_one(float(found.lo.item())), at_least_one(float(found.hi.item()))


@np.errstate(all="ignore")
def value(expr: Expr, heads: Sequence[Scope], own: Scope) -> Range:
    """The same before it is floored. What is found of the slots is averaged over heads, and float64 from there on."""
    parts: dict[Expr, Range] = {}
    exact: dict[Expr, Expr] = {}
    names: dict[str, Expr] = {}

    def rule(part: Expr) -> Expr | None:
        if part.kind != "reduce" and not is_call(part, "enough"):
            return None
        each = [bounds(part, head) for head in heads]
        if all(one.sharp.all() for one in each):
            exact[part] = Number(value=float(np.mean([one.lo.item() for one in each])))
        parts[part] = fold("mean", stack(each), 0)[0] if len(each) > 1 else each[0]
        name = f"@{len(names)}"
        names[name] = part
        return ColumnRef(name=name)

    outer = rewrite(expr, rule)
    if len(exact) == len(parts):
        known = rewrite(outer, lambda part: exact[names[part.name]] if isinstance(part, ColumnRef) else None)
        number = np.array([[evaluate_number(known, own.numbers)]])
        return Range(number, number, np.isnan(number))
    return bounds(outer, replace(own, recall=lambda leaf: parts[names[leaf.name]]))  # type: ignore[union-attr]
