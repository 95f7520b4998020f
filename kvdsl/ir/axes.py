"""Axes of expressions: over what a value varies."""

from __future__ import annotations

from kvdsl.ir.nodes import Axis, Binary, Call, ColumnRef, Expr, Input, Pool, Random, Reduce, RingRef

INPUT_AXES: dict[str, frozenset[Axis]] = {
    "attn": frozenset({Axis.QUERY, Axis.SLOT}),
    "logit": frozenset({Axis.QUERY, Axis.SLOT}),
    "q": frozenset({Axis.QUERY, Axis.DIM}),
    "k": frozenset({Axis.SLOT, Axis.DIM}),
    "v": frozenset({Axis.SLOT, Axis.DIM}),
    "position": frozenset({Axis.SLOT}),
    "age": frozenset({Axis.SLOT}),
    "observed": frozenset({Axis.SLOT}),
    "budget": frozenset(),
    "live": frozenset(),
    "prompt": frozenset(),
    "layer": frozenset(),
    "layers": frozenset(),
}


def axes_of(expr: Expr) -> frozenset[Axis]:
    """The axes of an expression. A reduction over queries leaves the slots: it has one value per cached token."""
    if isinstance(expr, Input):
        return INPUT_AXES[expr.name]
    if isinstance(expr, (Random, ColumnRef, RingRef, Pool)):
        return frozenset({Axis.SLOT})
    if isinstance(expr, Call):
        return frozenset().union(*(axes_of(arg) for arg in expr.args))
    if isinstance(expr, Binary):
        return axes_of(expr.left) | axes_of(expr.right)
    if isinstance(expr, Reduce):
        inner = axes_of(expr.body)
        if expr.within == "page":  # every slot has the value of its page
            return inner
        return (inner - {Axis.QUERY}) | {Axis.SLOT} if expr.axis is Axis.QUERY else inner - {expr.axis}
    return frozenset()
