"""`keep` lines that may protect more tokens than the budget keeps are warned of, and only they."""

from __future__ import annotations

import pytest

from kvdsl.compiler import analyse, find_policy
from kvdsl.explain.facts import facts
from kvdsl.explain.words import rows
from kvdsl.shipped import all_policies
from tests.diagnostics.expect import body, check, expect, policy

BUDGET = "param budget = 512"
SCORE = "score mean(attn)"
BEYOND = "add `budget prompt + budget`: the param then counts the tokens kept beyond the prompt"


@pytest.mark.parametrize(
    ("keep", "count", "when", "help"),
    [
        ("position < prompt", "1,048,576", "both", BEYOND),
        ("position < prompt", "1,048,576", "prefill", BEYOND),
        ("position < prompt", "1,048,576", "decode", BEYOND),
        ("age < prompt / 4", "262,144", "both", BEYOND),
        ("position < prompt or mean(attn) > 2", "1,048,576", "prefill", BEYOND),
        ("position >= prompt", "3,145,728", "both", "protect fewer"),
        ("position + age >= prompt", "3,146,240", "both", "protect fewer"),
        ("age < 600", "600", "both", "protect fewer, or raise the budget"),
        ("age < 5000", "5,000", "both", "protect fewer, or raise the budget"),
    ],
)
def test_conditions_on_places(keep: str, count: str, when: str, help: str) -> None:
    text = body(BUDGET, SCORE, f"keep where {keep}", f"when {when}")
    found = [one for one in check(text).diagnostics if one.code == "KV0424"]
    if "attn) > 2" in keep:  # what the data says is not known
        assert not found
        return
    message = f"`keep where {keep}` protects {count} tokens of a long text, but 512 of them can stay"
    expect(text, "KV0424", message, f"keep where {keep}", help)


@pytest.mark.parametrize(
    "keep",
    [
        "position < 4",
        "age < 100",
        "mean(attn) > 0.1",
        "position < prompt and mean(attn) > 0.1",
        "position < prompt and position > prompt",
    ],
)
def test_what_is_bounded_or_depends_on_the_data(keep: str) -> None:
    policy(BUDGET, SCORE, f"keep where {keep}")


def test_the_help_mends_it() -> None:
    policy(BUDGET, "budget prompt + budget", SCORE, "keep where position < prompt")
    policy(BUDGET, "budget prompt + 512 + budget", SCORE, "keep where position < prompt", "keep last 256")


def test_a_budget_that_grows_too_slowly() -> None:
    text = body(BUDGET, "budget 0.5 * prompt + budget", SCORE, "keep where position < prompt")
    message = "`keep where position < prompt` protects 1,048,576 tokens of a long text, but 524,800 of them can stay"
    help = "let the budget grow with the prompt, or protect fewer"
    expect(text, "KV0424", message, "keep where position < prompt", help)


@pytest.mark.parametrize(
    ("statements", "count", "room"),
    [
        (("keep top 300 by norm2(v)", "keep last 300"), 600, 512),
        (("keep top 300 by norm2(v)", "keep top 213 by age"), 513, 512),
        (("keep first 4", "keep where age < 100", "keep top 512 by norm2(v)"), 616, 512),
    ],
)
def test_several_lines_together(statements: tuple[str, ...], count: int, room: int) -> None:
    message = f"`{statements[-1]}` and the other `keep` lines may protect {count} tokens, but {room} of them can stay"
    expect(body(BUDGET, SCORE, *statements), "KV0424", message, statements[-1], "protect fewer, or raise the budget")


def test_lines_that_protect_the_same_places() -> None:
    policy("param budget = 64", SCORE, "keep last 40", "keep where age < 40", "keep first 20", "keep where position < 20")


def test_room_that_is_made_before_a_token_comes() -> None:
    """All but one of the budget's tokens can stay then, and a sink would be among those that leave."""
    text = body(BUDGET, SCORE, "keep first 4", "keep last 508")
    policy(BUDGET, SCORE, "keep first 4", "keep last 508")
    policy(BUDGET, SCORE, "keep first 4", "keep last 507", "cap hard")
    rest = "may protect 512 tokens, but 511 of them can stay when room is made for another one"
    message = f"`keep last 508` and the other `keep` lines {rest}"
    hard = text.replace("keep last 508", "keep last 508\ncap hard")
    expect(hard, "KV0424", message, "keep last 508", "protect fewer, or raise the budget")


def test_shipped_policies() -> None:
    """One counts its prompt among what its budget keeps, as its docstring says."""
    found = {
        one.stem for one in all_policies() if any(code.code == "KV0424" for code in analyse(find_policy(one)).diagnostics)
    }
    assert found == {"triattention"}


def test_it_is_explained() -> None:
    """In words: what happens to what is protected beyond the budget."""
    beyond = check(body(BUDGET, SCORE, "keep where position < prompt")).policy
    said = rows(facts(beyond))["protects"]
    assert any("its lowest-scored tokens are evicted" in line for line in said)
    mixed = policy(BUDGET, SCORE, "keep first 4", "keep where mean(attn) > 0.1").model_copy(update={"ends_last": True})
    assert any(
        "the lowest-scored tokens of `keep top` and `keep where` are evicted" in line
        for line in rows(facts(mixed))["protects"]
    )
    ends = rows(facts(policy(BUDGET, SCORE, "keep first 4")))["protects"]
    assert not any("evicted" in line for line in ends)
