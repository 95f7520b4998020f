"""What printed expressions look like, and that they mean what the interpreter says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdsl.compiler import analyse
from kvdsl.interp.evaluate import Scope, evaluate_number
from kvdsl.ir.nodes import Call, Expr, Number, ParamRef, call
from kvdsl.lower.cpp_expressions import CountPrinter, SlotPrinter
from kvdsl.lower.torch_expressions import NumberPrinter, TensorPrinter
from kvdsl.passes.columns import add_columns
from kvdsl.source import SourceFile


def lowered(score: str) -> Expr:
    """The score of a policy, on state columns."""
    text = f'kv 1\npolicy P {{\n"a test"\nparam budget = 8\nparam a = 2\nscore {score}\n}}\n'
    analysis = analyse(SourceFile("p.kv", text))
    assert analysis.ok, analysis.diagnostics
    found = add_columns(analysis.policy).score
    assert found is not None
    return found


SCORES = {
    # text: (torch, C++)
    "position - (position - 1)": (
        "slots.position - (slots.position - 1)",
        "static_cast<float>(head.position[i]) - (static_cast<float>(head.position[i]) - 1.0f)",
    ),
    "-(sum(attn) + 1) * 2": ("-(sum_attn + 1) * 2", "-(sum_attn[i] + 1.0f) * 2.0f"),
    "-sum(attn) ** 2": ("-sum_attn.square()", "-kvdsl::square(sum_attn[i])"),
    "(sum(attn) / 2) ** 2": ("(sum_attn / 2).square()", "kvdsl::square(sum_attn[i] / 2.0f)"),
    "sum(attn) / (2 * sum(attn))": ("sum_attn / (2 * sum_attn)", "sum_attn[i] / (2.0f * sum_attn[i])"),
    "(sum(attn) > 1) + 1": ("(sum_attn > 1).float() + 1", "(sum_attn[i] > 1.0f ? 1.0f : 0.0f) + 1.0f"),
    "where(age > 3 and not (age < 1), 1, 0)": (
        "torch.where((slots.age > 3) & (~(slots.age < 1)), 1.0, 0)",
        "((static_cast<float>(head.age(i)) > 3.0f) & (!(static_cast<float>(head.age(i)) < 1.0f)) ? 1.0f : 0.0f)",
    ),
    "max(sum(attn), 0, count())": (
        "torch.maximum((sum_attn).clamp(min=0), slots.observed)",
        "kvdsl::maximum(kvdsl::maximum(sum_attn[i], 0.0f), head.observed(i))",
    ),
    "sum(attn) % a": (
        'sum_attn % slots.number("a")',
        "kvdsl::modulo(sum_attn[i], static_cast<float>(head.param(Number::a)))",
    ),
}


@pytest.mark.parametrize("score", SCORES)
def test_scores_print_as_one_would_write_them(score: str) -> None:
    expr = lowered(score)
    torch_text, cpp_text = SCORES[score]
    assert TensorPrinter("slots").value(expr).text == torch_text
    assert SlotPrinter("head", {}).value(expr).text == cpp_text


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
    product = call("*", ParamRef(name="n"), Number(value=0.7))
    assert CountPrinter()(call("+", product, Number(value=1))).text == "kvdsl::rounded(head.param(Number::n) * 0.7) + 1.0"
