"""Budgets that layers share: what it becomes in the IR, and what is refused, where, and with what help."""

from __future__ import annotations

import pytest

from tests.diagnostics.expect import body, check, policy
from tests.sema.test_combinations import refused

STATEMENTS = ("param budget = 64", "score sum(attn)", "when prefill")
WEIGHT = "sum(sum(attn * attn) over slots)"


@pytest.mark.parametrize("by", [f"max({WEIGHT} over heads) ** 2 + budget", "layer", "prompt / (1 + layer)",
                                f"sum(sum(sum(attn) / sum({WEIGHT} over heads) over slots) over heads)"])  # fmt: skip
def test_weights(by: str) -> None:
    assert check(body(*STATEMENTS, f"budget budget across layers by {by}")).ok


def test_only_after_prompts() -> None:
    message = "layers share a budget once, after the prompt, so `across layers` needs `when prefill`"
    budget = "budget 64 across layers"
    refused("KV0412", message, budget, "add `when prefill`", budget, "score sum(attn)")
    refused("KV0412", message, budget, "add `when prefill`", budget, "score sum(attn)", "when decode", because="when decode")


@pytest.mark.parametrize(
    ("budget", "more", "message", "help"),
    [
        ("across layers by layer", "victims shared by layers", "layers that share a budget keep different tokens, so they cannot "
         "agree on the victims", "leave out `victims` or `across layers`"),
        ("across layers", "victims shared by heads", "heads that share a budget keep different tokens, so they cannot agree on the "
         "victims", "leave out `victims` or `across layers`"),
        ("across layers", "prefill blocks of 32", "a block is evicted before the next layer has seen it, so layers cannot share a "
         "budget", "leave out `prefill blocks` or `across layers`"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with(budget: str, more: str, message: str, help: str) -> None:
    refused("KV0412", message, more, help, *STATEMENTS, f"budget budget {budget}", more, because=f"budget budget {budget}")


def test_heads_of_one_pool_share_already() -> None:
    message = "`across layers` without `by` is one pool of all layers and heads, so `across heads` has no meaning"
    help = "leave out `across heads`, or weigh the layers: `across layers by ...`"
    budget = "budget budget across heads across layers"
    refused("KV0412", message, budget, help, *STATEMENTS, budget)


@pytest.mark.parametrize(
    ("by", "code", "at", "message", "help"),
    [
        (WEIGHT, "KV0412", WEIGHT, f"the weight of a layer is one number for all its KV heads, but `{WEIGHT}` differs between them",
         f"reduce it: `sum({WEIGHT} over heads)`, say"),
        ("live", "KV0412", "live", "the weight of a layer is one number for all its KV heads, but `live` differs between them",
         "reduce it: `sum(live over heads)`, say"),
        ("sum(attn)", "KV0302", "sum(attn)", "the weight of a layer is one number for all its KV heads, but `sum(attn)` has one number "
         "per slot", "`sum(sum(sum(attn) over slots) over heads)`, say"),
        ("sum(sum(attn) over heads)", "KV0304", "sum(sum(attn) over heads)", "in the weight of a layer `over heads` needs one number per "
         "KV head, but `sum(attn)` has one number per slot", "reduce it first: `sum(sum(attn) over slots)`"),
        ("max(sum(sum(attn) over heads) over slots)", "KV0304", "max(sum(sum(attn) over heads) over slots)",
         "in the weight of a layer `over heads` needs one number per KV head, but `sum(attn)` has one number per slot",
         "reduce it first: `sum(sum(attn) over slots)`"),
        ("sum(k over heads)", "KV0304", "k", "`over heads` reduces numbers of KV heads, but `k` has one number per slot and dim",
         "reduce it over dims first: `sum(k over dims)`"),
        ("sum(layer over heads)", "KV0304", "layer", "`layer` is the same for all KV heads", "leave the reduction out"),
    ],
)  # fmt: skip
def test_weights_that_make_no_sense(by: str, code: str, at: str, message: str, help: str) -> None:
    refused(code, message, at, help, *STATEMENTS, f"budget budget across layers by {by}")


def test_heads_are_reduced_for_a_layers_share_only() -> None:
    score = f"sum(attn) / sum({WEIGHT} over heads)"
    message = (
        "a score belongs to one KV head, and cannot read `over heads`, which is for `across layers by`, for `select`, and for heads that "
        "share a budget"
    )
    help = "`victims shared by heads` averages scores; `budget ... across heads` compares them"
    refused("KV0412", message, score, help, "param budget = 64", f"score {score}")
    message = (
        "the budget belongs to one KV head, and cannot read `over heads`: that is for `across layers by`, and for `select`"
    )
    budget = "sum(sum(norm2(k) over slots) over heads)"
    refused("KV0412", message, budget, None, f"budget {budget}", "score age")


def test_heads_that_vote_hold_the_same_tokens() -> None:
    select = "select top 8 by sum(dot(q, k) over heads)"
    assert policy(select).heads_vote and not policy("select top 8 by dot(q, k)").heads_vote
    assert check(body("param budget = 64", "score sum(attn)", "victims shared by heads", select)).ok
    message = "KV heads that choose together hold the same tokens, but each evicts by itself"
    help = "add `victims shared by heads`, or leave out the budget"
    refused("KV0412", message, "P", help, "param budget = 64", "score sum(attn)", select, because=select)


def test_not_for_every_query() -> None:
    inner = "attn * max(max(norm1(v) over slots) over heads)"
    message = "`over heads` is known once the prompt is there, so it cannot stand in a reduction over queries or dims"
    help = "reduce over slots, or move it out of the reduction"
    budget = f"budget budget across layers by sum(sum(mean({inner}) over slots) over heads)"
    refused("KV0412", message, inner, help, *STATEMENTS, budget)


def test_heads_with_budgets_of_their_own_do_not_share() -> None:
    tensor = 'tensor w [heads] from "w.safetensors"'
    message = "heads that share a budget have equal shares, but `64 * w` reads `w`, which differs between them"
    budget = "budget 64 * w across layers"
    refused(
        "KV0412", message, "64 * w", "leave out `across layers`", tensor, budget, "score age", "when prefill", because=budget
    )


# -- heads that share a budget compare their slots ---------------------------------------------------------------------

COMPARED = ("param budget = 64", "budget budget across heads", "when prefill")


@pytest.mark.parametrize(
    "score",
    [
        "rank(sum(attn) over heads)",
        "sum(attn) * sum(1 over heads) - max(sum(norm1(k) over slots) over heads)",
        "sum(rank(max_pool(sum(attn), 3) over heads) >= budget over slots) - age",
    ],
)
def test_a_score_of_heads_that_share(score: str) -> None:
    assert check(body(*COMPARED, f"score {score}")).ok
    found = check(body("param budget = 64", "when prefill", f"score {score}")).diagnostics
    assert [one.code for one in found] == ["KV0412"]


def test_what_heads_that_share_cannot_compare() -> None:
    refused("KV0304", "heads that share a budget hold different tokens, so `over heads` needs one number per head, not `sum(attn)`",
            "max(sum(attn) over heads)", "reduce it first: `sum(sum(attn) over slots)`", *COMPARED,
            "score max(sum(attn) over heads)")  # fmt: skip
    message = "a value per query head, as from `over text`, cannot be compared between KV heads by `over heads`"
    score = "rank(mean(dot(q, k) over text) over heads)"
    refused(
        "KV0412",
        message,
        score,
        "reduce it over the GQA group with a pool: `mean_pool(..., 1)`, say",
        *COMPARED,
        f"score {score}",
    )
    assert check(body(*COMPARED, "score rank(mean_pool(mean(dot(q, k) over text), 1) over heads)")).ok
    what = "cannot read `rank(... over heads)`, which is for the score of heads that share a budget"
    refused(
        "KV0412",
        f"what `select` ranks by {what}",
        "rank(dot(q, k) over heads)",
        None,
        "select top 64 by rank(dot(q, k) over heads)",
    )
