"""Walk and rewrite expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_
from typing import TypeVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import EXPRESSIONS, Axis, Call, Expr, Input, Node, Policy, TensorRef
from kvdsl.ir.nodes import children as children
from kvdsl.ir.nodes import has as has
from kvdsl.ir.nodes import parts_of as parts_of
from kvdsl.ir.nodes import walk as walk
from kvdsl.ir.ops import OF_QUERY_HEADS

_Inside = TypeVar("_Inside", bound=Node)


def of_query_heads(expr: Expr) -> bool:
    """Return whether an expression differs between query heads."""
    return has(expr, TensorRef, group=True) or reads(expr, *OF_QUERY_HEADS)


def reads(expr: Expr, *names: str) -> bool:
    """Return whether an expression reads one of the inputs."""
    return any(part.name in names for part in parts_of(expr, Input))


def depth_of(expr: Expr) -> int:
    """Return the depth of an expression; 1 without operands."""
    return 1 + max(map(depth_of, children(expr)), default=0)


def of_one_slot(body: Expr) -> Iterator[Expr]:
    """Yield the largest parts of the body of a reduction over others that read only the other slot (`Other`), or only the slot itself."""
    if body.kind == "other" or Axis.OTHER not in axes_of(body):
        yield body
    else:
        for child in children(body):
            yield from of_one_slot(child)


def with_children(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Return the expression with each direct operand changed; the same object if nothing changes."""
    if isinstance(expr, Call):
        args = tuple(map(change, expr.args))
        return expr if all(map(is_, args, expr.args)) else expr.model_copy(update={"args": args})
    parts = {name: part for name in expr.operands if (part := getattr(expr, name)) is not None}
    changed = {name: new for name, part in parts.items() if (new := change(part)) is not part}
    return expr.model_copy(update=changed) if changed else expr


def bottom_up(expr: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Rewrite innermost first: `rule` receives a node with rewritten operands and returns its replacement."""
    return rule(with_children(expr, lambda part: bottom_up(part, rule)))


def mapped(node: _Inside, change: Callable[[Expr], Expr]) -> _Inside:
    """Return a policy, or a part of one, with every expression changed; the same object if nothing changes."""
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
    """Rewrite outermost first: an expression that `rule` returns replaces the node and is not entered."""
    replaced = rule(expr)
    if replaced is not None:
        return replaced
    return with_children(expr, lambda part: rewrite(part, rule))


def expressions(policy: Policy) -> Iterator[Expr]:
    """Yield every expression that a settle evaluates: the measured budget, the score, the weight of a layer, and what keeps rank by."""
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
    """Yield every expression of a policy or a part of it, including defaults, counts and ranges."""
    if isinstance(part, EXPRESSIONS):
        yield part
    elif isinstance(part, (Node, tuple)):
        for one in part:
            yield from everywhere(
                one[1] if isinstance(part, Node) else one
            )  # a node iterates over its fields as (name, value)


def with_policy(policy: Policy, **changes: object) -> Policy:
    """Return a validated copy with some fields changed; pydantic's `model_copy` does not validate."""
    return Policy(**{name: getattr(policy, name) for name in Policy.model_fields} | changes)
