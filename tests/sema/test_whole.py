"""Policies as a whole: budgets, keeps, params and their settings."""

import pytest

from kvdsl.ir.nodes import Number, ParamRef
from kvdsl.ir.ops import KEEPS
from kvdsl.ir.printer import print_expression, print_keep
from tests.diagnostics.expect import body, check, expect, expect_in, only, policy

WINDOW = body("param budget = 512", "score position")


def keeps(*statements: str) -> list[str]:
    return [print_keep(keep) for keep in policy("param budget = 512", "score age", *statements).keeps]


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_last_token_is_kept_unless_the_policy_says_otherwise() -> None:
    assert keeps() == ["keep last 1"]
    assert keeps("keep first 4") == ["keep first 4", "keep last 1"]
    assert keeps("keep last 0") == []
    assert keeps("keep last 8") == ["keep last 8"]
    assert keeps("keep last 0", "keep first 4") == ["keep first 4"]


@pytest.mark.parametrize("form", KEEPS)
def test_every_form_of_keep_prints_as_it_is_written(form: str) -> None:
    row = KEEPS[form]
    written = f"keep {form} {row.written.format(count='3', by='age < 3' if row.holds else 'age')}"
    assert written in keeps(written)


@pytest.mark.parametrize(
    "statements",
    [
        ("param budget = 8", "score norm2(turn(k, 1))"),
        ("param budget = 8", "score age", "keep top 2 by norm2(pairs(k))"),
        ("select top 8 by dot(q, turn(k, 1))",),
        ("select top 8 by dot(q, k over sketch)", "sketch top 4 dims by abs(turn(q, 1)) every 8 queries"),
    ],
)
def test_policies_that_rotate_vectors_ask_for_the_model_s_rotation(statements: tuple[str, ...]) -> None:
    assert policy(*statements).rotates


def test_a_policy_without_a_budget_keeps_everything() -> None:
    checked = policy()
    assert (checked.budget, checked.score, checked.keeps) == (None, None, ())


def test_when_and_how_many() -> None:
    checked = policy("param R = 32", "param budget = 512", "score age", "trigger overflow >= R", "slack 24", "max_drop 8")
    assert (checked.trigger, checked.slack, checked.max_drop) == (ParamRef(name="R"), Number(value=24), Number(value=8))


def test_group() -> None:
    assert policy("param budget = 8", "score mean(attn)", "group max").group == "max"
    expect_in(
        "group largest", "KV0310", "`group` cannot be `largest`", "largest", "`group` is `mean`, `max`, `sum` or `each`"
    )
    expect_in("group men", "KV0310", "`group` cannot be `men`", "men", "did you mean `mean`?")


def test_positions_original_is_the_default() -> None:
    assert policy("param budget = 8", "score age", "positions original").positions == "original"


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_a_budget_needs_a_score_and_the_reverse() -> None:
    message = "the policy has a budget but no score"
    expect(body("param budget = 8"), "KV0401", message, "P", "add `score sum(attn)`, say")
    message = "without a budget nothing is evicted, so `score` has no meaning"
    expect(body("score age"), "KV0402", message, "score age", "add `param budget = 512`, say")
    text = body("param budgt = 256", "score age")
    expect(text, "KV0402", message, "score age", "did you mean `budget`, not `budgt`?")
    assert only(body("keep first 4"), "KV0402").message.endswith("so `keep` has no meaning")
    assert only(body("slack 4"), "KV0402").message.endswith("so `slack` has no meaning")


@pytest.mark.parametrize(("value", "shown"), [("0", "0"), ("-1", "-1"), ("3 - 4", "-1"), ("0 * 512", "0")])
def test_a_budget_keeps_at_least_one_token(value: str, shown: str) -> None:
    message = f"the budget is {shown}, but a policy keeps at least 1 token"
    expect(body(f"param budget = {value}", "score age"), "KV0403", message, value)


def test_a_rate_of_the_prompt() -> None:
    for text, settings in (("0.25", {}), ("512", {"budget": "0.25"}), ("512 in 1..4096", {"budget": "0.25"})):
        checked = policy(f"param budget = {text}", "score age", **settings)
        assert print_expression(checked.params[0].default) == "max(1, floor(0.25 * prompt))"
    for text, settings in (("1.0", {}), ("512", {"budget": "1.0"}), ("512", {"budget": "1e0"})):
        checked = policy(f"param budget = {text}", "score age", **settings)
        assert print_expression(checked.params[0].default) == "max(1, floor(1 * prompt))"
    for text, settings in (("1", {}), ("512", {"budget": "1"})):
        assert print_expression(policy(f"param budget = {text}", "score age", **settings).params[0].default) == "1"
    assert print_expression(policy("param budget = 512", "score age", budget="2.0").params[0].default) == "2"
    message = "the budget is 1.5, which is neither a whole number of tokens nor a ratio up to 1.0"
    expect(
        body("param budget = 1.5", "score age"), "KV0403", message, "1.5", "write `1`, or `0.25` for a quarter of the prompt"
    )
    found = only(body("budget 0.25", "score age"), "KV0403")
    assert found.help == "a ratio of the prompt is written `0.25 * prompt`"
    assert print_expression(policy("budget 0.25 * prompt", "score age").budget) == "0.25 * prompt"


