"""Recognize operations that targets implement, in any spelling.

The prelude defines functions through others: `abs(x)` is `max(x, -x)`, and `std(x)` the square root of a difference of means. Each of
these is one operation of the IR (`kvdsl.ir.ops.PRELUDE`), for which targets have faster or more accurate code. Only this table, with
one row per function, connects the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvdsl.ir.nodes import PREVIOUS, Axis, Call, Expr, Fold, Number, Reduce, call, is_call
from kvdsl.ir.ops import FIXED
from kvdsl.ir.visitors import axes_of, children, walk

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
    match difference.args:
        case (squares, Call(op="**", args=(Reduce(op="mean") as mean, exponent))) if exponent == TWO:
            squared = (call("*", mean.body, mean.body), call("**", mean.body, TWO))
            same = any(squares == mean.model_copy(update={"body": body}) for body in squared)
            return mean.model_copy(update={"op": "var"}) if same else None
    return None


def _deviation(expr: Expr) -> Expr | None:
    """`sqrt(var(x))`."""
    match expr:
        case Call(op="sqrt", args=(Reduce(op="var") as variance,)):
            return variance.model_copy(update={"op": "std"})
    return None


def _average(expr: Expr) -> Expr | None:
    """`fold(d * prev + (1 - d) * x, x)` with a d fixed once the prompt is known; with d = 0 the newest x."""
    match expr:
        case Fold(over="queries", body=Call(op="+", args=(Call(op="*", args=(decay, previous)), new)), start=x):
            average = previous == PREVIOUS and is_fixed(decay) and new == call("*", call("-", ONE, decay), x)
            if average and Axis.QUERY in axes_of(x):
                last = decay == ZERO
                return Reduce(op="last" if last else "ema", axis=Axis.QUERY, body=x, argument=None if last else decay)
    return None


_ROWS: tuple[Callable[[Expr], Expr | None], ...] = (_absolute, _ceiling, _power, _variance, _deviation, _average)
