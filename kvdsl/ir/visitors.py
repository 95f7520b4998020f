"""Walking and rewriting expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

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

_Inside = TypeVar("_Inside", bound=Node)


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
        return (expr.body, *(part for part in (expr.last, expr.decay, expr.after, expr.where, expr.by) if part is not None))
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
    if isinstance(expr, Rank):
        return (expr.body,) if expr.by is None else (expr.body, expr.by)
    if isinstance(expr, Other):
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


def with_children(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with each of its direct operands changed; the same object if nothing changes."""
    changed: dict[str, object] = {}
    for name, value in expr:
        if isinstance(value, EXPRESSIONS) and (new := change(value)) is not value:
            changed[name] = new
        elif isinstance(value, tuple):
            parts = tuple(change(part) for part in value)
            if any(new is not old for new, old in zip(parts, value, strict=True)):
                changed[name] = parts
    return expr.model_copy(update=changed) if changed else expr


def bottom_up(expr: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Rewrite innermost first: `rule` gets a node whose operands are rewritten, and gives what it becomes."""
    return rule(with_children(expr, lambda part: bottom_up(part, rule)))


def mapped(node: _Inside, change: Callable[[Expr], Expr]) -> _Inside:
    """A policy, or a part of one, with every expression in it changed; the same object if nothing changes."""
    changed = {name: new for name, value in node if (new := _mapped(value, change)) is not value}
    return node.model_copy(update=changed) if changed else node


def _mapped(value: object, change: Callable[[Expr], Expr]) -> object:
    if isinstance(value, tuple):
        parts = tuple(_mapped(part, change) for part in value)
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    if isinstance(value, EXPRESSIONS):
        return change(value)
    return mapped(value, change) if isinstance(value, Node) else value


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrite outermost first: where `rule` returns an expression it replaces the node and is not entered again."""
    replaced = rule(expr)
    if replaced is not None:
        return replaced
    return with_children(expr, lambda part: rewrite(part, rule))


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
