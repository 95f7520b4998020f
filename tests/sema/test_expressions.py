"""Expressions: what they become, and what is said about those that make no sense."""

import pytest

from kvdsl.ir.nodes import Input
from kvdsl.ir.printer import print_expression
from kvdsl.ir.visitors import walk
from kvdsl.syntax import habits
from tests.diagnostics.expect import REDUCTIONS, body, check, expect_in, only, policy


def score(text: str, *lets: str) -> str:
    """The IR of a score, printed."""
    expr = policy("param budget = 512", *lets, f"score {text}").score
    assert expr is not None
    return print_expression(expr)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("norm1(v)", "sum(abs(v) over dims)"),
        ("norm2(k)", "sqrt(sum(k * k over dims))"),
        ("norminf(v)", "max(abs(v) over dims)"),
        ("sum(dot(q, k))", "sum(sum(q * k over dims))"),
        ("count()", "count()"),
        ("max(age, 3, position)", "max(max(age, 3), position)"),
        ("max(attn)", "max(attn over queries)"),
        ("min(attn over queries)", "min(attn over queries)"),
        ("sum(attn > 0.5)", "sum(attn > 0.5)"),
        ("where(age > 3 and not age > 9, 1, position)", "where(age > 3 and not age > 9, 1, position)"),
        ("-age ** 2", "-age ** 2"),
        ("(-age) ** 2", "(-age) ** 2"),
        ("2 ** -age", "2 ** -age"),
        ("2 ** 3 ** 0.5 * age", "2 ** 3 ** 0.5 * age"),
        ("(2 ** 3) ** age", "(2 ** 3) ** age"),
        ("age - (position - 3)", "age - (position - 3)"),
        ("age - position - 3", "age - position - 3"),
        ("age * (position + 1) % 7", "age * (position + 1) % 7"),
        ("not (age > 3 or age < 1)", "not (age > 3 or age < 1)"),
        ("(age > 3) == (age < 5)", "(age > 3) == (age < 5)"),
        ("age * (budget + live + prompt + layer + layers)", "age * (budget + live + prompt + layer + layers)"),
        ("position - mean(position over slots)", "position - mean(position over slots)"),
        ("mean(logit) + random()", "mean(logit) + random()"),
    ],
)
def test_what_they_become(text: str, printed: str) -> None:
    assert score(text) == printed
    assert score(printed) == printed


def test_counts_are_an_input() -> None:
    assert policy("param budget = 8", "score count()").score == Input(name="observed")


def test_budget_is_the_tokens_kept_except_in_its_own_definition() -> None:
    checked = policy("param budget = 512", "param recent = budget / 2", "score age + budget", "keep last recent")
    assert Input(name="budget") in walk(checked.params[1].default)
    assert checked.score is not None
    assert Input(name="budget") in walk(checked.score)


# -- axes --------------------------------------------------------------------------------------------------------------


def test_keeps_rank_by_one_number_per_slot() -> None:
    message = "what `keep top` ranks by has one number per slot, but `attn` has one number per query and slot"
    help = "reduce it over queries: `mean(attn)`, `sum(attn)` or `last(attn)`"
    expect_in("keep top 3 by attn", "KV0301", message, "attn", help)


def test_keep_where_needs_a_condition_on_slots() -> None:
    expect_in(
        "keep where age", "KV0303", "`keep where` needs a condition, but `age` is a number", "age", "compare it: `age > 0`"
    )
    assert only(body("param budget = 8", "score age", "keep where attn > 1"), "KV0301")
    assert policy("param budget = 8", "score age", "keep where position < 2 and mean(attn) > 0.5").keeps[0].scope == "where"


