"""Layers that take over what others choose: what it becomes in the IR, and what is refused, where, and with what help."""

from __future__ import annotations

import pytest

from kvdsl.interp import resolve
from kvdsl.ir.nodes import Number, ParamRef
from kvdsl.ir.printer import print_select
from tests.diagnostics.expect import body, check, policy
from tests.sema.test_combinations import refused

SELECT = "select top 64 by dot(q, k) in layers"


def test_what_it_becomes() -> None:
    found = policy("param again = 13", f"{SELECT} 2, again reused above")
    assert found.reuses and found.select is not None
    assert found.select.choosing == (Number(value=2), ParamRef(name="again"))
    assert (found.select.low, found.select.high) == (None, None)
    assert print_select(found.select) == "select top 64 by sum(q * k over dims) in layers 2, again reused above"
    assert not policy(f"{SELECT} 2..").reuses


@pytest.mark.parametrize(
    ("layers", "choosers"),
    [
        ("2, 4", [-1, -1, 2, 2, 4, 4]),
        ("4, 2, 9", [-1, -1, 2, 2, 4, 4]),
        ("0", [0] * 6),
        ("layers / 4, layers - 1", [-1, 1, 1, 1, 1, 5]),
        ("6", [-1] * 6),
    ],
)
def test_whose_choice_a_layer_takes_over(layers: str, choosers: list[int]) -> None:
    found = policy(f"{SELECT} {layers} reused above")
    assert [resolve(found, layer=layer, layers=6).chooser for layer in range(6)] == choosers


def test_not_where_layers_evict() -> None:
    message = "a layer that reuses a choice must hold the same tokens as the layer that selects, but each evicts by itself"
    name = check(body("param budget = 64", "score sum(attn)", f"{SELECT} 2 reused above")).diagnostics
    assert [(one.code, one.message, one.help) for one in name] == [
        ("KV0441", message, "leave out the budget, or `from layers`")
    ]


def test_a_layer_is_the_same_for_all_rows_and_layers() -> None:
    help = "it can read `layers`, and params that do not depend on it"
    refused(
        "KV0308", "a layer that chooses cannot depend on `prompt`", "prompt / 9", help, f"{SELECT} prompt / 9 reused above"
    )
    refused("KV0308", "a layer that chooses cannot depend on `layer`", "layer", help, f"{SELECT} 1, layer reused above")
    refused("KV0410", "a layer that chooses for those above is at least 0, but `1 - 3` is -2", "1 - 3", None,
            f"{SELECT} 1 - 3 reused above")  # fmt: skip


def test_query_heads_are_numbered_in_what_selects() -> None:
    assert policy("select top 64 by max(rank(dot(q, k)) * 128 - query_head over heads)").heads_vote
    assert policy("select top 3 + sum(rank(dot(q, k)) < query_head over slots) by dot(q, k)").select
    message = "a score cannot read `query_head`, which is for `select`: the query heads of a group share its tokens"
    refused("KV0308", message, "sum(attn * query_head)", None, "param budget = 64", "score sum(attn * query_head)")


@pytest.mark.parametrize("layers", ["2..13 reused above", "2, 13", "reused above", "2, reused above", "2 reused"])
def test_a_list_and_its_words_go_together(layers: str) -> None:
    assert not check(body(f"{SELECT} {layers}")).ok
