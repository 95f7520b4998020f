"""Constant folding."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdsl.ir.nodes import Expr, Input, Number, call
from kvdsl.ir.printer import print_expression
from kvdsl.passes.fold import fold, fold_expression, value_of
from tests.diagnostics.expect import policy


def folded(text: str) -> str:
    checked = fold(policy("param budget = 512", f"score age * ({text})"))
    assert checked.score is not None
    return print_expression(checked.score).removeprefix("age * ")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("-(3)", "-3"),
        ("2 ** 3 ** 2", "512"),
        ("-7 % 3", "2"),
        ("7 / 2", "3.5"),
        ("max(1, 2, min(7, 5))", "5"),
        ("floor(2.5) + ceil(2.5)", "5"),
        ("where(1 < 2, 3, 4)", "3"),
        ("(1 < 2) + (2 <= 2) + (1 == 1) + (1 != 1) + (2 > 3) + (2 >= 3)", "3"),
        ("1 < 2 and not 2 < 1 or 1 > 2", "1"),
        ("sqrt(16) + abs(-3) + exp(0) + log(1)", "8"),
        ("budget / (1 + 1)", "(budget / 2)"),
        ("mean(attn * (2 - 1))", "mean(attn * 1)"),
    ],
)
def test_constant_parts_are_computed(text: str, result: str) -> None:
    assert folded(text) == result


def test_everything_else_is_left_as_the_same_object() -> None:
    expr = policy("param budget = 8", "score mean(attn * 2) + age").score
    assert expr is not None
    assert fold_expression(expr) is expr


def test_values_of_params_and_inputs_can_be_given() -> None:
    checked = policy("param budget = 8", "param recent = budget / 2", "score age", "keep last recent")
    assert value_of(checked.params[1].default) is None
    assert value_of(checked.params[1].default, {"@budget": 8.0}) == 4
    assert checked.keeps[0].count is not None
    assert value_of(checked.keeps[0].count, {"recent": 3.0}) == 3


def test_a_policy_is_folded_everywhere() -> None:
    checked = fold(
        policy(
            "param budget = 2 ** 9",
            "score age * (1 + 1)",
            "keep top 1 + 1 by age + (2 - 1)",
            "trigger overflow >= 2 * 4",
            "slack 7 - 2",
            "max_drop 2 + 2",
        )
    )
    assert checked.params[0].default == Number(value=512)
    assert checked.keeps[0].count == Number(value=2)
    assert (checked.trigger, checked.slack, checked.max_drop) == (Number(value=8), Number(value=5), Number(value=4))
    assert fold(checked) == checked


def test_what_is_not_finite_is_unknown() -> None:
    large = Number(value=1e200)
    assert value_of(call("*", large, large)) is None


NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: Number(value=value))
OPERATORS = ["+", "-", "*", "/", "%", "**", "<", "<=", ">", ">=", "==", "!=", "and", "or"]


def _grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    binary = st.builds(lambda op, left, right: call(op, left, right), st.sampled_from(OPERATORS), inner, inner)
    names = st.sampled_from(["neg", "not", "abs", "sqrt", "exp", "log", "floor", "ceil"])
    return binary | st.builds(call, names, inner)


@given(st.recursive(NUMBERS | st.just(Input(name="age")), _grown, max_leaves=20))
def test_folding_never_fails_and_stays_finite(expr: Expr) -> None:
    result = fold_expression(expr)
    assert fold_expression(result) == result
    if isinstance(result, Number):
        assert math.isfinite(result.value)
