"""State columns: which ones a policy needs, what they are called, and what reads them."""

from __future__ import annotations

import pytest

from kvdsl.ir.nodes import Axis, ColumnRef, Input, Number, ParamRef, Reduce, call
from kvdsl.ir.visitors import walk
from kvdsl.passes.columns import add_columns
from tests.lower.policies import checked, lowered

ATTN = Input(name="attn")


def test_ema_is_one_column_with_its_decay() -> None:
    policy = lowered("score ema(attn, 0.9)")
    (column,) = policy.columns
    assert (column.name, column.rule, column.body, column.decay) == ("ema_attn", "ema", ATTN, Number(value=0.9))
    assert policy.score == ColumnRef(name="ema_attn")


def test_averages_of_other_decays_are_other_columns() -> None:
    policy = lowered("score ema(attn, 0.9) - ema(attn, 1 - 1 / a) + ema(attn, 0.9)")
    assert [column.name for column in policy.columns] == ["ema_attn", "ema_attn_2"]


@pytest.mark.parametrize("op", ["sum", "mean", "var", "std", "max", "min"])
def test_what_is_over_the_last_queries_reads_a_ring(op: str) -> None:
    over = "over last a queries"
    policy = lowered(f"score {op}(attn {over})")
    (column,) = policy.columns
    assert (column.name, column.rule, column.body, column.size) == ("attn_ring", "ring", ATTN, ParamRef(name="a"))
    assert policy.score == ColumnRef(name="attn_ring", op=op)  # type: ignore[arg-type]


def test_one_history_serves_all_that_look_at_it_alike() -> None:
    policy = lowered("score mean(attn over last 4 queries)\nkeep top 2 by std(attn over last 4 queries)")
    assert [column.name for column in policy.columns] == ["attn_ring"]
    policy = lowered("score mean(attn over last 4 queries)\nkeep top 2 by std(attn over last 5 queries)")
    assert [(column.name, column.size) for column in policy.columns] == [
        ("attn_ring", Number(value=4)),
        ("attn_ring_2", Number(value=5)),
    ]


def test_rings_come_last_and_tokens_first() -> None:
    policy = lowered("score sum(attn over last 4 queries) + sum(attn) * norm1(v)")
    assert [column.rule for column in policy.columns] == ["token", "sum", "ring"]


def test_a_pool_stays_and_what_it_pools_reads_columns() -> None:
    policy = lowered("score max_pool(sum(attn over last 4 queries), 7)")
    assert policy.score == call("max_pool", ColumnRef(name="attn_ring", op="sum"), Number(value=7))


def test_a_selection_reads_no_columns() -> None:
    policy = checked("pages 4\nselect top 8 by sum(q * max(k over page) over dims)")
    assert add_columns(policy) == policy


def test_a_sketch_reads_no_columns() -> None:
    policy = checked("sketch top 4 dims by abs(q) every 8 queries\nselect top 8 by dot(q, k over sketch)")
    assert add_columns(policy) == policy


@pytest.mark.parametrize("score", ["norm2(k - mean(k over slots))", "sum(k * mean(norm1(k) over slots) over dims)"])
def test_what_looks_at_other_tokens_is_not_the_token_s_own(score: str) -> None:
    policy = lowered(f"score {score}")
    assert policy.score is not None
    assert Input(name="k") in walk(policy.score)


def test_a_token_s_own_value_is_a_column_inside_of_what_looks_at_others() -> None:
    policy = lowered("score norm2(k) - mean(norm2(k) over slots)")
    assert [column.rule for column in policy.columns] == ["token"]
    assert isinstance(policy.score.args[1], Reduce)  # type: ignore[union-attr]
    assert policy.score.args[1].axis is Axis.SLOT  # type: ignore[union-attr]


def test_long_names_end_with_a_whole_word() -> None:
    body = "where(position + age >= prompt, attn, attn / 2)"
    policy = lowered(f"score sum({body}) + sum({body} + 1)")
    assert [column.name for column in policy.columns] == [
        "sum_where_position_plus_age_ge_prompt",
        "sum_where_position_plus_age_ge_prompt_2",
    ]
