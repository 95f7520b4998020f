"""Scores on equal ground: the prompt stays, and `budget` tokens of the answer, a quarter of them the newest.

Every policy evicts sixteen tokens at a time, and differs from the others in its score alone. R-KV's and G-KV's scores have their papers'
mixtures and windows of 8 and 16 queries.

    kvdsl leaderboard --model qwen2.5-coder-0.5b --dtype bf16 --tasks gsm8k --data FILE --tokens 64 \\
      --policies benchmarks/answers.py:chance,benchmarks/answers.py:mean_attention
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvdsl
from kvdsl.lang import (
    Expression,
    age,
    attn,
    dot,
    ema,
    exp,
    fold,
    k,
    last,
    live,
    max,
    max_pool,
    mean,
    norm1,
    norm2,
    position,
    prev,
    prompt,
    random,
    sum,
    v,
    where,
)


def scored(score: Callable[[Any], Expression]) -> Any:
    """Make a policy of a function that returns a score; its docstring is the policy's."""

    def policy(p: Any, budget: int = 128) -> None:
        p.budget(prompt + budget)
        p.score(score(p))
        p.keep(first=prompt)
        p.keep(last=(budget - prompt) / 4)
        p.trigger(overflow=16)

    policy.__doc__ = score.__doc__
    return kvdsl.policy(name="".join(map(str.capitalize, score.__name__.split("_"))))(policy)


def likeness(p: Any, *, tiny: float) -> Expression:
    """R-KV's likeness of a key to the others, before it is measured by theirs."""
    unit = p.let("unit", k / (norm2(k) + tiny))
    newest = p.let(
        "newest",
        max(lambda j: j.position, over="slots", where=lambda j: (j.position != position) & (dot(unit, j(unit)) > 0.5)),
    )
    others = sum(
        lambda j: dot(unit, j(unit)), over="slots", where=lambda j: (j.position != position) & (j(newest) != position)
    )
    return exp(others / live)


@scored
def chance(p: Any) -> Expression:
    """Evicts at random."""
    return random()


@scored
def newest(p: Any) -> Expression:
    """Keeps the newest tokens."""
    return position


@scored
def all_attention(p: Any) -> Expression:
    """Evicts the token with the least attention in all: H2O's score."""
    return sum(attn)


@scored
def mean_attention(p: Any) -> Expression:
    """Evicts the token with the least attention per query: RoCo's score."""
    return mean(attn)


@scored
def last_attention(p: Any) -> Expression:
    """Evicts the token with the least attention of the newest query: TOVA's score."""
    return last(attn)


@scored
def fading_attention(p: Any) -> Expression:
    """Evicts the token with the least attention, which fades by a tenth with every query."""
    return ema(attn, 0.9)


@scored
def recent_attention(p: Any) -> Expression:
    """Evicts the token to which the last 32 queries attend least: MorphKV's score."""
    return sum(attn, last=32)


@scored
def short_keys(p: Any) -> Expression:
    """Evicts the token with the longest key."""
    return -norm2(k)


@scored
def unlike_keys(p: Any) -> Expression:
    """Evicts the token whose key is most like the mean key: KeyDiff's score."""
    unit = p.let("unit", k / norm2(k))
    anchor = p.let("anchor", mean(unit, over="slots"))
    return -dot(unit, anchor) / norm2(anchor)


@scored
def long_values(p: Any) -> Expression:
    """Evicts the token with the shortest value."""
    return norm2(v)


@scored
def attention_by_value(p: Any) -> Expression:
    """Evicts the token with the least attention times the length of its value: VATP's score."""
    return sum(attn) * norm1(v)


@scored
def rkv(p: Any) -> Expression:
    """R-KV's score: attention of the last queries against likeness to other keys."""
    told = p.let("told", mean(attn, last=8))
    alike = p.let("alike", likeness(p, tiny=1e-8))
    return 0.1 * max_pool(told, 7) - 0.9 * alike / sum(alike, over="slots")


@scored
def gkv(p: Any) -> Expression:
    """G-KV's score: attention that fades from prune to prune, against likeness to other keys."""
    told = p.let("told", where(age >= 16, mean(attn, last=16), 0))
    history = p.let("history", fold(max(0.8 * prev, told / max(told, over="slots")), 0, over="prunes"))
    alike = p.let("alike", likeness(p, tiny=1e-6))
    return 0.5 * history - 0.5 * alike / max(where(age >= 16, alike, 0), over="slots")


@scored
def overdue(p: Any) -> Expression:
    """LazyEviction's score: how long attention has stayed away, measured by its longest pause so far."""
    now = p.let("now", position + age)
    hit = p.let("hit", (now >= prompt) & (attn >= 0.0001))
    told = p.let("told", fold(where(hit, now, prev), position))
    pause = p.let("pause", fold(where(hit, max(prev, now - told), prev), 0))
    return 2 / (1 + exp(1 + (now - told) / (pause + 0.00001))) + where(pause > 0, 2 / (1 + exp(pause - 1)), 0)
