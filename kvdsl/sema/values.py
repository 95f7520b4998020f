"""Checked expressions: IR, axes, and what else the checker needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvdsl.ir import nodes as ir
from kvdsl.ir.nodes import (
    Axis,
    Expr,
    Fold,
    Given,
    GivenRef,
    Input,
    Number,
    Other,
    ParamRef,
    Rank,
    Reduce,
    Tensor,
    TensorRef,
    Within,
)
from kvdsl.ir.ops import CONDITIONS, INPUTS, OPERATIONS
from kvdsl.ir.visitors import axes_of
from kvdsl.passes import fold

NO_AXES: frozenset[Axis] = frozenset()
NO_SPACES: frozenset[str] = frozenset()
_OF_KEYS = frozenset({""})


@dataclass(frozen=True)
class Value:
    """A checked expression.

    Attributes:
        parts: the number of nodes, which limits what nested lets expand to.
        depth: the depth of the tree, limited as well.
        observes: whether it reduces over queries.
        pools: whether it contains a pool.
        spaces: the dims it varies over: "" for those of keys, or the name of the projecting tensor. They cannot be mixed.
        sketched: whether it reads `over sketch`, the dims of the sketch only.
        constant: its value, if it reads nothing.
    """

    expr: Expr
    axes: frozenset[Axis] = NO_AXES
    condition: bool = False
    parts: int = 1
    depth: int = 1
    observes: bool = False
    pools: bool = False
    spaces: frozenset[str] = frozenset()
    sketched: bool = False
    constant: float | None = None


def number(value: float) -> Value:
    """Make a constant."""
    return Value(Number(value=value), constant=value)


def read_input(name: str) -> Value:
    """Read an input."""
    axes = INPUTS[name].axes
    if INPUTS[name].per_token:
        return read_given(per_token(name))
    return Value(Input(name=name), axes, observes=name == "observed", spaces=_OF_KEYS if Axis.DIM in axes else NO_SPACES)


def per_token(name: str) -> Given:
    """Make the input that the cache provides for each token."""
    return Given(name=name, default=0, source=name)


def read_param(name: str) -> Value:
    """Read a param."""
    return Value(ParamRef(name=name))


def read_tensor(tensor: Tensor) -> Value:
    """Read a tensor's value for a KV head."""
    dims = "dims" in tensor.axes
    ref = TensorRef(name=tensor.name, dims=dims, group="group" in tensor.axes)
    return Value(ref, frozenset({Axis.DIM}), spaces=_OF_KEYS) if dims else Value(ref)


def read_given(given: Given) -> Value:
    """Read a value given per token; of a span, whether the token lies in it."""
    marked = given.source == "spans"
    value = Value(GivenRef(name=given.name, marked=marked), frozenset({Axis.SLOT}))
    return call("!=", value, number(0)) if marked else value


def call(op: str, *args: Value) -> Value:
    """Apply an operation."""
    expr = ir.call(op, *(arg.expr for arg in args))
    condition = op in CONDITIONS or (op == "where" and all(arg.condition for arg in args))
    made = _combined(expr, args, condition, fold.apply(op, *(arg.constant for arg in args)))
    axes = OPERATIONS[op](made.axes)
    return made if axes == made.axes else replace(made, axes=axes)


def reduce(
    op: str,
    axis: Axis,
    body: Value,
    last: Value | None = None,
    argument: Value | None = None,
    within: Within = "all",
    after: Value | None = None,
    where: Value | None = None,
    by: Value | None = None,
) -> Value:
    """Reduce a value. Without a query or other-slot axis one number per slot remains; with a key each slot has its group's."""
    args = tuple(value for value in (body, last, argument, after, where, by) if value is not None)
    parts = {"last": last, "argument": argument, "after": after, "where": where, "by": by}
    exprs = {name: value.expr for name, value in parts.items() if value is not None}
    expr = Reduce(op=op, axis=axis, body=body.expr, within=within).model_copy(update=exprs)
    combined = _combined(expr, args, condition=False, constant=None)
    return replace(
        combined,
        axes=axes_of(expr),
        observes=body.observes or axis is Axis.QUERY,
        spaces=NO_SPACES if axis is Axis.DIM else body.spaces,
        sketched=body.sketched or within == "sketch",
    )


def other(body: Value) -> Value:
    """Read a value of the other slot."""
    made = _combined(Other(body=body.expr), (body,), condition=body.condition, constant=None)
    return replace(made, axes=body.axes - {Axis.SLOT} | {Axis.OTHER})


def project(body: Value, matrix: Tensor) -> Value:
    """Project a vector onto the dims of a matrix."""
    expr = ir.call("project", body.expr, TensorRef(name=matrix.name, dims=True, group="group" in matrix.axes))
    return replace(_combined(expr, (body,), condition=False, constant=None), spaces=frozenset({matrix.name}))


def rank(body: Value, within: Literal["all", "page", "heads"], by: Value | None = None) -> Value:
    """Rank slots by a value."""
    expr = Rank(body=body.expr, within=within, by=None if by is None else by.expr)
    return _combined(expr, (body,) if by is None else (body, by), condition=False, constant=None)


def fold_of(body: Value, start: Value, over: Literal["queries", "prunes"]) -> Value:
    """Make a recurrence."""
    made = _combined(Fold(body=body.expr, start=start.expr, over=over), (body, start), condition=False, constant=None)
    return replace(made, axes=frozenset({Axis.SLOT}), observes=True)


def _combined(expr: Expr, args: tuple[Value, ...], condition: bool, constant: float | None) -> Value:
    return Value(
        expr,
        axes=NO_AXES.union(*(arg.axes for arg in args)),
        condition=condition,
        parts=1 + sum(arg.parts for arg in args),
        depth=1 + max((arg.depth for arg in args), default=0),
        observes=any(arg.observes for arg in args),
        pools=any(arg.pools for arg in args),
        spaces=NO_SPACES.union(*(arg.spaces for arg in args)),
        sketched=any(arg.sketched for arg in args),
        constant=constant,
    )


def extent(axes: frozenset[Axis]) -> str:
    """Return the axes as a predicate, such as "has one number per slot"."""
    return f"{'has' if axes else 'is'} {axes_in_words(axes)}"


def axes_in_words(axes: frozenset[Axis]) -> str:
    """Return the axes in words, such as "one number per query and slot"."""
    names = [axis.value for axis in Axis if axis in axes]
    if not names:
        return "a single number"
    return "one number per " + (names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}")
