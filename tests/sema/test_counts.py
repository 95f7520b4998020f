"""Budgets and selections that read the data: what is one, and what they go with."""

from __future__ import annotations

import pytest

from kvdsl.ir.nodes import Call, Input, Number, ParamRef
from kvdsl.ir.printer import print_expression, print_policy
from tests.diagnostics.expect import body, check, expect, only, policy

EVERYTHING = Input(name="everything")


def test_a_budget_reads_the_data_and_has_a_bound() -> None:
    found = policy("param rate = 0.5", "budget rate * seen at most 4096", "score sum(attn)")
    assert found.measured is not None and print_expression(found.measured) == "rate * seen"
    assert found.budget == Number(value=4096)
    assert policy("budget live / 2", "score sum(attn)").budget == EVERYTHING


def test_a_bound_of_a_budget_that_reads_no_data_is_a_minimum() -> None:
    found = policy("budget 0.25 * prompt at most 512", "score sum(attn)")
    assert found.measured is None
    assert isinstance(found.budget, Call) and print_expression(found.budget) == "min(0.25 * prompt, 512)"


def test_in_its_own_line_the_budget_is_the_param() -> None:
    found = policy("param budget = 64", "budget 0.5 * seen at most budget", "score sum(attn)")
    assert found.budget == ParamRef(name="budget")


@pytest.mark.parametrize(
    "lines",
    [
        ("budget 0.5 * seen at most 40",),
        ("budget enough(sum(attn), 0.9)",),
        ("budget enough(norm1(v), 0.9, -position) + 4",),
        ("param budget = 40", "select top enough(exp(dot(q, k)), 0.9) by dot(q, k) in layers 1.."),
    ],
)
def test_what_is_printed_means_the_same(lines: tuple[str, ...]) -> None:
    found = policy(*lines, "score sum(attn)")
    again = check(print_policy(found)).policy
    assert again.model_copy(update={"stem": found.stem}) == found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("keep last budget / 4", "cannot read `budget`"),
        ("param part = budget / 4", "cannot read `budget`"),
        ("cap hard", "`cap hard` needs it before a token is placed"),
        ("victims shared by layers", "layers cannot agree on the victims"),
        ("select top budget / 2 by dot(q, k)", "cannot read `budget`"),
    ],
)
def test_what_does_not_go_with_it(line: str, says: str) -> None:
    more = ("keep last part",) if line.startswith("param") else ()
    found = only(body(line, "budget 0.5 * seen at most 64", "score sum(attn)", *more), "KV0440")
    assert says in found.message


def test_heads_cannot_share_it() -> None:
    expect(
        body("budget 0.5 * seen across heads", "score sum(attn)", "when prefill"),
        "KV0440",
        "a budget that heads share cannot depend on the data",
        "budget 0.5 * seen across heads",
        "leave out `across heads`",
    )


@pytest.mark.parametrize(("text", "name"), [("sum(attn) * seen", "seen"), ("age - enough(sum(attn), 0.9)", "enough(...)")])
def test_only_counts_read_what_is_for_counts(text: str, name: str) -> None:
    found = only(body("param budget = 64", f"score {text}"), "KV0308")
    assert found.message == f"a score cannot read `{name}`, which is for a budget and for how many tokens `select` takes"


def test_enough_takes_slots() -> None:
    expect(
        body("budget enough(k, 0.9)", "score sum(attn)"),
        "KV0304",
        "`enough` needs one number per slot, but `k` has one number per slot and dim",
        "k",
        "reduce it over dims: `sum(k over dims)`",
    )
    only(body("budget enough(live, 0.9)", "score sum(attn)"), "KV0304")
    only(body("budget enough(sum(attn))", "score sum(attn)"), "KV0306")
    only(body("budget enough(sum(attn), 1.5)", "score sum(attn)"), "KV0410")
    only(body("budget enough(max_pool(sum(attn), 3), 0.5)", "score sum(attn)"), "KV0313")


def test_a_selection_is_counted_before_the_query_attends() -> None:
    only(body("select top sum(attn over slots) by dot(q, k)"), "KV0315")
    only(body("select top sum(attn) by dot(q, k)"), "KV0315")
    only(body("select top dot(q, k) by dot(q, k)"), "KV0302")


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (("budget sum(max_pool(sum(attn), 3) over slots)", "score sum(attn)"), "KV0313", "the budget cannot pool"),
        (("budget sum(mean(dot(q, k) over text) over slots)", "score sum(attn)", "when prefill"), "KV0324",
         "the budget cannot read `over text`"),
        (("budget sum(mean(query_head) over slots)", "score sum(attn)"), "KV0308", "the budget cannot read `query_head`"),
        (("select top sum(max_pool(position, 3) over slots) by dot(q, k)",), "KV0313", "the count of `select` cannot pool"),
    ],
)  # fmt: skip
def test_counts_read_what_is_there_for_them(lines: tuple[str, ...], code: str, says: str) -> None:
    found = only(body(*lines), code)
    assert found.message.startswith(says)


@pytest.mark.parametrize(
    "line",
    [
        "keep last enough(importance, 0.9)",
        "trigger overflow >= enough(random(), 0.5)",
        "slack enough(age, 0.5)",
        "budget budget at most enough(random(), 0.5)",
    ],
)
def test_what_is_enough_is_no_fixed_number(line: str) -> None:
    lines = ["given importance = 0", "score sum(attn) * importance"] if "importance" in line else ["score sum(attn)"]
    found = only(body("param budget = 8", *lines, line), "KV0308")
    assert "cannot depend on what is cached" in found.message
