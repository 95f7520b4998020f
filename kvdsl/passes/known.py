"""Recognize operations that targets implement, in any spelling.

The prelude defines functions through others: `abs(x)` is `max(x, -x)`, and `std(x)` the square root of a difference of means. Each of
these is one operation of the IR (`kvdsl.ir.ops.PRELUDE`), for which targets have faster or more accurate code. Only this table, with
one row per function, connects the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import PREVIOUS, Axis, Expr, Fold, Number, Reduce, call, is_call
from kvdsl.ir.ops import FIXED
from kvdsl.ir.visitors import children, walk

ZERO, ONE, TWO, HALF = (Number(value=value) for value in (0, 1, 2, 0.5))


def is_fixed(expr: Expr) -> bool:
    """Return whether a number is fixed once the prompt is known."""
    leaves = [part for part in walk(expr) if not children(part)]
    return all(part.kind in ("number", "param") or (part.kind == "input" and part.name in FIXED) for part in leaves)


def known(expr: Expr) -> Expr:
    """Return the equivalent operation of an expression with recognized operands; the expression itself without one."""
    for row in _ROWS:
        found = row(expr)
        if found is not None:
            return known(found)
    return expr


def _absolute(expr: Expr) -> Expr | None:
    """`max(x, -x)`."""
    if not is_call(expr, "max"):
        return None
    left, right = expr.args
    return next((call("abs", x) for x, other in ((left, right), (right, left)) if other == call("neg", x)), None)


def _ceiling(expr: Expr) -> Expr | None:
    """`-floor(-x)`."""
    inner = expr.args[0] if is_call(expr, "neg") else None
    below = inner.args[0] if is_call(inner, "floor") else None
    return call("ceil", *below.args) if is_call(below, "neg") else None


def _power(expr: Expr) -> Expr | None:
    """`x ** 0.5`, and `x` as a power of e."""
    if not is_call(expr, "**"):
        return None
    base, exponent = expr.args
    if exponent == HALF:
        return call("sqrt", base)
    return call("exp", exponent) if base == Number(value=math.e) else None


def _variance(expr: Expr) -> Expr | None:
    """`max(mean(x * x) - mean(x) ** 2, 0)`."""
    difference = next((x for x, y in (expr.args, expr.args[::-1]) if y == ZERO), None) if is_call(expr, "max") else None
    if not is_call(difference, "-"):
        return None
    squares, square = difference.args
    mean = square.args[0] if is_call(square, "**") and square.args[1] == TWO else None
    if not isinstance(mean, Reduce) or mean.op != "mean":
        return None
    squared = (call("*", mean.body, mean.body), call("**", mean.body, TWO))
    same = any(squares == mean.model_copy(update={"body": body}) for body in squared)
    return mean.model_copy(update={"op": "var"}) if same else None


def _deviation(expr: Expr) -> Expr | None:
    """`sqrt(var(x))`."""
    inner = expr.args[0] if is_call(expr, "sqrt") else None
    return inner.model_copy(update={"op": "std"}) if isinstance(inner, Reduce) and inner.op == "var" else None


def _average(expr: Expr) -> Expr | None:
    """`fold(d * prev + (1 - d) * x, x)` with a d fixed once the prompt is known; with d = 0 the newest x."""
    if not isinstance(expr, Fold) or expr.over != "queries" or not is_call(expr.body, "+"):
        return None
    old, new = expr.body.args
    if not (is_call(old, "*") and old.args[1] == PREVIOUS and is_fixed(old.args[0])):
        return None
    decay, x = old.args[0], expr.start
    if new != call("*", call("-", ONE, decay), x) or Axis.QUERY not in axes_of(x):
        return None
    if decay == ZERO:
        return Reduce(op="last", axis=Axis.QUERY, body=x)
    return Reduce(op="ema", axis=Axis.QUERY, body=x, argument=decay)


_ROWS: tuple[Callable[[Expr], Expr | None], ...] = (_absolute, _ceiling, _power, _variance, _deviation, _average)
