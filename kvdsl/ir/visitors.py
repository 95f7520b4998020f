"""Walking and rewriting expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_
from typing import TypeVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import EXPRESSIONS, Axis, Call, Expr, Input, Node, Other, Policy, TensorRef
from kvdsl.ir.nodes import children as children
from kvdsl.ir.nodes import has as has
from kvdsl.ir.nodes import parts_of as parts_of
from kvdsl.ir.nodes import walk as walk
from kvdsl.ir.ops import OF_QUERY_HEADS

_Inside = TypeVar("_Inside", bound=Node)


def of_query_heads(expr: Expr) -> bool:
    """Whether an expression reads what each query head has of its own."""
    return has(expr, TensorRef, group=True) or reads(expr, *OF_QUERY_HEADS)


def reads(expr: Expr, *names: str) -> bool:
    """Whether an expression reads one of the inputs."""
    return any(part.name in names for part in parts_of(expr, Input))


def depth_of(expr: Expr) -> int:
    """How deep an expression is nested: 1 without operands."""
    return 1 + max(map(depth_of, children(expr)), default=0)


def of_one_slot(body: Expr) -> Iterator[Expr]:
    """The largest parts of the body of a reduction over others that belong to one slot: to the other (`Other`), or to the slot itself."""
    if isinstance(body, Other) or Axis.OTHER not in axes_of(body):
        yield body
    else:
        for child in children(body):
            yield from of_one_slot(child)


def with_children(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with each of its direct operands changed; the same object if nothing changes."""
    if isinstance(expr, Call):
        args = tuple(map(change, expr.args))
        return expr if all(map(is_, args, expr.args)) else expr.model_copy(update={"args": args})
    parts = {name: part for name in expr.operands if (part := getattr(expr, name)) is not None}
    changed = {name: new for name, part in parts.items() if (new := change(part)) is not part}
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
        return value if all(map(is_, parts, value)) else parts
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
