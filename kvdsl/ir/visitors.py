"""Walking and rewriting expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import (
    EXPRESSIONS,
    Axis,
    Binary,
    Call,
    Enough,
    Expr,
    Fold,
    FoldRef,
    Input,
    Leverage,
    Node,
    Other,
    Policy,
    Pool,
    Project,
    Rank,
    Reduce,
    Rotate,
    TensorRef,
)
from kvdsl.ir.ops import OF_QUERY_HEADS


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything in it, outermost first."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct operands of an expression."""
    if isinstance(expr, Call):
        return expr.args
    if isinstance(expr, Binary):
        return (expr.left, expr.right)
    if isinstance(expr, Reduce):
        return (expr.body, *(part for part in (expr.last, expr.decay, expr.after) if part is not None))
    if isinstance(expr, Fold):
        return (expr.body, expr.start)
    if isinstance(expr, FoldRef):
        return (expr.start,)
    if isinstance(expr, Project):
        return (expr.body, expr.matrix)
    if isinstance(expr, Rotate):
        return (expr.body, *(part for part in (expr.by, expr.factor) if part is not None))
    if isinstance(expr, Leverage):
        return (expr.body, expr.ridge)
    if isinstance(expr, (Other, Rank)):
        return (expr.body,)
    if isinstance(expr, Enough):
        return (expr.body, expr.share, expr.by)
    if isinstance(expr, Pool):
        return (expr.body, expr.size)
    return ()


def of_query_heads(expr: Expr) -> bool:
    """Whether an expression reads what each query head has of its own."""
    return any(
        (isinstance(part, TensorRef) and part.group) or (isinstance(part, Input) and part.name in OF_QUERY_HEADS)
        for part in walk(expr)
    )


def of_one_slot(body: Expr) -> Iterator[Expr]:
    """The largest parts of the body of a reduction over others that belong to one slot: to the other (`Other`), or to the slot itself."""
    if isinstance(body, Other) or Axis.OTHER not in axes_of(body):
        yield body
    else:
        for child in children(body):
            yield from of_one_slot(child)


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrite outermost first: where `rule` returns an expression it replaces the node and is not entered again."""
    replaced = rule(expr)
    if replaced is not None:
        return replaced
    if isinstance(expr, Call):
        args = tuple(rewrite(arg, rule) for arg in expr.args)
        return expr if args == expr.args else Call(function=expr.function, args=args)
    if isinstance(expr, Binary):
        left, right = rewrite(expr.left, rule), rewrite(expr.right, rule)
        return expr if (left, right) == (expr.left, expr.right) else Binary(op=expr.op, left=left, right=right)
    if isinstance(expr, (Reduce, Other, Fold, FoldRef, Project, Rotate, Leverage, Rank, Enough, Pool)):
        parts = {name: rewrite(part, rule) for name, part in expr if isinstance(part, Node)}  # type: ignore[arg-type]
        return expr.model_copy(update=parts)
    return expr


def expressions(policy: Policy) -> Iterator[Expr]:
    """Every expression that a settle evaluates: what a budget reads of the data, the score, what a layer's share goes by, and what the
    keeps rank by.
    """
    if policy.measured is not None:
        yield policy.measured
    if policy.score is not None:
        yield policy.score
    if policy.across_layers is not None and policy.across_layers.by is not None:
        yield policy.across_layers.by
    for keep in policy.keeps:
        if keep.by is not None:
            yield keep.by


def everywhere(part: object) -> Iterator[Expr]:
    """Every expression of a policy or of a part of it, whatever it stands for: defaults, counts, ranges, and what a settle evaluates."""
    if isinstance(part, EXPRESSIONS):
        yield part
    elif isinstance(part, (Node, tuple)):
        for one in part:
            yield from everywhere(one[1] if isinstance(part, Node) else one)  # of a node its fields, by name


def with_policy(policy: Policy, **changes: object) -> Policy:
    """A validated copy with some fields changed (pydantic's own `model_copy` does not validate)."""
    return Policy(**{name: getattr(policy, name) for name in Policy.model_fields} | changes)
