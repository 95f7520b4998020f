"""Constant folding: computes what does not depend on what is cached.

Arithmetic is that of 64-bit floats; `%` takes the sign of the divisor, conditions are 0 or 1. What has no finite value is
left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from kvdsl.ir.nodes import (
    EXPRESSIONS,
    Binary,
    Call,
    Enough,
    Expr,
    Fold,
    FoldRef,
    Input,
    Leverage,
    Node,
    Number,
    Other,
    ParamRef,
    Policy,
    Pool,
    Project,
    Rank,
    Reduce,
    Rotate,
)
from kvdsl.ir.ops import FUNCTIONS, OPERATORS


def value_of(expr: Expr, names: Mapping[str, float] | None = None) -> float | None:
    """The expression's value if it is constant, given values of params (`name`) and inputs (`@budget`)."""
    names = names or {}
    if isinstance(expr, Number):
        return expr.value
    if isinstance(expr, ParamRef):
        return names.get(expr.name)
    if isinstance(expr, Input):
        return names.get(f"@{expr.name}")
    if isinstance(expr, Binary):
        return apply(expr.op, value_of(expr.left, names), value_of(expr.right, names))
    if isinstance(expr, Call):
        return apply(expr.function, *(value_of(arg, names) for arg in expr.args))
    return None


def some(count: float) -> int:
    """A known count of which 0 means another thing, as of `trigger`: floored, but 1 where it is more than 0 and less than 1."""
    return 1 if 0 < count < 1 else math.floor(count)


def apply(name: str, *args: float | None) -> float | None:
    """An operator or function of constants; None if one is not known or there is no finite result."""
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    row = OPERATORS.get(name) or FUNCTIONS[name]
    try:
        value = float(row.value(*known))
    except (ArithmeticError, ValueError):
        return None
    return value if math.isfinite(value) else None


def fold_expression(expr: Expr) -> Expr:
    """The expression with its constant parts computed."""
    if isinstance(expr, Binary):
        left, right = fold_expression(expr.left), fold_expression(expr.right)
        expr = expr if left is expr.left and right is expr.right else Binary(op=expr.op, left=left, right=right)
        constant = isinstance(left, Number) and isinstance(right, Number)
    elif isinstance(expr, Call):
        args = tuple(fold_expression(arg) for arg in expr.args)
        same = all(new is old for new, old in zip(args, expr.args, strict=True))
        expr = expr if same else Call(function=expr.function, args=args)
        constant = all(isinstance(arg, Number) for arg in args)
    elif isinstance(expr, (Reduce, Other, Fold, FoldRef, Project, Rotate, Leverage, Rank, Enough, Pool)):
        return _folded_inside(expr)
    else:
        return expr
    value = value_of(expr) if constant else None
    return expr if value is None else Number(value=value)


def fold(policy: Policy) -> Policy:
    """The policy with the constant parts of every expression computed."""
    return _folded_inside(policy)


_Inside = TypeVar("_Inside", bound=Node)


def _folded_inside(node: _Inside) -> _Inside:
    """A node with every expression in it folded, however deep in its parts; the same object if nothing changes."""
    changed = {name: folded for name, value in node if (folded := _folded(value)) is not value}
    return node if not changed else node.model_copy(update=changed)


def _folded(value: object) -> object:
    if isinstance(value, tuple):
        parts = tuple(_folded(part) for part in value)
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    if isinstance(value, EXPRESSIONS):
        return fold_expression(value)
    return _folded_inside(value) if isinstance(value, Node) else value
