"""Functions: arguments by name, defaults, and the prelude's `pyramid`."""

import pytest

from kvdsl.ir.ops import NAMED_FUNCTIONS
from kvdsl.ir.printer import print_expression
from kvdsl.passes.fold import value_of
from kvdsl.sema.arguments import EXAMPLES
from tests.diagnostics.expect import body, check, expect_in, only, policy


def budget(text: str, *statements: str) -> str:
    checked = policy("param n = 4", *statements, f"budget {text} + n", "score age").budget
    assert checked is not None
    return print_expression(checked)


def test_every_function_has_an_example() -> None:
    assert EXAMPLES.keys() == NAMED_FUNCTIONS


F = "let f(x, y = 2, z = x * y) = x + y + z"


@pytest.mark.parametrize(
    ("call", "meaning"),
    [
        ("f(n)", "n + 2 + n * 2"),
        ("f(n, 3)", "n + 3 + n * 3"),
        ("f(n, 3, 4)", "n + 3 + 4"),
        ("f(n, z = 4)", "n + 2 + 4"),
        ("f(y = 3, x = n)", "n + 3 + n * 3"),
        ("f(n, z = 1, y = 5)", "n + 5 + 1"),
    ],
)
def test_arguments_by_place_and_by_name(call: str, meaning: str) -> None:
    assert budget(call, F) == f"{meaning} + n"


def test_a_default_means_what_it_means_where_the_function_is_defined() -> None:
    assert budget("g(7)", "let w = 9", "let f(x, y = w) = x * y", "let g(w) = f(w)") == "7 * 9 + n"
    assert budget("f(3)", "let f(x, y = later) = x * y", "let later = 5") == "3 * 5 + n"


@pytest.mark.parametrize(
    ("call", "meaning"),
    [
        ("f(sum(attn) where age < 8)", "sum(sum(attn) * age over slots where age < 8) / live"),
        ("f(age over slots by position % 2)", "sum(age * age over slots by position % 2) / live"),
        ("f(age over last 4 queries)", None),
        ("g(attn over last 4 queries)", "sum(attn over last 4 queries) + var(attn over last 4 queries)"),
        ("g(v over dims)", "sum(v over dims) + var(v over dims)"),
        ("g(attn)", "sum(attn) + var(attn)"),
        ("norm1(v over dims)", "sum(abs(v) over dims)"),
    ],
)
def test_a_range_goes_to_the_reductions_of_the_body_that_name_none_or_the_same_axis(call: str, meaning: str | None) -> None:
    lets = (
        ["let f(x) = sum(x * age over slots) / live"]
        if call[0] == "f"
        else ["let g(x) = sum(x) + var(x)"]
        if call[0] == "g"
        else []
    )
    if meaning is None:
        assert only(body("param budget = 8", *lets, f"score {call} + position"), "KV0306")
        return
    checked = policy("param budget = 8", *lets, f"score {call} + position").score
    assert checked is not None
    assert print_expression(checked) == f"{meaning} + position"


def test_an_argument_without_parameters_is_none() -> None:
    assert budget("one()", "let one() = 1") == "1 + n"


@pytest.mark.parametrize(
    ("call", "message", "at", "help"),
    [
        ("f()", "`f` needs its arguments `x` and `y`", "f()", "its form is `f(x, y, z = 3)`"),
        ("f(1, z = 4)", "`f` needs its argument `y`", "f(1, z = 4)", "its form is `f(x, y, z = 3)`"),
        ("f(1, 2, 3, 4)", "`f` takes 2 to 3 arguments, but 4 are given", "f(1, 2, 3, 4)", "write `f(1, 2, 3)`"),
        ("f(1, 2, beta = 3)", "`f` has no argument named `beta`", "beta", "its arguments are `x`, `y` and `z`"),
        ("f(1, 2, x = 3)", "the argument `x` is given twice", "x", None),
        ("f(1, y = 3, y = 4)", "the argument `y` is given twice", "y", None),
        ("f(x = 1, 2)", "an argument without a name cannot follow one with a name", "2", "its form is `f(x, y, z = 3)`"),
        ("norm1(y = 3)", "`norm1` has no argument named `y`", "y", "its argument is `x`"),
        ("pyramid(64, betta = 3)", "`pyramid` has no argument named `betta`", "betta", "did you mean `beta`?"),
        ("norm1(v over slots)", "`norm1` reduces nothing `over slots`", "over slots", "leave it out"),
        ("cosine(k over dims, v over dims)", "only one argument of `cosine` can have a range", "over dims", "leave it out"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(call: str, message: str, at: str, help: str | None) -> None:
    found = only(body("param budget = 8", "let f(x, y, z = 3) = x + y + z", f"score age + {call}"), "KV0306")
    assert (found.message, found.span.text, found.help) == (message, at, help)


def test_definitions_that_make_no_sense() -> None:
    message = "the argument `y` has no default, but `x` before it has one"
    lets = "let f(x = 2, y) = x + y\nscore f(age)"
    expect_in(lets, "KV0306", message, "y", "give it one as well, or put it first")
    assert only(body("param budget = 8", "let f(x, y = 2, x = 3) = x", "score f(age)"), "KV0206").span.text == "x"
    assert only(body("param budget = 8", "let f(attn = 2) = 3", "score f(age)"), "KV0210").span.text == "attn"


def test_errors_in_defaults() -> None:
    for score in ("score f(age)", "score age"):
        found = check(body("param budget = 8", "let f(x, y = z) = x + y", score)).diagnostics
        assert [(one.code, one.span.text) for one in found] == [("KV0201", "z")]
    assert only(body("param budget = 8", "let f(x, y = x, z = w, w = 3) = z", "score f(age)"), "KV0201").span.text == "w"
    found = only(body("param budget = 8", "let f(x, y = f(x)) = x + y", "score f(age)"), "KV0205")
    assert found.message == "`f` is defined by itself"


def test_a_default_is_not_evaluated_where_an_argument_is_given() -> None:
    assert budget("f(3, 4)", "let f(x, y = 1 / 0) = x + y") == "3 + 4 + n"
    assert only(body("let f(x, y = 1 / 0) = x + y", "budget f(3)", "score age"), "KV0408")


# -- pyramid -----------------------------------------------------------------------------------------------------------


def test_a_pyramid_of_one_layer_is_flat() -> None:
    expr = policy("budget pyramid(1000)", "score age").budget
    assert expr is not None
    assert value_of(expr, {"@layer": 0.0, "@layers": 1.0}) == 1000


def test_a_policy_may_define_its_own_pyramid() -> None:
    assert budget("pyramid(8)", "let pyramid(b) = b * layer") == "8 * layer + n"