def test_a_budget_cannot_read_itself() -> None:
    for statements in (
        ("budget budget + 1",),
        ("let b = budget", "budget b"),
        ("param recent = budget / 2", "budget recent * 2"),
        ("param recent = budget / 2", "param more = recent", "budget more"),
    ):
        assert only(body(*statements, "score age"), "KV0409")
    assert only(body("param budget = budget", "score age"), "KV0409")
    found = only(body("param budget = 8", "let half = budget / 2", "budget half + 1", "score age"), "KV0409")
    assert found.help == "only in this line `budget` means the param: inline the `let` or param that reads `budget`"
    assert policy("param budget = 8", "budget budget / 2 + 1", "score age").budget is not None
    found = only(body("let half = budget / 2", "budget half + 1", "score age"), "KV0409")
    assert found.help == "add `param budget = 512` and read that: only in this line `budget` means the param"


def test_a_budget_by_layer_that_is_too_small_in_some() -> None:
    lines = ("param budget = 512", "budget budget / (1 + layer)", "score age", "keep last 20", "keep first 12")
    message = "in layer 31 of 32 the budget is 16, but 32 tokens are protected"
    help = "protect fewer, or raise the budget to 1024"
    expect(body(*lines), "KV0423", message, "budget / (1 + layer)", help)
    assert not check(body("param budget = 1024", *lines[1:])).diagnostics
    assert not check(body("param budget = 512", "budget budget / (1 + layer) * prompt", *lines[2:])).diagnostics


@pytest.mark.parametrize("name", ["age", "attn", "norm1(v)"])
def test_a_budget_is_a_single_number(name: str) -> None:
    (found,) = check(body(f"budget {name}", "score age")).diagnostics
    assert found.code == "KV0302"
    assert found.help == (None if name == "attn" else f"count or add up the tokens: `sum({name} over slots)`")


def test_counts_do_not_depend_on_what_is_cached() -> None:
    message = "the count of `keep last` is a single number, but `age` has one number per slot"
    expect_in(
        "keep last age",
        "KV0302",
        message,
        "age",
        "it can read params, `budget`, `prompt`, `layer`, `layers` and `everything`",
    )
    message = "`live` changes from step to step, so the count of `keep first` cannot read it"
    expect_in(
        "keep first live / 2",
        "KV0308",
        message,
        "live / 2",
        "it can read params, `budget`, `prompt`, `layer`, `layers` and `everything`",
    )
    found = only(body("param budget = 8", "score age", "slack max(age over slots)"), "KV0308")
    assert found.message == "`slack` cannot depend on what is cached, as `max(age over slots)` does"


def test_defaults_read_earlier_params_only() -> None:
    found = only(body("param a = b", "param b = 3", "budget a", "score age"), "KV0308")
    assert (found.message, found.help) == ("`b` is defined after `a`", "move `param b` before it")
    assert only(body("param a = a + 1", "budget a", "score age"), "KV0308").message == "`a` is defined by itself"
    found = only(body("param x = budget / 4", "param budget = 8 * x", "score age", "keep last x"), "KV0409")
    assert found.message == "the default of `budget` cannot read `budget`"


# -- more kept than the budget holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["keep first 300", "keep last 300"], "`keep first 300` and `keep last 300` protect 600 tokens, but the budget is 512"),
        (
            ["keep first 512"],
            "`keep first 512` and the last token, which edition 1 keeps by default, protect 513 tokens, but the budget is 512",
        ),
        (["keep first 1e300"], "`keep first 1e300` protects 1e+300 tokens, but the budget is 512"),
        (["keep first 513", "keep last 0"], "`keep first 513` protects 513 tokens, but the budget is 512"),
        (["keep last 513"], "`keep last 513` protects 513 tokens, but the budget is 512"),
        (["keep top budget + 1 by age"], "`keep top budget + 1 by age` protects 513 tokens, but the budget is 512"),
    ],
)  # fmt: skip
def test_keeps_that_exceed_the_budget(statements: list[str], message: str) -> None:
    found = only(body("param budget = 512", "score age", *statements), "KV0404")
    assert (found.message, found.help) == (message, "protect fewer, or raise the budget")


def test_keeps_that_fit() -> None:
    assert keeps("keep first 128", "keep last 128", "keep top 256 by age")
    assert keeps("keep first 100", "keep first 400", "keep last 112")
    assert keeps("keep first 511.9")


