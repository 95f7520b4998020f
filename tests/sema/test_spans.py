"""Spans and turns: what declares them, what reads them, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from kvdsl.compiler import analyse
from kvdsl.explain.facts import facts
from kvdsl.explain.words import rows
from kvdsl.ir.nodes import Given
from kvdsl.ir.printer import print_expression, print_policy
from kvdsl.lower.plan import make_plan
from kvdsl.passes.columns import add_columns
from kvdsl.sema.files import Analysis
from kvdsl.source import SourceFile
from tests.scenarios.harness import own_outcome

HEAD = 'kv 2\n\npolicy P {\n  "A test."\n  param budget = 8\n'


def checked(*lines: str) -> Analysis:
    return analyse(SourceFile("p.kv", HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"))


def test_a_span_is_a_condition_and_a_column() -> None:
    policy = checked("input tool from spans", "score age * where(tool, 0.5, 1)", "keep where tool and age < 3").policy
    assert policy.given == (Given(name="tool", default=0, source="spans"),)
    assert print_expression(policy.keeps[0].by) == "tool and age < 3"
    assert analyse(SourceFile("p.kv", print_policy(policy))).policy == policy
    assert [(column.name, column.rule) for column in add_columns(policy).columns] == [("given_tool", "token")]


def test_nothing_is_made_of_a_mark_when_the_token_comes() -> None:
    """Marks may come later; a turn does not."""
    policy = checked("input tool from spans", "score max(k * where(tool, 1, 2) over dims) + max(k * turn over dims)").policy
    bodies = {print_expression(column.body) for column in add_columns(policy).columns}
    assert bodies == {"tool", "max(k * turn over dims)"}


def test_what_is_not_read_costs_nothing() -> None:
    plan = make_plan(checked("input tool from spans", "score age").policy)
    assert not plan.columns and not plan.given
    assert "turns" not in [name for name, _ in plan.numbers]
    assert [one.message for one in checked("input tool from spans", "score age").diagnostics] == ["`tool` is never used"]


def test_explanations_say_who_tells_it() -> None:
    policy = checked("input tool from spans", "score turn", "keep where tool").policy
    assert rows(facts(policy))["given"] == [
        "tool: whether a token lies in this span, which the caller marks",
        "turn: the turn of the chat in which the token came, from 0, counted by the cache",
    ]


def test_a_token_of_a_test_has_an_id(tmp_path: Path) -> None:
    policy = "param budget = 2\n  score age\n  keep where token == 5"
    assert own_outcome(
        tmp_path, policy, "prompt { attend 1; attend 1, 0 token 5; attend 1, 0, 0 }", "expect kept 1, 2"
    ).passed


def test_a_turn_ends_in_a_test(tmp_path: Path) -> None:
    policy = "input tool from spans\n  budget sum(turn == turns or not tool over slots)\n  score turn"
    prompt = "prompt { attend 1 tool 1; attend 1, 0 }"
    assert own_outcome(tmp_path, policy, prompt, "expect kept 0, 1", "turn", "expect evicted 0").passed
    late = own_outcome(tmp_path, policy, "attend 1", "turn", "attend 0, 1", "expect kept 0", "expect score 0, 1")
    assert [failure.message for failure in late.failures] == ["kept: expected 0, found 0, 1"]
