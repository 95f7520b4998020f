"""Constant folding.

Arithmetic is in 64-bit floats; `%` takes the sign of the divisor, conditions are 0 or 1. Expressions without a finite value stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvdsl.ir.nodes import Call, Expr, Input, Number, ParamRef, Policy
from kvdsl.ir.ops import FUNCTIONS, OPERATORS
from kvdsl.ir.visitors import bottom_up, children, mapped


def value_of(expr: Expr, names: Mapping[str, float] | None = None) -> float | None:
    """Return the value of an expression, given values of params (`name`) and inputs (`@budget`); None if it is not constant."""
    names = names or {}
    match expr:
        case Number(value=value):
            return value
        case ParamRef(name=name):
            return names.get(name)
        case Input(name=name):
            return names.get(f"@{name}")
        case Call(op=op, args=args):
            return apply(op, *(value_of(arg, names) for arg in args))
    return None


def some(count: float) -> int:
    """Round down a count whose 0 has a special meaning, as for `trigger`: 0 < count < 1 becomes 1."""
    return 1 if 0 < count < 1 else math.floor(count)


def apply(name: str, *args: float | None) -> float | None:
    """Apply an operator or function to constants; None for other operations, unknown arguments or no finite result."""
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
    """Fold the constant parts of an expression."""
    return bottom_up(expr, _folded)


def _folded(expr: Expr) -> Expr:
    value = value_of(expr) if expr.kind == "call" and all(part.kind == "number" for part in children(expr)) else None
    return expr if value is None else Number(value=value)


def fold(policy: Policy) -> Policy:
    """Fold the constant parts of every expression of a policy."""
    return mapped(policy, fold_expression)