def test_keeps_are_compared_with_the_budget_that_is_set() -> None:
    from kvdsl.compiler import analyse, find_policy

    analysis = analyse(find_policy("vatp_h2o"), settings={"budget": "32"})
    (found,) = analysis.diagnostics
    assert found.code == "KV0404"
    assert found.message == "`keep first sinks` and `keep last recent` protect 36 tokens, but the budget is 32"
    assert found.labels[-1].span.text == "32"


def test_negative_counts() -> None:
    message = "`keep last` needs a count of at least 0, but `-3` is -3"
    expect_in("keep last -3", "KV0405", message, "-3")
    expect_in("slack 1 - 2", "KV0405", "`slack` needs a count of at least 0, but `1 - 2` is -1", "1 - 2")


# -- params and settings -----------------------------------------------------------------------------------------------


def test_units_and_ranges() -> None:
    (param,) = policy("param budget tokens = 512 in 1..4096", "score age").params
    assert (param.unit, param.low, param.high) == ("tokens", 1, 4096)
    (param,) = policy("param budget = 512 in 2 ** 3..", "score age").params
    assert (param.low, param.high) == (8, None)
    param = policy("param w = -0.5 in -1..1", "param budget = 8", "score age * w").params[0]
    assert (param.low, param.high) == (-1, 1)


def test_empty_ranges() -> None:
    found = only(body("param budget = 8 in 9..1", "score age"), "KV0407")
    assert (found.message, found.help) == ("the range `9..1` is empty", "did you mean `1..9`?")
    found = only(body("param a = 1", "param budget = 8 in a..", "score age"), "KV0407")
    assert found.message == "the end of a range is a constant, but `a` is not"
    assert check(body("param budget = 8 in 8..8", "score age")).ok


def test_a_ratio_is_the_budget_as_a_rate() -> None:
    from kvdsl.compiler import analyse, find_policy

    for text in ("1", "1.0", "0.25"):
        (ratio, _), (budget, _) = (
            analyse(find_policy("h2o"), settings=given).policy.params
            for given in ({"ratio": text}, {"budget": str(float(text))})
        )
        assert ratio == budget


@pytest.mark.parametrize("value", ["0", "-1", "2", "1.5"])
def test_a_ratio_that_is_none(value: str) -> None:
    found = only(WINDOW, "KV0216", ratio=value)
    assert (found.message, found.span.text) == (f"`ratio` is {value}, which is not a ratio of the prompt", value)
    assert found.help is not None and "above 0 and up to 1" in found.help


def test_a_ratio_where_it_has_no_place() -> None:
    expect(WINDOW, "KV0216", "`budget` and `ratio` are both given", "ratio=0.5", "give one of them", ratio="0.5", budget="9")
    expect(
        body(),
        "KV0215",
        "the policy has no param `ratio`",
        "ratio",
        "it has no `budget` that a `ratio` could set",
        ratio="1",
    )


def test_unknown_settings() -> None:
    expect(WINDOW, "KV0215", "the policy has no param `bugdet`", "bugdet", "did you mean `budget`?", bugdet="3")
    expect(WINDOW, "KV0215", "the policy has no param `x`", "x", "the params are `budget`", x="3")
    assert only(body(), "KV0215", budget="3").help is None


@pytest.mark.parametrize("value", ["abc", "", "nan", "inf", "1e999", "1_000", "0x10", "512; import os", "\x1b[31m"])
def test_settings_are_numbers(value: str) -> None:
    found = only(WINDOW, "KV0216", budget=value)
    assert found.message == f"`budget` needs a number, not `{value}`"
    assert found.help == "for example `--set budget=256`"
    assert found.span.text == value


@pytest.mark.parametrize("value", ["0", "-1"])
def test_settings_of_budgets_that_keep_nothing(value: str) -> None:
    found = only(WINDOW, "KV0403", budget=value)
    assert (found.message, found.file) == (f"the budget is {value}, but a policy keeps at least 1 token", "--set")


def test_params_that_read_each_other_twice_take_no_time() -> None:
    lines = ["param p0 = budget", *(f"param p{i + 1} = p{i} + p{i}" for i in range(200))]
    found = only(body(*lines, "budget p200", "score age"), "KV0409")
    assert found.span.text == "p200"


def test_edition_2_keeps_nothing_by_default() -> None:
    """What `keep first` protects may be all of the budget; in edition 1 the last token stays, too."""
    body = 'policy P {\n"A test."\nparam budget = 4\nscore sum(attn)\nkeep first 4\n}\n'
    assert [found.code for found in check(f"kv 2\n{body}").diagnostics] == []
    assert "KV0404" in {found.code for found in check(f"kv 1\n{body}").diagnostics}
    assert check(f"kv 2\n{body}".replace("keep first 4", "")).policy.keeps == ()
