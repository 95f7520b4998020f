"""Which policies are searched, and which of them are one."""

from __future__ import annotations

from random import Random

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.source import SourceFile
from kvdsl_lab.search.moves import moves, numbers, with_numbers
from kvdsl_lab.search.report import in_words
from kvdsl_lab.search.run import seeds
from kvdsl_lab.search.space import Bounds, canonical, seed_of, size_of


def policy(*lines: str) -> Policy:
    """A policy of these statements, as the checker gives it."""
    text = "\n".join(["kv 1", "policy Found {", "param budget = 512", *lines, "}"])
    return analyse(SourceFile("found.kv", text)).policy


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("score sum(attn) + 3", "score sum(attn)"),
        ("score 2 * sum(attn)", "score sum(attn)"),
        ("score sum(attn) - 3 + age", "score age + sum(attn)"),
        ("score age - (sum(attn) + 3)", "score age - sum(attn)"),
        ("score 2 * sum(attn) / (age / 3)", "score sum(attn) / age"),
        ("score sum(2 * attn) / 3", "score sum(attn)"),
        ("score exp(sum(attn))", "score sum(attn)"),
        ("score sqrt(sum(attn))", "score sum(attn)"),
        ("score sum(attn) ** 2", "score sum(attn)"),
        ("score sum(attn) / count()", "score mean(attn)"),
        ("score age * sum(attn)", "score sum(attn) * age"),
        ("score max(age, sum(attn))", "score max(sum(attn), age)"),
        ("score sum(attn ** 1)", "score sum(attn)"),
        ("score sum(attn)\ngroup sum", "score sum(attn)"),
        ("score sum(attn > 2 * mean(attn over slots))\ngroup sum", "score sum(attn > 2 * mean(attn over slots))"),
        ("score sum(attn)\nkeep top budget / 2 by sum(attn)", "score sum(attn)\nkeep last 1"),
        ("score sum(attn)\nkeep first 4.7", "score sum(attn)\nkeep first 4"),
        ("score sum(attn)\nkeep last budget / 4", "score sum(attn)\nkeep last 0.25 * budget"),
    ],
)
def test_equal_policies_are_one(one: str, other: str) -> None:
    assert canonical(policy(*one.split("\n"), *_unkept(one))) == canonical(policy(*other.split("\n"), *_unkept(other)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("score -sum(attn)", "score sum(attn)"),
        (
            "score sum(attn)\nkeep last 0.75 * budget\nkeep top 0.5 * budget by sum(attn)",
            "score sum(attn)\nkeep last 0.75 * budget",
        ),
        ("score 3 - sum(attn)", "score sum(attn)"),
        ("score (sum(attn) - 3) * age", "score sum(attn) * age"),
        ("score sum(attn) * 2 + age", "score sum(attn) + age"),
        ("score sqrt(age - 3)", "score age - 3"),  # no number below 3: those leave first
        ("score sum(attn ** 2)", "score sum(attn)"),
        ("score sum(attn)\ngroup max", "score sum(attn)"),
        ("score sum(attn > 0.1)\ngroup sum", "score sum(attn > 0.1)"),
        ("score sum(logit)\ngroup sum\nkeep first 4", "score sum(logit)"),
        ("score sum(attn) ** -1", "score sum(attn)"),
    ],
)
def test_others_are_not(one: str, other: str) -> None:
    assert canonical(policy(*one.split("\n"), *_unkept(one))) != canonical(policy(*other.split("\n"), *_unkept(other)))


def test_what_fits_at_a_budget() -> None:
    """A `keep top` by the score says nothing where all that is protected fits, which the budgets that are asked for decide."""
    plain, score = policy("score mean(attn)", "keep last 16"), "score mean(attn)"
    topped = policy(score, "keep last 16", "keep top 0.5 * budget by mean(attn)")
    assert canonical(topped, (128,)) == canonical(plain, (128,))
    assert canonical(topped, (16, 128)) != canonical(plain, (16, 128)) and canonical(topped) != canonical(plain)
    crowded = policy(score, "keep last budget - 1", "keep top 0.5 * budget by mean(attn)")
    assert canonical(crowded) != canonical(policy(score, "keep last budget - 1"))


def _unkept(text: str) -> list[str]:
    return [] if "keep" in text else ["keep last 0"]


def test_shipped_policies_are_in_it() -> None:
    assert {"h2o", "roco", "tova", "scissorhands", "streaming_llm", "window", "knorm", "random"} <= set(seeds())
    assert in_words(seeds()["roco"]) == "score mean(attn) · keep last 1 · keep top 0.5 * budget by std(attn)"
    assert seed_of(policy("when prefill", "score sum(attn)")) is None
    assert seed_of(policy("select top 4 by dot(q, k)", "score sum(attn)")) is None


def test_bounds() -> None:
    h2o, roco = seeds()["h2o"], seeds()["roco"]
    assert size_of(h2o, Bounds(state_bytes=4)) is not None
    assert size_of(roco, Bounds(state_bytes=4)) is None, "it takes 8 bytes"
    assert size_of(roco, Bounds(nodes=3)) is None
    assert size_of(roco, Bounds(keeps=1)) is None
    assert size_of(seeds()["lazy_streaming"], Bounds()) is None, "it holds 32 tokens more than its budget"
    assert size_of(seeds()["lazy_streaming"], Bounds(trigger=32)) is not None
    assert size_of(policy("score sum(attn over last 8 queries)"), Bounds()) is None, "a ring of 8 numbers takes 32 bytes"


def test_what_moves_make_is_read_back_as_it_was() -> None:
    known, bounds = list(seeds().values()), Bounds(trigger=8)
    admitted = 0
    for number in range(150):
        rng = Random(number)
        name = rng.choice(list(moves(bounds)))
        child = moves(bounds)[name](rng, [rng.choice(known), rng.choice(known)])
        if child is not None and size_of(child := canonical(child), bounds) is not None:
            admitted += 1
            assert canonical(child) == child
            read = analyse(SourceFile("found.kv", print_policy(child))).policy
            assert canonical(read) == child, (name, in_words(child))
    assert admitted > 50


def test_numbers() -> None:
    roco = seeds()["roco"]
    assert [value for _, value in numbers(roco)] == [1.0, 0.5]
    assert in_words(with_numbers(roco, [3.0, 0.12345])).endswith("keep last 3 · keep top 0.123 * budget by std(attn)")
