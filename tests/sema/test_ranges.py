"""Filters, keys and named slots: what the checker makes of them, what it refuses, and that they are printed as they are read."""

from __future__ import annotations

import pytest

from kvdsl.ir.printer import print_policy
from kvdsl.passes.fold import fold
from tests.diagnostics.expect import body, check, expect_in, only
from tests.differential.random_clauses import changed
from tests.differential.random_texts import policy_with_score

A_KEY = "a key is `page(16)`, say: groups of 16 tokens in the order of the text"
SLOTS_ONLY = "`by` gives every slot the value of the slots with its key, so `{}` ranges over slots"

REFUSED = {
    # filters
    "last": (
        "score last(attn where age < 3)",
        "KV0306",
        "`last` reduces nothing `where age < 3`",
        "where age < 3",
        "leave it out",
    ),
    "ema": ("score ema(attn where age < 3, 0.5)", "KV0306", "`ema` reduces nothing `where age < 3`", "where age < 3", "leave it out"),
    "median": (
        "score age + median(age over slots where age < 3)", "KV0306", "`median` takes no `where`", "median(age over slots where age < 3)",
        None,
    ),
    "rank": (
        "score rank(age where age > 3)", "KV0306", "`rank` takes no `where`", "rank(age where age > 3)",
        "write `rank(where(age > 3, age, -1e30))`, say",
    ),
    "a number": ("score sum(attn where age)", "KV0303", "`where` needs a condition, but `age` is a number", "age", "compare it: `age > 0`"),
    "no reduction": (
        "score floor(age where age > 3)", "KV0306", "`floor` is not a reduction of one value, so `where` has no meaning here",
        "where age > 3", "the reductions are `sum`, `mean`, `std`, `var`, `max`, `min`, `median` and `last`",
    ),
    "nothing to reduce": (
        "score age + sum(1 over slots where live > 3)", "KV0304", "`1` has no slots to reduce over: it is a single number", "1",
        "leave the reduction out",
    ),
    # keys
    "a key of queries": ("score sum(attn over queries by age)", "KV0326", SLOTS_ONLY.format("sum"), "sum(attn over queries by age)",
        "write `over slots` before `by`",
    ),
    "a key of dims": ("score mean(k over dims by age)", "KV0326", SLOTS_ONLY.format("mean"), "mean(k over dims by age)",
        "write `over slots` before `by`",
    ),
    "a key of others": ("score sum(j.age over slots as j by age)", "KV0326", SLOTS_ONLY.format("sum"), "sum(j.age over slots as j by age)",
        "write `over slots` before `by`",
    ),
    "what a query gives, by a key": (
        "score mean(attn over slots by position % 3)", "KV0326",
        "`by` needs a value that does not depend on the query, but `attn` has one number per query and slot", "attn",
        "reduce it over queries: `sum(attn)`, say",
    ),
    "a rank of what a query gives": (
        "score rank(attn by age)", "KV0326",
        "`by` needs a value that does not depend on the query, but `attn` has one number per query and slot",
        "attn", "reduce it over queries: `sum(attn)`, say",
    ),
    "a key that varies with queries": (
        "score mean(age over slots by attn)", "KV0326", "a key is one number per slot, but `attn` has one number per query and slot",
        "mean(age over slots by attn)", A_KEY,
    ),
    "a key that is a vector": (
        "score mean(age over slots by k)", "KV0326", "a key is one number per slot, but `k` has one number per slot and dim",
        "mean(age over slots by k)", A_KEY,
    ),
    "a key that all have": (
        "score mean(age over slots by live)", "KV0326", "a key is one number per slot, but `live` is a single number",
        "mean(age over slots by live)", A_KEY,
    ),
    "a key for every query": (
        "score sum(attn * mean(age over slots by position % 3))", "KV0325",
        "slots are compared in a settle, not for every query, so `by` cannot stand in a reduction over queries",
        "attn * mean(age over slots by position % 3)", "move it out of the reduction",
    ),
    "a rank by a key for every query": (
        "score sum(attn * rank(age by position % 3))", "KV0325",
        "slots are compared in a settle, not for every query, so `by` cannot stand in a reduction over queries",
        "attn * rank(age by position % 3)", "move it out of the reduction",
    ),
    "a key in a fold": (
        "score fold(max(prev, attn) * mean(age over slots by position % 3), 0)", "KV0325",
        "slots are compared when a step settles, so `by` cannot stand in a fold over queries",
        "max(prev, attn) * mean(age over slots by position % 3)", "read it outside the fold, or in a fold over prunes",
    ),
    "a key of the text": (
        "when prefill\nscore mean(age over slots by sum(dot(q, k) over text))", "KV0326",
        "slots are grouped per KV head, so `by` cannot read values per query head", "age", None,
    ),
    # the other slot
    "a name for a dim": ("score sum(k over dims as j) + age", "KV0307", "only slots have names", "j",
        "write `over dims`, or `over slots as j`",
    ),
    "a name for a query": ("score sum(attn over queries as j)", "KV0307", "only slots have names", "j",
        "write `over queries`, or `over slots as j`",
    ),
    "a name outside": (
        "score sum(j.age over slots as j) + j.age", "KV0325", "`j` is no slot, so `j.age` has no meaning", "j",
        "name a slot: `sum(j.age over slots as j)`, say",
    ),
    "a name by itself": ("score sum(j over slots as j)", "KV0325", "`j` is a slot, not a value", "j", "write `j.position`, say"),
    "the other's attention": (
        "score sum(j.attn over slots as j)", "KV0325",
        "only a value that does not depend on the query can be read of another slot, but `attn` has one number per query and slot", "attn",
        "reduce it over queries: `j.(mean(attn))`",
    ),
    "the other's number of slots": (
        "score sum(j.live over slots as j)", "KV0325",
        "`live` is the same for all slots, so it cannot be read of another slot: it is a single number", "live",
        "write `live`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    expect_in(*REFUSED[case])


THIRD = [
    "score sum(j.(sum(i.age over slots as i where i.age < j.age)) over slots as j)",
    "score sum(sum(i.age * j.age over slots as i) over slots as j)",
    "let f(x) = sum(i.age * x over slots as i)\nscore sum(f(j.age) over slots as j)",
]


@pytest.mark.parametrize("statement", THIRD)
def test_two_slots_are_compared_not_three(statement: str) -> None:
    """Both names would stand for the same slot."""
    found = check(body("param budget = 512", statement)).diagnostics
    assert [one.code for one in found] == ["KV0325"]
    assert found[0].message.startswith("this compares a slot with `i`, so it cannot read ")


def test_a_name_may_be_given_again() -> None:
    assert check(
        body("param budget = 512", "score sum(j.(sum(j.age over slots as j where j.age < age)) over slots as j)")
    ).ok
    assert check(
        body(
            "param budget = 512", "let older(x) = sum(i.x_ over slots as i where i.age > x)\nlet x_ = age\nscore older(age)"
        )
    ).ok


PRINTED = [
    "score sum(attn where age < 4 and attn > 0.1) + mean(attn over last 3 queries where age % 2 == 0)",
    "score max(sum(attn) over slots where age < 9 by position % 3) - rank(norm1(k) by floor(position / 2.5))",
    "score sum(j.age over slots as j where j.position != position and (j.age < 3 or j.age > age))",
    "score sum(j.age over slots as j where not (j.position != position))",
    "param j = 3\nscore sum(i.age * j over slots as i where i.age < j)",
    "param j = 3\nparam j_ = 4\nscore sum(i.age * j over slots as i where i.age < j_)",
    "input j = 1\nscore sum(i.j * j over slots as i)",
]


@pytest.mark.parametrize("statement", PRINTED)
def test_what_is_printed_is_read_as_the_same(statement: str) -> None:
    """A slot's name is none that the policy has given to something else."""
    made = check(body("param budget = 512", statement)).policy
    assert check(print_policy(made)).policies == (made,)


@pytest.mark.parametrize("number", range(60))
def test_random_scores_are_read_as_they_are_printed(number: int) -> None:
    made = policy_with_score(f"printed {number}")
    assert fold(check(print_policy(made)).policy) == made.model_copy(update={"stem": "example"})


@pytest.mark.parametrize("number", range(20))
def test_clauses_change_what_they_say_and_nothing_else(number: int) -> None:
    made = changed(f"clauses {number}")
    assert not made.differing(), made.text


def test_a_selection_beside_pages_selects_pages() -> None:
    """What `page(4)` says of a score would change what is selected in silence."""
    score = 'kv 2\npolicy P {\n"A test."\nparam budget = 64\nscore mean(sum(attn) over slots by page(4))\n'
    tokens, pages = "select top 8 by dot(q, k)", "select top 8 by dot(q, mean(k over slots by page(4)))"
    (found,) = check(f"{score}{tokens}\n}}\n").diagnostics
    assert (found.code, found.span.text) == ("KV0326", tokens)
    assert check(f"{score}{pages}\n}}\n").policy.select is not None


def test_a_condition_over_heads_is_one_number_of_each() -> None:
    shares = "param budget = 8", "when prefill", "score sum(attn)"
    weight = "budget budget across layers by sum(var(sum(attn) over slots) over heads where {})"
    assert check(body(*shares, weight.format("live > 3"))).policy.across_layers is not None
    found = only(body(*shares, weight.format("age > 3")), "KV0304")
    assert "but `age > 3` has one number per slot" in found.message
