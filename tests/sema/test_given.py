"""`given` statements: what they say, what reads them, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse, plan_of
from kvdsl.diagnostics import Diagnostic, Sink
from kvdsl.explain.facts import as_data, facts
from kvdsl.explain.words import rows
from kvdsl.ir.nodes import Given
from kvdsl.ir.printer import print_expression, print_policy
from kvdsl.passes.columns import add_columns
from kvdsl.sema.files import Analysis
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source

HEAD = 'kv 1\n\npolicy P {\n  "A test."\n  param budget = 8\n'


def checked(*lines: str) -> Analysis:
    text = HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"
    return analyse(SourceFile("p.kv", text))


def errors(*lines: str) -> list[Diagnostic]:
    return [found for found in checked(*lines).diagnostics if found.severity == "error"]


@pytest.mark.parametrize(
    ("line", "default"), [("given x", None), ("given x = 0", 0), ("given x = -3 / 2", -1.5), ("given x = 0.1", 0.1)]
)
def test_a_given_value_is_read_by_its_name(line: str, default: float | None) -> None:
    policy = checked(line, "score x").policy
    assert policy.given == (Given(name="x", default=default),)
    assert analyse(SourceFile("p.kv", print_policy(policy))).policy == policy


def test_it_is_a_column_of_the_token_wherever_it_is_read() -> None:
    policy = checked(
        "given x", "score x * mean(attn * x) + max(k * x over dims)", "keep where x > 3", "select top 9 by dot(q, k) * x"
    ).policy
    lowered = add_columns(policy)
    assert [(column.name, column.rule) for column in lowered.columns] == [
        ("given_x", "token"), ("max_k_times_x", "token"), ("sum_attn_times_given_x", "sum"),
    ]  # fmt: skip
    assert print_expression(lowered.select.by) == "sum(q * k over dims) * given_x"
    assert print_expression(lowered.keeps[0].by) == "given_x > 3"


def test_who_extends_inherits_it_and_may_give_a_default(tmp_path: Path) -> None:
    (tmp_path / "p.kv").write_text(HEAD + "  given x\n  score x\n}\n")

    def extended(line: str) -> Analysis:
        return analyse(
            SourceFile("q.kv", f'kv 1\nimport "p.kv"\n\npolicy Q extends P {{\n"A test."\n{line}\n}}\n', tmp_path / "q.kv")
        )

    assert extended("keep first 1").policy.given == (Given(name="x"),)
    assert extended("override given x = 2").policy.given == (Given(name="x", default=2),)
    assert extended("override score age").policy.given == ()
    (twice,) = extended("given x = 2").diagnostics
    assert "needs `override`" in twice.message


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (["given x = budget", "score x"], "KV0220", "the default of a given value is a constant, but `budget` is not"),
        (["given x = age", "score x"], "KV0220", "the default of a given value is a constant, but `age` is not"),
        (["given attn", "score attn"], "KV0210", "`attn` is a built-in input and cannot be redefined"),
        (["given model", "score model"], "KV0111", "`model` is an attribute or argument of every cache class"),
        (["given lambda", "score lambda"], "KV0111", "`lambda` is a keyword of Python, where the value becomes an argument"),
        (["given double", "score double"], "KV0111", "`double` is a keyword of C++, where the value becomes an argument"),
        (["given x", "given x", "score x"], "KV0206", "`x` is defined twice"),
        (["given x", "score sum(x)"], "KV0304", "`x` has no queries to reduce over: it is one number per slot"),
        (["given x", "keep last x", "score age"], "KV0302", "is a single number, but `x` has one number per slot"),
    ],
)
def test_what_is_wrong_is_said(lines: list[str], code: str, message: str) -> None:
    found = errors(*lines)
    assert any(one.code == code and message in one.message for one in found), found


def test_what_nothing_reads_is_said() -> None:
    (found,) = checked("given x", "score age").diagnostics
    assert found.code == "KV0212"


def test_explain_says_who_gives_it() -> None:
    found = facts(checked("given x", "given y = 0.5", "score x + y").policy)
    assert rows(found)["given"] == [
        "x: a number per token and KV head, from the caller, who must provide it",
        "y: a number per token and KV head, from the caller, or 0.5",
    ]
    assert as_data(found)["given"] == [{"name": "x", "default": None}, {"name": "y", "default": 0.5}]
    assert all(one["ok"] for one in found.backends)


def test_what_a_kernel_lacks_is_said() -> None:
    """A score that combines keys with what changes while they are cached is torch's, as without a given value."""
    plan = plan_of(checked("given x", "sketch top 3 dims by mean(k * x over slots) every 2 queries",
                           "select top 9 by dot(q, k over sketch)", "score age").policy)  # fmt: skip
    assert "values from the caller" in plan.refusals["cpu"]
    assert plan.refusals["triton"]


def test_it_is_formatted_like_a_param() -> None:
    text = HEAD + "  given   x=-  1\n  score x\n}\n"
    assert "  given x = -1\n" in (format_source(SourceFile("p.kv", text), Sink()) or "")
