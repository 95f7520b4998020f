"""Short spellings for IR trees, so that these tests need no front-end."""

from __future__ import annotations

from kvdsl.ir.nodes import (
    Axis,
    Call,
    Expr,
    Input,
    Keep,
    Number,
    Param,
    ParamRef,
    Policy,
    Reduce,
    Select,
    Sketch,
)
from kvdsl.ir.nodes import call as call


def num(value: float) -> Expr:
    return Number(value=value)


def read(name: str) -> Expr:
    return Input(name=name)


def binary(left: Expr, op: str, right: Expr) -> Expr:
    return call(op, left, right)


def over(op: str, axis: str, body: Expr) -> Expr:
    return Reduce(op=op, axis=Axis(axis), body=body)


def queries(op: str, body: Expr) -> Expr:
    return over(op, "query", body)


def recent(op: str, body: Expr, count: Expr | float) -> Expr:
    """`op(body over last count queries)`."""
    last = count if isinstance(count, Expr_) else num(count)
    return Reduce(op=op, axis=Axis.QUERY, body=body, last=last)


def ema(body: Expr, decay: float) -> Expr:
    return Reduce(op="ema", axis=Axis.QUERY, body=body, argument=num(decay))


def pool(op: str, body: Expr, size: float) -> Expr:
    return call(f"{op}_pool", body, num(size))


def over_page(op: str, body: Expr) -> Expr:
    return Reduce(op=op, axis=Axis.SLOT, body=body, within="page")


def over_sketch(op: str, body: Expr) -> Expr:
    return Reduce(op=op, axis=Axis.DIM, body=body, within="sketch")


def select(count: float, by: Expr, low: float | None = None, high: float | None = None) -> Select:
    ends = (None if end is None else num(end) for end in (low, high))
    return Select(count=num(count), by=by, **dict(zip(("low", "high"), ends, strict=True)))


def sketch(count: float, by: Expr, every: float) -> Sketch:
    return Sketch(count=num(count), by=by, every=num(every))


ATTN, LOGIT, Q, K, V = (read(name) for name in ("attn", "logit", "q", "k", "v"))
POSITION = read("position")
NORM1_V = over("sum", "dim", call("abs", V))


def bounded(score: Expr, *keeps: Keep, budget: float = 8, params: tuple[Param, ...] = (), **more: object) -> Policy:
    """A policy with `param budget`, which the score's and the keeps' expressions may read."""
    own = Param(name="budget", default=num(budget))
    return Policy(
        name="Example",
        stem="example",
        params=(own, *params),
        budget=ParamRef(name="budget"),
        score=score,
        keeps=keeps,
        **more,
    )


def first(count: Expr | float) -> Keep:
    return Keep(scope="first", count=count if isinstance(count, Expr_) else num(count))


def last(count: Expr | float) -> Keep:
    return Keep(scope="last", count=count if isinstance(count, Expr_) else num(count))


def top(count: Expr | float, by: Expr) -> Keep:
    return Keep(scope="top", count=count if isinstance(count, Expr_) else num(count), by=by)


def where(condition: Expr) -> Keep:
    return Keep(scope="where", by=condition)


Expr_ = (Number, ParamRef, Input, Call, Reduce)

RANDOM = bounded(call("random"))
