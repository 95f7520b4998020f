"""Constant folding: computes what does not depend on what is cached.

Arithmetic is that of 64-bit floats; `%` takes the sign of the divisor, conditions are 0 or 1. What has no finite value is
left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvdsl.ir.nodes import Call, Expr, Input, Number, ParamRef, Policy
from kvdsl.ir.ops import FUNCTIONS, OPERATORS
from kvdsl.ir.visitors import bottom_up, children, mapped


def value_of(expr: Expr, names: Mapping[str, float] | None = None) -> float | None:
    """The expression's value if it is constant, given values of params (`name`) and inputs (`@budget`)."""
    names = names or {}
    if isinstance(expr, Number):
        return expr.value
    if isinstance(expr, ParamRef):
        return names.get(expr.name)
    if isinstance(expr, Input):
        return names.get(f"@{expr.name}")
    if isinstance(expr, Call):
        return apply(expr.op, *(value_of(arg, names) for arg in expr.args))
    return None


def some(count: float) -> int:
    """A known count of which 0 means another thing, as of `trigger`: floored, but 1 where it is more than 0 and less than 1."""
    return 1 if 0 < count < 1 else math.floor(count)


def apply(name: str, *args: float | None) -> float | None:
    """An operator or function of constants; None of another operation, if one is not known, or where there is no finite result."""
    row = OPERATORS.get(name) or FUNCTIONS.get(name)
    there = [arg for arg in args if arg is not None]
    if row is None or len(there) < len(args):
        return None
    try:
        value = float(row.value(*there))
    except (ArithmeticError, ValueError):
        return None
    return value if math.isfinite(value) else None


def fold_expression(expr: Expr) -> Expr:
    """Return the expression with its constant parts computed."""
    return bottom_up(expr, _folded)


def _folded(expr: Expr) -> Expr:
    value = value_of(expr) if expr.kind == "call" and all(part.kind == "number" for part in children(expr)) else None
    return expr if value is None else Number(value=value)


def fold(policy: Policy) -> Policy:
    """The policy with the constant parts of every expression computed."""
    return mapped(policy, fold_expression)
