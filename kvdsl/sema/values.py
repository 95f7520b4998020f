"""What the checker knows of an expression: its IR, its axes, and whether it is a condition."""

from __future__ import annotations

from dataclasses import dataclass

from kvdsl.ir.axes import INPUT_AXES
from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    Expr,
    Function,
    Input,
    InputName,
    Number,
    Operator,
    ParamRef,
    Random,
    Reduce,
    ReduceOp,
)
from kvdsl.passes import fold

NO_AXES: frozenset[Axis] = frozenset()

COMPARISONS = {"<", "<=", ">", ">=", "==", "!="}
LOGICAL = {"and", "or"}


@dataclass(frozen=True)
class Value:
    """A checked expression.

    Attributes:
        parts, depth: its size, which bounds what a few nested lets can grow to.
        observes: whether it reduces over queries.
        constant: its value, if it reads nothing.
    """

    expr: Expr
    axes: frozenset[Axis] = NO_AXES
    condition: bool = False
    parts: int = 1
    depth: int = 1
    observes: bool = False
    constant: float | None = None


def number(value: float) -> Value:
    """A constant."""
    return Value(Number(value=value), constant=value)


def read_input(name: InputName) -> Value:
    """An input."""
    return Value(Input(name=name), INPUT_AXES[name], observes=name == "observed")


def read_param(name: str) -> Value:
    """A param."""
    return Value(ParamRef(name=name))


def random() -> Value:
    """A random number per slot."""
    return Value(Random(), frozenset({Axis.SLOT}))


def call(function: Function, *args: Value) -> Value:
    """An elementwise function."""
    expr = Call(function=function, args=tuple(arg.expr for arg in args))
    condition = function == "not" or (function == "where" and all(arg.condition for arg in args))
    return _combined(expr, args, condition, fold.apply(function, *(arg.constant for arg in args)))


def binary(op: Operator, left: Value, right: Value) -> Value:
    """An operator."""
    expr = Binary(op=op, left=left.expr, right=right.expr)
    constant = fold.apply(op, left.constant, right.constant)
    return _combined(expr, (left, right), op in COMPARISONS | LOGICAL, constant)


def reduce(op: ReduceOp, axis: Axis, body: Value) -> Value:
    """A reduction. One over queries leaves one number per slot."""
    axes = body.axes - {axis} | ({Axis.SLOT} if axis is Axis.QUERY else NO_AXES)
    expr = Reduce(op=op, axis=axis, body=body.expr)
    return Value(expr, axes, False, body.parts + 1, body.depth + 1, body.observes or axis is Axis.QUERY)


def _combined(expr: Expr, args: tuple[Value, ...], condition: bool, constant: float | None) -> Value:
    axes = NO_AXES.union(*(arg.axes for arg in args))
    parts = 1 + sum(arg.parts for arg in args)
    depth = 1 + max(arg.depth for arg in args)
    return Value(expr, axes, condition, parts, depth, any(arg.observes for arg in args), constant)
