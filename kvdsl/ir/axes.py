"""The axes over which an expression varies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdsl.ir.nodes import Axis, Call, Expr, Other, Reduce
from kvdsl.ir.ops import INPUTS, OPERATIONS

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
