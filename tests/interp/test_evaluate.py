"""What expressions mean: operators, functions and reductions, and the numbers of a policy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdsl.interp import resolve
from kvdsl.interp.evaluate import Scope, evaluate, evaluate_slots, per_slot
from kvdsl.ir.nodes import Expr, Param, ParamRef, Policy

from .policies import POSITION, K, Q, binary, bounded, call, num, over, read

NAN, INF = math.nan, math.inf
KEYS = np.array([[1.0, -2.0], [3.0, 4.0], [0.0, 0.5]])
SCOPE = Scope(
    slots=3,
    dims=2,
    inputs={"k": KEYS, "q": np.array([[2.0, -1.0]]), "position": per_slot([0, 4, 7]), "live": per_slot([3])},
    params={"alpha": 0.25},
)


def value(expr: Expr) -> float:
    return float(evaluate(expr, SCOPE).item())


@pytest.mark.parametrize(
    ("left", "op", "right", "expected"),
    [
        (7, "+", 2, 9),
        (7, "-", 2, 5),
        (7, "*", 2, 14),
        (7, "/", 2, 3.5),
        (1, "/", 0, INF),
        (-1, "/", 0, -INF),
        (0, "/", 0, NAN),
        (7, "%", 3, 1),
        (-7, "%", 3, 2),  # the remainder of the floored quotient
        (7, "%", -3, -2),
        (7.5, "%", 2, 1.5),
        (7, "%", 0, NAN),
        (2, "**", 10, 1024),
        (2, "**", -1, 0.5),
        (0, "**", 0, 1),
        (-8, "**", 0.5, NAN),
        (1, "<", 2, 1),
        (2, "<", 2, 0),
        (2, "<=", 2, 1),
        (2, ">", 1, 1),
        (2, ">=", 3, 0),
        (2, "==", 2, 1),
        (2, "!=", 2, 0),
        (0.0, "==", -0.0, 1),
        (NAN, "<", 1, 0),
        (NAN, ">=", NAN, 0),
        (NAN, "==", NAN, 0),
        (NAN, "!=", NAN, 1),  # IEEE's one exception
        (2, "and", -1, 1),
        (2, "and", 0, 0),
        (0, "or", -0.0, 0),
        (0, "or", 0.5, 1),
    ],
)
def test_operators(left: float, op: str, right: float, expected: float) -> None:
    np.testing.assert_equal(value(binary(num(left), op, num(right))), float(expected))


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        ("neg", [2], -2),
        ("not", [0], 1),
        ("not", [3], 0),
        ("abs", [-2], 2),
        ("sqrt", [9], 3),
        ("sqrt", [-1], NAN),
        ("exp", [0], 1),
        ("exp", [1e9], INF),
        ("log", [1], 0),
        ("log", [0], -INF),
        ("acos", [-1], math.pi),
        ("acos", [1.5], NAN),
        ("floor", [-1.5], -2),
        ("ceil", [-1.5], -1),
        ("min", [2, 1], 1),
        ("max", [2, 1], 2),
        ("max", [NAN, 1], NAN),
        ("min", [1, NAN], NAN),
        ("where", [1, 5, 6], 5),
        ("where", [0, 5, 6], 6),
        ("where", [0, NAN, 6], 6),
    ],
)
def test_functions(function: str, args: list[float], expected: float) -> None:
    np.testing.assert_equal(value(call(function, *map(num, args))), float(expected))


def test_over_dims_and_slots() -> None:
    assert evaluate_slots(over("sum", "dim", call("abs", K)), SCOPE).tolist() == [3, 7, 0.5]
    assert evaluate_slots(over("max", "dim", K), SCOPE).tolist() == [1, 4, 0.5]
    assert evaluate_slots(over("std", "dim", K), SCOPE).tolist() == [1.5, 0.5, 0.25]
    assert evaluate_slots(over("sum", "dim", binary(Q, "*", K)), SCOPE).tolist() == [4, 2, -0.5]
    assert value(over("mean", "slot", POSITION)) == 11 / 3
    assert value(over("sum", "dim", over("max", "slot", K))) == 7
    assert evaluate_slots(binary(POSITION, ">", over("mean", "slot", POSITION)), SCOPE).tolist() == [0, 1, 1]


def test_what_does_not_vary_counts_each_time() -> None:
    assert value(over("sum", "slot", num(2))) == 6
    assert evaluate_slots(over("sum", "dim", POSITION), SCOPE).tolist() == [0, 8, 14]
    assert evaluate_slots(ParamRef(name="alpha"), SCOPE).tolist() == [0.25] * 3


def test_nothing_is_remembered_outside_a_head() -> None:
    with pytest.raises(LookupError):
        evaluate(over("sum", "query", num(1)), SCOPE)


def _with_params(*params: Param) -> Policy:
    return bounded(POSITION, budget=512, params=params)


def test_params_resolve_in_order() -> None:
    policy = _with_params(
        Param(name="recent", default=binary(read("budget"), "/", num(2))),
        Param(name="both", default=binary(ParamRef(name="recent"), "+", read("layers"))),
    )
    assert resolve(policy, layers=4).params == {"budget": 512, "recent": 256, "both": 260}
    assert resolve(policy, {"budget": 5}).params == {"budget": 5, "recent": 2.5, "both": 3.5}
    assert resolve(policy, {"recent": 7, "budget": None}).params == {"budget": 512, "recent": 7, "both": 8}
    with pytest.raises(ValueError, match="no param recnt"):
        resolve(policy, {"recnt": 7})


def test_the_budget_comes_first_wherever_it_is_declared() -> None:
    """Defaults read the resolved budget, floored; the budget may read params in turn."""
    policy = Policy(
        name="Example",
        stem="example",
        params=(
            Param(name="recent", default=binary(read("budget"), "/", num(2))),
            Param(name="share", default=num(0.5)),
        ),
        budget=binary(ParamRef(name="share"), "*", read("prompt")),
        score=POSITION,
        trigger=ParamRef(name="recent"),
    )
    numbers = resolve(policy, prompt=25)
    assert (numbers.budget, numbers.params, numbers.trigger) == (12, {"recent": 6, "share": 0.5}, 6)


@pytest.mark.parametrize(
    ("given", "prompt", "expected"),
    [
        (0.25, 1000, 250),
        (0.3, 999, 299),
        (0.25, 3, 1),
        (0.5, 0, 1),
        (1, 1000, 1),
        (1.0, 1000, 1000),
        (2.0, 1000, 2),
        (64, 10, 64),
    ],
)
def test_a_float_up_to_one_is_a_rate(given: float, prompt: int, expected: float) -> None:
    assert resolve(_with_params(), {"budget": given}, prompt).budget == expected


@pytest.mark.parametrize("given", [1.75, 64.9, 0, -1, -0.5, INF, float("nan")])
def test_what_is_no_budget(given: float) -> None:
    with pytest.raises(ValueError, match=r"use a number of tokens \(512\), or a ratio of the prompt above 0 and up to 1.0"):
        resolve(_with_params(), {"budget": given}, 100)


def test_budgets_are_expressions_of_layer_and_prompt() -> None:
    budget = binary(read("prompt"), "/", binary(read("layer"), "+", num(2)))
    policy = Policy(name="Pyramid", stem="pyramid", budget=budget, score=POSITION, trigger=num(2.5), slack=num(1.5))
    numbers = resolve(policy, prompt=101, layer=2, layers=8)
    assert (numbers.budget, numbers.trigger, numbers.slack, numbers.max_drop) == (25, 2, 1, 0)
    assert resolve(Policy(name="Full", stem="full")).budget == INF
