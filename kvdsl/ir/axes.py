"""Axes of expressions: over what a value varies."""

from __future__ import annotations

from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    ColumnRef,
    Enough,
    Expr,
    Fold,
    FoldRef,
    GivenRef,
    Input,
    Leverage,
    Other,
    Pool,
    Previous,
    Project,
    Random,
    Rank,
    Reduce,
    RingRef,
    Rotate,
    TensorRef,
)
from kvdsl.ir.ops import INPUTS


def axes_of(expr: Expr) -> frozenset[Axis]:
    """The axes of an expression. A reduction over queries, or over others, leaves the slots: it has one value per cached token."""
    if isinstance(expr, Input):
        return INPUTS[expr.name].axes
    if isinstance(expr, TensorRef):
        return frozenset({Axis.DIM}) if expr.dims else frozenset()
    if isinstance(expr, (Random, GivenRef, ColumnRef, RingRef, Fold, FoldRef, Previous, Leverage, Pool)):
        return frozenset({Axis.SLOT})
    if isinstance(expr, Call):
        return frozenset().union(*(axes_of(arg) for arg in expr.args))
    if isinstance(expr, Binary):
        return axes_of(expr.left) | axes_of(expr.right)
    if isinstance(expr, Other):
        return (axes_of(expr.body) - {Axis.SLOT}) | {Axis.OTHER}
    if isinstance(expr, (Project, Rank)):
        return axes_of(expr.body)  # what `rank` orders has slots, and so has its key
    if isinstance(expr, Rotate):
        return axes_of(expr.body) | (frozenset() if expr.by is None else axes_of(expr.by))
    if isinstance(expr, Reduce):
        inner = axes_of(expr.body) | (frozenset() if expr.where is None else axes_of(expr.where))
        if expr.within in ("page", "next") or expr.by is not None:  # every slot has the value of its page, or of its key
            return inner | {Axis.SLOT}
        if expr.within == "text":
            return inner - {Axis.QUERY}
        return inner - {expr.axis} | ({Axis.SLOT} if expr.axis in (Axis.QUERY, Axis.OTHER) else frozenset())
    if isinstance(expr, Enough):
        return (axes_of(expr.body) | axes_of(expr.by)) - {Axis.SLOT}
    return frozenset()
