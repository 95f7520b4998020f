"""Constant folding: computes what does not depend on what is cached.

Arithmetic is that of 64-bit floats; `%` takes the sign of the divisor, conditions are 0 or 1. What has no finite value is
left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvdsl.ir.nodes import (
    Binary,
    Call,
    Expr,
    Function,
    Input,
    Keep,
    Number,
    Operator,
    Param,
    ParamRef,
    Policy,
    Reduce,
)
from kvdsl.ir.visitors import with_policy

_BINARY: dict[str, Callable[..., float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: math.pow(a, b),
    "<": lambda a, b: float(a < b),
    "<=": lambda a, b: float(a <= b),
    ">": lambda a, b: float(a > b),
    ">=": lambda a, b: float(a >= b),
    "==": lambda a, b: float(a == b),
    "!=": lambda a, b: float(a != b),
    "and": lambda a, b: float(a != 0 and b != 0),
    "or": lambda a, b: float(a != 0 or b != 0),
}

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "neg": lambda a: -a,
    "not": lambda a: float(a == 0),
    "abs": abs,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "floor": lambda a: float(math.floor(a)),
    "ceil": lambda a: float(math.ceil(a)),
    "min": min,
    "max": max,
    "where": lambda c, a, b: a if c != 0 else b,
}


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


def apply(name: Operator | Function, *args: float | None) -> float | None:
    """An operator or function of constants; None if one is not known or there is no finite result."""
    if None in args:
        return None
    function = _BINARY.get(name) or _FUNCTIONS[name]
    try:
        value = float(function(*args))
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
    elif isinstance(expr, Reduce):
        body = fold_expression(expr.body)
        return expr if body is expr.body else Reduce(op=expr.op, axis=expr.axis, body=body)
    else:
        return expr
    value = value_of(expr) if constant else None
    return expr if value is None else Number(value=value)


def fold(policy: Policy) -> Policy:
    """The policy with the constant parts of every expression computed."""
    return with_policy(
        policy,
        params=tuple(_with(param, default=fold_expression(param.default)) for param in policy.params),
        budget=_folded(policy.budget),
        score=_folded(policy.score),
        keeps=tuple(_with(keep, count=_folded(keep.count), by=_folded(keep.by)) for keep in policy.keeps),
        trigger=fold_expression(policy.trigger),
        slack=fold_expression(policy.slack),
        max_drop=fold_expression(policy.max_drop),
    )


def _folded(expr: Expr | None) -> Expr | None:
    return None if expr is None else fold_expression(expr)


_Part = TypeVar("_Part", Param, Keep)


def _with(part: _Part, **changes: object) -> _Part:
    return type(part)(**{name: getattr(part, name) for name in type(part).model_fields} | changes)
