"""How a reduction is made of simpler ones: the formulas of `kvdsl.ir.ops` as expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvdsl.ir.nodes import Expr, Input, Node, Number, Reduce, call
from kvdsl.ir.ops import FUNCTIONS, OPERATORS, REDUCTIONS, Formula
from kvdsl.ir.visitors import mapped, rewrite

Part = TypeVar("Part", bound=Node)


def from_formula(formula: Formula | object, body: Expr, reduced: Callable[[str, Expr], Expr]) -> Expr:
    """What a formula says of a body; `reduced` makes the reductions in it, by their names."""
    if isinstance(formula, (int, float)):
        return Number(value=formula)
    if isinstance(formula, str):
        return {"x": body, "count": Input(name="observed")}[formula]
    assert isinstance(formula, tuple)
    name, *rest = formula
    args = tuple(from_formula(part, body, reduced) for part in rest)
    # `max` of one is the reduction, of two the function.
    if name in OPERATORS or (name in FUNCTIONS and (name not in REDUCTIONS or len(args) > 1)):
        return call(str(name), *args)
    return reduced(str(name), args[0])


def in_parts(node: Part, knows: Callable[[Reduce], bool]) -> Part:
    """A policy, or a part of one, with every reduction that a target does not know made of others, as far as it is made of any."""
    return mapped(node, lambda expr: _in_parts(expr, knows))


def _in_parts(expr: Expr, knows: Callable[[Reduce], bool]) -> Expr:

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Reduce) or knows(node):
            return None
        formula = REDUCTIONS[node.op].parts
        if formula is None or node.last is not None or node.within == "next":  # a slot's next page is not its mean's
            return None
        made = from_formula(formula, node.body, lambda op, body: node.model_copy(update={"op": op, "body": body}))
        return _in_parts(made, knows)

    return rewrite(expr, rule)