@pytest.mark.parametrize(
    ("text", "code", "message", "at", "help"),
    [
        ("mean(position)", "KV0304", "`position` has no queries to reduce over: it is one number per slot", "position",
         "did you mean `mean(position over slots)`?"),
        ("sum(v)", "KV0304", "`v` has no queries to reduce over: it is one number per slot and dim", "v",
         "did you mean `sum(v over dims)`?"),
        ("sum(3)", "KV0304", "`3` has no queries to reduce over: it is a single number", "3", "leave the reduction out"),
        ("mean(attn over dims)", "KV0304", "`attn` has no dims to reduce over: it is one number per query and slot", "attn",
         "did you mean `mean(attn over slots)`?"),
        ("sum(attn > mean(attn))", "KV0305", "a reduction over queries cannot stand inside `sum(...)`, which is one as well", "mean(attn)",
         "move the inner reduction out of the outer one"),
        ("sum(attn / count())", "KV0305", "a reduction over queries cannot stand inside `sum(...)`, which is one as well", "count()",
         "move the inner reduction out of the outer one"),
        ("sum(attn, 3)", "KV0306", "`sum` reduces exactly one value", "sum(attn, 3)", "for example `sum(attn)`"),
        ("sum()", "KV0306", "`sum` reduces exactly one value", "sum()", "for example `sum(attn)`"),
        ("abs(age, 3)", "KV0306", "`abs` takes 1 argument, but 2 are given", "abs(age, 3)", "write `abs(age)`"),
        ("norm1(v, v)", "KV0306", "`norm1` takes 1 argument, but 2 are given", "norm1(v, v)", "write `norm1(v)`"),
        ("count(attn > 0.5)", "KV0306", "`count()` takes no arguments", "count(attn > 0.5)",
         "to count the queries for which a condition holds, sum it: `sum(attn > 0.5)`"),
        ("floor(x = age)", "KV0306", "`floor` has no argument named `x`", "x", None),
        ("abs(age over slots)", "KV0306", "`abs` reduces nothing `over slots`", "over slots", "leave it out"),
        ("floor(age over slots)", "KV0306", "`floor` is not a reduction of one value, so `over` has no meaning here", "over slots",
         REDUCTIONS),
        ("mean(attn over slot)", "KV0307", "unknown axis `slot`", "slot", "did you mean `slots`?"),
        ("mean(attn over tokens)", "KV0307", "unknown axis `tokens`", "tokens", "write `slots`"),
        ("age(3)", "KV0309", "`age` is not a function", "age", "leave out the parentheses"),
        ("norm1", "KV0309", "`norm1` is a function, not a value", "norm1", "its form is `norm1(x)`"),
        ("age + random", "KV0309", "`random` is a function, not a value", "random", "write `random()`"),
        ("mean", "KV0309", "`mean` is a function, not a value", "mean", "for example `mean(attn)`"),
        ("atn", "KV0201", "unknown name `atn`", "atn", "did you mean `attn`?"),
        ("observed", "KV0201", "unknown name `observed`", "observed",
         "add `param observed = 1`, `let observed = ...`, or `given observed`, a number of each token, if it is yours"),
        ("attention", "KV0201", "unknown name `attention`", "attention", "write `attn`: the probability that the query gives the slot"),
        ("norm2(key)", "KV0201", "unknown name `key`", "key", "write `k`"),
        ("avg(attn)", "KV0202", "unknown function `avg`", "avg", "write `mean(attn)`"),
        ("clip(age, 0, 3)", "KV0202", "unknown function `clip`", "clip", "write `min(max(age, 0), 3)`"),
        ("men(attn)", "KV0202", "unknown function `men`", "men", "did you mean `mean`?"),
        ("nrm2(v)", "KV0202", "unknown function `nrm2`", "nrm2", "did you mean `norm2`?"),
        ("age and 3 > 2", "KV0303", "`and` needs a condition, but `age` is a number", "age", "compare it: `age > 0`"),
        ("not age", "KV0303", "`not` needs a condition, but `age` is a number", "age", "compare it: `age > 0`"),
        ("where(age, 1, 2)", "KV0303", "`where` needs a condition, but `age` is a number", "age", "compare it: `age > 0`"),
        ("age / 0", "KV0408", "`age / 0` divides by zero", "age / 0", None),
        ("age % (2 - 2)", "KV0408", "`age % (2 - 2)` divides by zero", "age % (2 - 2)", None),
        ("age + sqrt(-1)", "KV0408", "`(-1) ** 0.5` has no finite value", "sqrt(-1)", "`sqrt(x)` is `x ** 0.5`"),
        ("age + log(0)", "KV0408", "`log(0)` has no finite value", "log(0)", None),
        ("age + 1e300 * 1e300", "KV0408", "`1e300 * 1e300` has no finite value", "1e300 * 1e300", None),
        ("dot(age, age)", "KV0304", "`age * age` has no dims to reduce over: it is one number per slot", "dot(age, age)",
         "`dot(a, b)` is `sum(a * b over dims)`"),
    ],
)  # fmt: skip
def test_errors(text: str, code: str, message: str, at: str, help: str | None) -> None:
    expect_in(f"score {text}", code, message, at, help)


