"""Query heads that select for themselves: what it becomes, what may be read beside it, and what is refused, where, with what help."""

from __future__ import annotations

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir.printer import print_policy
from kvdsl.source import SourceFile
from tests.diagnostics.expect import body, check, expect, policy

SELECT = "select top 64 by dot(q, k)"
HELP = "write `group mean`, `group max` or `group sum`, so that the query heads also select together"


def one_number(text: str) -> str:
    return f"`group each` reduces nothing, but `{text}` is one number per KV head"


def test_what_it_becomes() -> None:
    found = policy(SELECT, "group each")
    assert found.group == "each"
    assert "\n  group each\n" in print_policy(found)
    assert analyse(SourceFile("example.kv", print_policy(found))).policies[0] == found


@pytest.mark.parametrize(
    "more",
    [
        ("keep first 4", "keep last 8", "pages 16"),
        ("param budget = 512", "score norm2(k) - position", "keep top 9 by norm1(v)"),
        ("param budget = 512", "score position", "victims shared by heads"),
    ],
)
def test_what_all_query_heads_have_in_common_may_be_read(more: tuple[str, ...]) -> None:
    assert policy(SELECT, "group each", *more).group == "each"


def test_each_may_count_for_itself_and_read_its_number() -> None:
    policy("select top enough(exp(dot(q, k)), 0.9) by dot(q, k) + query_head in layers 2 reused above", "group each")
    policy(
        "sketch top 8 dims by mean(abs(k) over slots) every 9 queries",
        "select top 64 by dot(q, k over sketch)",
        "group each",
    )
    policy("select top 64 by dot(q, k) + mean(norm2(k) over heads)", "group each")


@pytest.mark.parametrize(
    ("statements", "text", "at"),
    [
        (("param budget = 512", "score mean(attn)"), "mean(attn)", "mean(attn)"),
        (("param budget = 512", "score sum(dot(q, k))"), "sum(sum(q * k over dims))", "sum(dot(q, k))"),
        (("param budget = 512", "score position", "keep top 9 by last(attn)"), "last(attn)", "last(attn)"),
        (("param budget = 512", "score position", "keep where sum(attn) > 1"), "sum(attn) > 1", "sum(attn) > 1"),
        (("param budget = 512", "budget enough(sum(attn), 0.9)", "score age"), "enough(sum(attn), 0.9)", "enough(sum(attn), 0.9)"),
        (("param budget = 512", "score fold(max(prev, attn), 0)"), "fold(max(prev, attn), 0)", "fold(max(prev, attn), 0)"),
        (("param budget = 512", "when prefill", "score mean(dot(q, k) over text)"), "mean(sum(q * k over dims) over text)",
         "mean(dot(q, k) over text)"),
    ],
)  # fmt: skip
def test_one_number_of_the_group_is_refused(statements: tuple[str, ...], text: str, at: str) -> None:
    expect(body(*statements, SELECT, "group each"), "KV0442", one_number(text), at, HELP)


def test_a_tensor_of_query_heads_is_no_score() -> None:
    tensor = 'tensor centre [layers, heads, group, dims] from "centre.safetensors"'
    text = body("param budget = 512", tensor, "when prefill", "score dot(centre, k)", SELECT, "group each")
    expect(text, "KV0442", one_number("sum(centre * k over dims)"), "dot(centre, k)", HELP)
    policy(tensor, "select top 64 by dot(centre, k)", "group each")


def test_the_sketch_is_the_kv_heads() -> None:
    text = body("sketch top 8 dims by abs(q) every 9 queries", "select top 64 by dot(q, k over sketch)", "group each")
    expect(text, "KV0442", one_number("abs(q)"), "abs(q)", HELP)


def test_kv_heads_vote() -> None:
    vote = "sum(dot(q, k) over heads)"
    expect(
        body(f"select top 64 by {vote}", "group each"),
        "KV0442",
        one_number("sum(sum(q * k over dims) over heads)"),
        vote,
        HELP,
    )


def test_without_a_selection_there_is_nothing_to_choose() -> None:
    message = "under `group each` every query head selects for itself, but the policy has no `select`"
    help = "write `group mean`, `group max` or `group sum`, or add a `select`"
    expect(body("param budget = 512", "score position", "group each"), "KV0442", message, "group each", help)
    broken = check(body("param budget = 512", "score position", "select top by dot(q, k)", "group each")).diagnostics
    assert "KV0442" not in {one.code for one in broken}, "what has an error may be the `select`"
