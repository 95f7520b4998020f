"""Walk and rewrite expressions; the axes over which they vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any, TypeVar

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Node, Other, Policy, Reduce, TensorRef, is_expression
from kvdsl.ir.nodes import children as children
from kvdsl.ir.nodes import has as has
from kvdsl.ir.nodes import parts_of as parts_of
from kvdsl.ir.nodes import walk as walk
from kvdsl.ir.ops import INPUTS, OF_QUERY_HEADS, OPERATIONS

# -- axes -------------------------------------------------------------------------------------------------------------

NONE: frozenset[Axis] = frozenset()
_SLOT: frozenset[Axis] = frozenset({Axis.SLOT})
_DIM: frozenset[Axis] = frozenset({Axis.DIM})


def axes_of(expr: Expr) -> frozenset[Axis]:
    """Return the axes of an expression. A reduction over queries or other slots leaves one value per slot."""
    return _AXES[expr.kind](expr)


def _of_call(expr: Call) -> frozenset[Axis]:
    return OPERATIONS[expr.op](NONE.union(*map(axes_of, expr.args)))


def _of_other(expr: Other) -> frozenset[Axis]:
    return (axes_of(expr.body) - _SLOT) | {Axis.OTHER}


def _of_reduction(expr: Reduce) -> frozenset[Axis]:
    inner = axes_of(expr.body) | (NONE if expr.where is None else axes_of(expr.where))
    if expr.within in ("page", "next") or expr.by is not None:  # every slot has the value of its page or key
        return inner | _SLOT
    if expr.within == "text":
        return inner - {Axis.QUERY}
    return inner - {expr.axis} | (_SLOT if expr.axis in (Axis.QUERY, Axis.OTHER) else NONE)


_AXES: Mapping[str, Callable[[Any], frozenset[Axis]]] = {
    **dict.fromkeys(("number", "param"), lambda _: NONE),
    **dict.fromkeys(("given", "column", "fold"), lambda _: _SLOT),
    "input": lambda expr: INPUTS[expr.name].axes,
    "tensor": lambda expr: _DIM if expr.dims else NONE,
    "call": _of_call,
    "reduce": _of_reduction,
    "rank": lambda expr: axes_of(expr.body),  # the body varies over slots, and so does the key
    "other": _of_other,
}


# -- walking and rewriting --------------------------------------------------------------------------------------------

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
    if is_expression(value):
        return change(value)
    match value:
        case tuple():
            parts = tuple(_mapped(part, change) for part in value)
            return value if all(map(is_, parts, value)) else parts
        case Node():
            return mapped(value, change)
    return value


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrite outermost first: an expression that `rule` returns replaces the node and is not entered."""
    replaced = rule(expr)
    if replaced is not None:
        return replaced
    return with_children(expr, lambda part: rewrite(part, rule))


def expressions(policy: Policy) -> Iterator[Expr]:
    """Yield every expression that a settle evaluates."""
    yield from (expr for name, expr in policy.statements() if name not in ("select", "weight", "sketch"))


def everywhere(part: object) -> Iterator[Expr]:
    """Yield every expression of a policy or a part of it, including defaults, counts and ranges."""
    if is_expression(part):
        yield part
        return
    match part:
        case Node():
            for _, value in part:
                yield from everywhere(value)
        case tuple():
            for value in part:
                yield from everywhere(value)


def with_policy(policy: Policy, **changes: object) -> Policy:
    """Return a validated copy with some fields changed; pydantic's `model_copy` does not validate."""
    return Policy(**{name: getattr(policy, name) for name in Policy.model_fields} | changes)