def test_an_error_is_said_once_and_nothing_follows_from_it() -> None:
    found = only(body("param budget = 8", "let a = atn", "let b = a + mean(a)", "score b * a"), "KV0201")
    assert found.span.text == "atn"


def test_several_errors_in_one_expression() -> None:
    found = check(body("param budget = 8", "score mean(atn) + men(attn) + age / 0")).diagnostics
    assert [one.code for one in found] == ["KV0201", "KV0202", "KV0408"]


# -- lets, functions, hygiene ------------------------------------------------------------------------------------------


def test_lets_and_functions_are_put_in() -> None:
    assert score("f(attn) + a", "let f(x) = mean(x) * 2", "let a = f(logit)") == "mean(attn) * 2 + mean(logit) * 2"


def test_a_let_may_be_defined_after_its_use() -> None:
    assert score("a", "let a = b + 1", "let b = age") == "age + 1"


def test_arguments_are_values_not_texts() -> None:
    assert score("twice(age + 1)", "let twice(x) = x * 2") == "(age + 1) * 2"


def test_an_argument_is_not_taken_for_a_name_of_the_body() -> None:
    lets = ("let y = 7", "let f(x) = x + y", "let g(y) = f(y * 2)")
    assert score("g(age)", *lets) == "age * 2 + 7"


def test_arguments_shadow_lets_and_lets_shadow_the_prelude() -> None:
    assert score("norm1(v) + aas", "let norm1(x) = max(x over dims)", "let aas = age") == "max(v over dims) + age"


def test_a_let_does_not_change_what_the_prelude_means() -> None:
    text = "let unused(x) = x"
    assert score("norm1(v)") == "sum(abs(v) over dims)"
    analysis = check(f"kv 1\n{text}\nlet x = 3\n" + body("param budget = 8", "score norm1(v) * x").removeprefix("kv 1\n"))
    assert print_expression(analysis.policy.score) == "sum(abs(v) over dims) * 3"


def test_recursion_is_refused() -> None:
    found = only(body("param budget = 8", "let a = b", "let b = a", "score a"), "KV0205")
    assert found.message == "`a` is defined by itself"
    assert [label.text for label in found.labels] == ["used here again"]
    assert only(body("param budget = 8", "let f(x) = f(x)", "score f(age)"), "KV0205")


def test_errors_inside_of_a_function_name_its_use() -> None:
    found = only(body("param budget = 8", "let f(x) = mean(x)", "score f(age)"), "KV0304")
    assert found.span.text == "x"
    assert [(label.span.text, label.text) for label in found.labels] == [("f(age)", "used here")]


def test_errors_inside_of_the_prelude_are_shown_where_it_is_used() -> None:
    message = "`abs(attn)` has no dims to reduce over: it is one number per query and slot"
    expect_in("score norm1(attn)", "KV0304", message, "norm1(attn)", "`norm1(x)` is `sum(abs(x) over dims)`")
    message = "`abs(age + 3)` has no dims to reduce over: it is one number per slot"
    expect_in("let f(y) = norm1(y + 3)\nscore f(age)", "KV0304", message.replace("age", "y"), "norm1(y + 3)",
              "`norm1(x)` is `sum(abs(x) over dims)`")  # fmt: skip
    found = only(body("budget pyramid(3, beta = 1 - 1)", "score age"), "KV0408")
    assert found.message == "`3 / (1 - 1)` divides by zero"
    assert found.help is not None and found.help.startswith("`pyramid(b, beta = 20)` is `where(")


def test_what_people_write_elsewhere_is_nothing_of_the_language() -> None:
    from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS

    assert not habits.NAMES.keys() & NAMED_INPUTS
    assert not habits.FUNCTIONS.keys() & NAMED_FUNCTIONS
    for word in habits.STATEMENTS:
        found = check(body("param budget = 512", word, "score age")).diagnostics
        assert [(one.code, one.help) for one in found] == [("KV0104", habits.STATEMENTS[word])]


def test_unused_functions_are_checked_for_names() -> None:
    found = check(body("param budget = 8", "let f(x) = x + nme", "score age")).diagnostics
    assert [one.code for one in found] == ["KV0201"]


def test_growth_by_lets_is_limited() -> None:
    lets = ["let a0 = age", *(f"let a{i + 1} = a{i} + a{i}" for i in range(40))]
    found = only(body("param budget = 8", *lets, "score a40"), "KV0107")
    assert found.help == "an expression has at most 1,000 parts, nested at most 100 deep"
