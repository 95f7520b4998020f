"""How much a head may hold: hard caps, layers and phases that do not evict, and prompts in blocks."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from kvdsl.interp import Call, Head, Interpreter, resolve
from kvdsl.ir.nodes import Expr, LayerRange, Policy
from tests.quick import few

from .policies import ATTN, POSITION, binary, bounded, ema, first, last, num, over, queries, read, recent, top

DIM, GROUP = 4, 2
SUM = queries("sum", ATTN)


def trace(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy, call: Call | None = None, layer: int = 0, **given: float) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy, given, layer=layer, layers=6), call or Call())
    return interpreter, interpreter.empty(DIM, DIM)


def test_a_policy_keeps_at_least_one_token(form) -> None:
    """However little its budget comes to."""
    policy = form(bounded(SUM, budget=4).model_copy(update={"budget": binary(read("prompt"), "-", num(9))}))
    assert [resolve(policy, prompt=prompt).budget for prompt in (3, 9, 10, 12)] == [1, 1, 1, 3]


# -- cap hard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "slack", "drop"), [(1, 0, 0), (1, 2, 1), (4, 2, 0), (4, 2, 1), (4, 3, 8), (5, 9, 2), (0, 2, 1), (9, 0, 3)]
)
def test_a_hard_cap_against_a_simulation(form, trigger: int, slack: int, drop: int) -> None:
    """H2O with C = 5: sums of given attention, in the test's own dict, room made before the token and a settle after it."""
    budget = 5
    shape = {"trigger": num(trigger), "slack": num(slack), "max_drop": num(drop)}
    interpreter, head = start(form(bounded(SUM, last(2), budget=budget, cap="hard", **shape)))
    rows = np.random.default_rng(trigger + slack + drop).integers(0, 64, size=(40, 41)) / 64
    total: dict[int, float] = {}

    def target(live: int) -> int:
        return budget if drop == 0 else min(max(live - drop, budget), budget + slack)

    def evict(count: int) -> list[int]:
        candidates = sorted(list(total)[:-2], key=lambda slot: (total[slot], slot))
        for slot in candidates[:count]:
            del total[slot]
        return candidates[:count]

    for token in range(40):
        slots, gone = list(total), []
        if len(total) + 1 > budget + slack:
            gone += evict(len(total) + 1 - target(len(total) + 1))
        total[token] = 0.0
        for slot, x in zip([*slots, token], rows[token], strict=False):
            if slot in total:
                total[slot] += x
        assert len(total) <= budget + slack
        if trigger > 0 and len(total) - budget >= trigger:
            gone += evict(len(total) - target(len(total)))
        step = interpreter.observe_row(head, rows[token, : len(slots) + 1])
        assert step.evicted.tolist() == gone
        assert head.position.tolist() == list(total)


def test_room_is_made_before_the_token_attends() -> None:
    """With a soft cap the newest token attends to C + 1 slots, with a hard one to C; nobody else is told of it."""
    q, k, v = trace(12)
    for cap, attended in (("soft", 5), ("hard", 4)):
        interpreter, head = start(bounded(POSITION, first(1), last(1), budget=4, cap=cap))
        for token in range(12):
            step = interpreter.decode(head, q[token], k[token], v[token])
            assert len(step.position) == min(token + 1, attended)
            assert head.position.tolist() == ([*range(token + 1)] if token < 4 else [0, token - 2, token - 1, token])
        seen = [0, *range(12 - attended + 1, 12)]
        weights = np.exp(q[11] @ k[seen].T)
        np.testing.assert_allclose(step.out, weights @ v[seen] / weights.sum(axis=1, keepdims=True))


def test_what_makes_room_sees_the_slots_without_the_new_token(form) -> None:
    """`age`, `count()` and `live` are those after the token before."""
    interpreter, head = start(form(bounded(binary(read("age"), "*", num(-1)), budget=3, cap="hard")))
    for _ in range(4):
        step = interpreter.observe_row(head, np.ones(head.live + 1))
    (room,) = step.earlier
    assert room.position.tolist() == [0, 1, 2]
    assert room.score.tolist() == [-2, -1, 0]
    assert room.evicted.tolist() == step.evicted.tolist() == [0]
    counts, head = start(form(bounded(binary(read("observed"), "+", read("live")), budget=2, cap="hard")))
    counts.observe_rows(head, np.ones((2, 2)))
    (room,) = counts.observe_row(head, [1, 1, 1]).earlier
    assert room.score.tolist() == [2 + 2, 1 + 2]


