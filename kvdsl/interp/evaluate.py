"""Expressions: from an IR tree and what it sees at one moment to numbers.

Every value is an array of two dimensions, slots by dims, of size 1 along an axis over which it does not vary:
a number is [1, 1], a value per slot [n, 1], a query vector [1, D], the keys [n, D]. NumPy's broadcasting is then
the language's. There is no axis for queries: an expression is evaluated for one query at a time, and what was
over queries comes from the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Binary, ColumnRef, Expr, Input, Number, ParamRef, Random, Reduce
from kvdsl.ir.nodes import Call as FunctionCall

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.int64]
Remembered: TypeAlias = "Reduce | ColumnRef"
"""What an expression asks of the memory: a reduction over queries, or a state column."""


def _remembers_nothing(leaf: Remembered) -> Array:
    raise LookupError(f"nothing is remembered here: {leaf!r}")


@dataclass(frozen=True)
class Scope:
    """What an expression sees at one moment.

    Attributes:
        slots: how many slots there are: those that the query sees, or the live ones in a settle.
        dims: the size of a key.
        inputs: the inputs by name, each [slots or 1, dims or 1].
        params: the policy's params.
        recall: the value per slot, [slots, 1], of a reduction over queries or a column.
        random: the slots' random numbers, [slots, 1].
    """

    slots: int
    dims: int
    inputs: Mapping[str, Array]
    params: Mapping[str, float]
    recall: Callable[[Remembered], Array] = _remembers_nothing
    random: Callable[[], Array] | None = None


def number(value: float) -> Array:
    """A number as a value: [1, 1]."""
    return np.full((1, 1), value, dtype=np.float64)


def per_slot(values: object) -> Array:
    """One number per slot as a value: [n] to [n, 1]."""
    return np.asarray(values, dtype=np.float64).reshape(-1, 1)


@np.errstate(all="ignore")
def evaluate(expr: Expr, scope: Scope) -> Array:
    """The value of an expression, [slots or 1, dims or 1].

    Arithmetic and comparisons are IEEE's: x / 0 is infinite or NaN, and a NaN equals nothing.
    """
    if isinstance(expr, Number):
        return number(expr.value)
    if isinstance(expr, ParamRef):
        return number(scope.params[expr.name])
    if isinstance(expr, Input):
        return scope.inputs[expr.name]
    if isinstance(expr, Random):
        assert scope.random is not None
        return scope.random()
    if isinstance(expr, FunctionCall):
        return _FUNCTIONS[expr.function](*(evaluate(arg, scope) for arg in expr.args))
    if isinstance(expr, Binary):
        return _OPERATORS[expr.op](evaluate(expr.left, scope), evaluate(expr.right, scope))
    if isinstance(expr, ColumnRef) or expr.axis is Axis.QUERY:
        return scope.recall(expr)
    return _reduce(expr, scope)


def evaluate_number(expr: Expr, scope: Scope) -> float:
    """The value of an expression without axes."""
    return float(evaluate(expr, scope).item())


def evaluate_slots(expr: Expr, scope: Scope) -> Array:
    """The value of an expression with at most the slots' axis: [slots]."""
    values: Array = np.broadcast_to(evaluate(expr, scope), (scope.slots, 1))[:, 0].copy()
    return values


def _reduce(expr: Reduce, scope: Scope) -> Array:
    """A reduction over slots or dims. What does not vary over the axis counts once for each slot or dim."""
    body = evaluate(expr.body, scope)
    if expr.axis is Axis.SLOT:
        return fold(expr.op, np.broadcast_to(body, (scope.slots, body.shape[1])), axis=0)
    dims = body.shape[1] if Axis.DIM in axes_of(expr.body) else scope.dims
    return fold(expr.op, np.broadcast_to(body, (body.shape[0], dims)), axis=1)


@np.errstate(all="ignore")
def fold(op: str, x: Array, axis: int) -> Array:
    """Reduce an axis to size 1, straight from the definitions; `std` and `var` are the population's."""
    if op == "count":
        return np.full_like(x.take([0], axis), x.shape[axis])
    if op == "last":
        return x.take([-1], axis)
    result: Array = _FOLDS[op](x, axis=axis, keepdims=True)
    return result


_FOLDS: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "mean": np.mean,
    "var": np.var,
    "std": np.std,
    "max": np.max,
    "min": np.min,
}


def _truth(x: Array) -> Mask:
    """A number holds where it is not 0; so a NaN does."""
    mask: Mask = x != 0
    return mask


def _as_number(condition: Mask) -> Array:
    return condition.astype(np.float64)


def _where(condition: Array, yes: Array, no: Array) -> Array:
    chosen: Array = np.where(_truth(condition), yes, no)
    return chosen


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "neg": np.negative,
    "not": lambda x: _as_number(~_truth(x)),
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "floor": np.floor,
    "ceil": np.ceil,
    "min": lambda *args: reduce(np.minimum, args),
    "max": lambda *args: reduce(np.maximum, args),
    "where": _where,
}

_OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.mod,  # the remainder of the floored quotient: it has the divisor's sign
    "**": np.power,
    "<": lambda a, b: _as_number(a < b),
    "<=": lambda a, b: _as_number(a <= b),
    ">": lambda a, b: _as_number(a > b),
    ">=": lambda a, b: _as_number(a >= b),
    "==": lambda a, b: _as_number(a == b),
    "!=": lambda a, b: _as_number(a != b),
    "and": lambda a, b: _as_number(_truth(a) & _truth(b)),
    "or": lambda a, b: _as_number(_truth(a) | _truth(b)),
}
