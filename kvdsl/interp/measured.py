"""Budgets that read the data: how many tokens each head keeps, found at a settle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdsl.interp.evaluate import Scope, at_least_one, evaluate_number
from kvdsl.interp.numbers import Numbers
from kvdsl.ir.nodes import Expr, Number, Policy, is_call
from kvdsl.ir.visitors import rewrite


def measured(
    policy: Policy, numbers: Sequence[Numbers], scopes: Sequence[Scope], groups: Sequence[Sequence[int]]
) -> list[Numbers]:
    """The heads' numbers, with the budget that each of them has at this settle.

    Args:
        scopes: what each head's expressions see.
        groups: of heads, by index, that agree on their victims: what they count is averaged.
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
    """The expression with what it finds of the slots put in: the mean over the heads."""

    def rule(part: Expr) -> Expr | None:
        if part.kind != "reduce" and not is_call(part, "enough"):
            return None
        return Number(value=float(np.mean([evaluate_number(part, scope) for scope in scopes])))

    return rewrite(expr, rule)