def test_a_prompt_is_not_capped() -> None:
    q, k, v = trace(9)
    interpreter, head = start(bounded(POSITION, budget=3, cap="hard", trigger=num(20)))
    step = interpreter.prefill(head, q, k, v)
    assert (head.live, step.earlier) == (9, ())
    step = interpreter.decode(head, q[0], k[0], v[0])
    assert (len(step.position), head.live) == (3, 3)
    assert step.evicted.tolist() == [0, 1, 2, 3, 4, 5, 6]


# -- layers and phases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "evicting"),
    [
        (2, None, {2, 3, 4, 5}),
        (None, 3, {0, 1, 2, 3}),
        (1, 2, {1, 2}),
        (3, 3, {3}),
        (None, None, {*range(6)}),
        (9, None, set()),
    ],
)
def test_layers_that_do_not_evict_grow(low: int | None, high: int | None, evicting: set[int]) -> None:
    ends = {name: num(end) for name, end in (("low", low), ("high", high)) if end is not None}
    policy = bounded(read("budget"), last(1), budget=3, layers=LayerRange(**ends), cap="hard")
    q, k, v = trace(10)
    for layer in range(6):
        interpreter, head = start(policy, layer=layer)
        interpreter.prefill(head, q[:6], k[:6], v[:6])
        for token in range(6, 10):
            step = interpreter.decode(head, q[token], k[token], v[token])
        assert head.live == (3 if layer in evicting else 10)
        assert interpreter.numbers.capacity == (3 if layer in evicting else math.inf)
        assert set(step.score.tolist()) == {3}  # `budget` reads the same everywhere


def test_layers_may_be_counted_from_the_end() -> None:
    policy = bounded(POSITION, layers=LayerRange(low=binary(read("layers"), "-", num(2))))
    assert [resolve(policy, layer=layer, layers=6).evicts for layer in range(6)] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("cap", ["soft", "hard"])
def test_after_when_prefill_the_cache_grows(form, cap: str) -> None:
    q, k, v = trace(12)
    interpreter, head = start(form(bounded(SUM, last(1), budget=3, when="prefill", cap=cap)))
    interpreter.prefill(head, q[:7], k[:7], v[:7])
    survivors = head.position.tolist()
    assert len(survivors) == 3
    for token in range(7, 12):
        assert interpreter.decode(head, q[token], k[token], v[token]).evicted.size == 0
    assert head.position.tolist() == [*survivors, 7, 8, 9, 10, 11]


def test_when_decode_leaves_the_prompt_alone(form) -> None:
    q, k, v = trace(12)
    interpreter, head = start(form(bounded(SUM, last(1), budget=3, when="decode")))
    assert interpreter.prefill(head, q[:7], k[:7], v[:7]).evicted.size == 0
    assert head.live == 7
    step = interpreter.decode(head, q[7], k[7], v[7])
    order = sorted(range(7), key=lambda slot: step.score[slot])
    assert step.evicted.tolist() == order[:5]
    assert head.live == 3


# -- prompts in blocks -----------------------------------------------------------------------------------------------

BLOCK_POLICIES = {
    "h2o": bounded(SUM, last(2), budget=4),
    "roco": bounded(queries("mean", ATTN), top(2, queries("std", ATTN)), last(1), budget=5),
    "windowed": bounded(binary(recent("sum", ATTN, 3), "+", ema(ATTN, 0.5)), last(1), budget=4),
    "scissorhands": bounded(queries("sum", binary(ATTN, ">", over("mean", "slot", ATTN))), last(2), budget=4),
    "lazy": bounded(POSITION, first(2), last(1), budget=4, trigger=num(3), slack=num(2), max_drop=num(2)),
}


