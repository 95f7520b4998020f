"""What printed expressions look like, and that they mean what the interpreter says."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdsl.interp.evaluate import Scope, evaluate_number
from kvdsl.ir.nodes import Call, Expr, Number, ParamRef, call
from kvdsl.lower.cpp_expressions import CountPrinter
from kvdsl.lower.torch_expressions import NumberPrinter

_LEAVES = st.one_of(
    st.integers(-4, 4).map(lambda n: Number(value=abs(n)) if n >= 0 else call("neg", Number(value=-n))),
    st.sampled_from(["a", "b"]).map(lambda name: ParamRef(name=name)),
)
_OPERATORS = ["+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!=", "and", "or"]


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    binary = st.builds(call, st.sampled_from(_OPERATORS), inner, inner)
    unary = st.builds(call, st.sampled_from(["neg", "abs", "floor", "not"]), inner)
    return st.one_of(binary, unary)


EXPRESSIONS = st.recursive(_LEAVES, _grow, max_leaves=12)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_printed_numbers_mean_what_the_interpreter_says(expr: Expr) -> None:
    """Precedence: a tree and its text have the same value. Constant subtrees are the fold pass's business."""
    values = {"a": 3.0, "b": -0.5}
    with np.errstate(all="ignore"):
        expected = evaluate_number(expr, Scope(0, 0, {}, values))
    tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
    text = NumberPrinter("P[{0!r}]", {}, "").value(_no_constants(expr)).text
    got = float(eval(text, {"torch": torch, "P": tensors | {"one": torch.ones(1, dtype=torch.float64)}}))
    assert got == expected or (math.isnan(got) and math.isnan(expected)), text


def _no_constants(expr: Expr) -> Expr:
    """Literals multiplied by a param that is one: what is printed is tensors all the way down."""
    if isinstance(expr, Number):
        return call("*", ParamRef(name="one"), expr)
    if isinstance(expr, Call):
        return call(expr.op, *map(_no_constants, expr.args))
    return expr


def test_counts_are_doubles_in_cpp() -> None:
    half = call("/", Number(value=1), Number(value=2))
    assert CountPrinter()(half).text == "1.0 / 2.0"