def in_blocks(policy: Policy, size: Expr) -> Policy:
    from kvdsl.ir.visitors import with_policy

    return with_policy(policy, prefill="blocks", prefill_block=size)


@pytest.mark.parametrize("name", BLOCK_POLICIES)
def test_blocks_of_one_are_decoding(form, name: str) -> None:
    q, k, v = trace(14)
    policy = form(BLOCK_POLICIES[name])
    (blocks, whole), (tokens, single) = start(in_blocks(policy, num(1))), start(policy)
    step = blocks.prefill(whole, q, k, v)
    steps = [tokens.decode(single, q[token], k[token], v[token]) for token in range(14)]
    assert (step.out == np.stack([one.out for one in steps])).all()
    assert step.evicted.tolist() == [gone for one in steps for gone in one.evicted]
    assert whole.position.tolist() == single.position.tolist()
    assert step.score.tolist() == steps[-1].score.tolist()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("size", few([1, 3, 4.5, 5, 100], 4.5))
@pytest.mark.parametrize("name", BLOCK_POLICIES)
def test_how_a_prompt_is_cut_means_nothing_in_blocks(form, name: str, size: float, window: int | None) -> None:
    q, k, v = trace(14)
    interpreter, head = start(in_blocks(form(BLOCK_POLICIES[name]), num(size)), Call(window=window))
    whole = interpreter.prefill(head, q, k, v)
    for cuts in [(7,), (3, 6, 9), (1, 2, 3, 4, 5), (13,), tuple(range(1, 14)), (5, 10)]:
        parts, outs, gone = interpreter.empty(DIM, DIM), [], []
        for begin, end in pairwise((0, *cuts, 14)):
            step = interpreter.prefill(parts, q[begin:end], k[begin:end], v[begin:end])
            outs.append(step.out)
            gone += step.evicted.tolist()
        assert (np.concatenate(outs) == whole.out).all()
        assert gone == whole.evicted.tolist()
        assert parts.position.tolist() == head.position.tolist()
        assert step.score.tolist() == whole.score.tolist()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_block_attends_to_the_survivors_and_itself(size: int) -> None:
    """H2O in blocks, by brute force: a remainder stays unsettled until the next block's end, or the first decoded token."""
    q, k, v = trace(11)
    interpreter, head = start(in_blocks(BLOCK_POLICIES["h2o"], num(size)))
    step = interpreter.prefill(head, q, k, v)
    kept: list[int] = []
    total: dict[int, float] = {}
    for token in range(11):
        kept.append(token)
        total[token] = 0.0
        weights = np.exp(q[token] @ k[kept].T)
        probs = weights / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(step.out[token], probs @ v[kept])
        for slot, x in zip(kept, probs.mean(axis=0), strict=True):
            total[slot] += x
        if (token + 1) % size == 0 and len(kept) > 4:
            leave = sorted(kept[:-2], key=lambda slot: total[slot])[: len(kept) - 4]
            kept = [slot for slot in kept if slot not in leave]
        assert len(kept) < 4 + size
    assert head.position.tolist() == kept
    assert len(kept) == 4 + 11 % size
    interpreter.decode(head, q[0], k[0], v[0])
    assert head.live == 4


def test_given_rows_pass_over_what_has_left() -> None:
    """A row of a prompt has a place for every slot and token of the forward, whoever has left before."""
    interpreter, head = start(in_blocks(bounded(SUM, budget=2), num(3)))
    step = interpreter.observe_rows(head, np.array([[8, 9, 9, 9], [4, 2, 9, 9], [2, 2, 4, 9], [64, 1, 64, 32]]) / 64)
    assert [one.evicted.tolist() for one in (*step.earlier, step)] == [[1], [1]]
    assert step.position.tolist() == [0, 2, 3]
    assert step.score.tolist() == [78 / 64, 68 / 64, 0.5]


def test_a_block_of_nothing_is_of_one() -> None:
    assert [resolve(in_blocks(BLOCK_POLICIES["h2o"], num(size))).prefill_block for size in (0, -2, 0.5, 2.9)] == [1, 1, 1, 2]
