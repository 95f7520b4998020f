"""How much a head may hold: hard caps, and prompts in blocks, by the test's own dict of sums.

What else decides it is compared with every backend in `tests.differential.test_statements`.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Head, Interpreter, resolve, settle
from kvdsl.ir.nodes import Policy

from .policies import ATTN, binary, bounded, last, num, queries, read

DIM, GROUP = 4, 2
SUM = queries("sum", ATTN)


def trace(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy))
    return interpreter, interpreter.empty(DIM, DIM)


def test_a_policy_keeps_at_least_one_token(form) -> None:
    """However little its budget comes to."""
    policy = form(bounded(SUM, budget=4).model_copy(update={"budget": binary(read("prompt"), "-", num(9))}))
    assert [resolve(policy, prompt=prompt).budget for prompt in (3, 9, 10, 12)] == [1, 1, 1, 3]


def test_a_layer_gets_no_more_than_it_holds() -> None:
    """Shares of 6 and 2 tokens: the first layer holds 5, so the second gets 3."""
    assert settle.shares([3, 1], [4, 4], [0, 0], [5, 8]) == [5, 3]


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


# -- prompts in blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_block_attends_to_the_survivors_and_itself(size: int) -> None:
    """H2O in blocks, by brute force: a remainder stays unsettled until the next block's end, or the first decoded token."""
    q, k, v = trace(11)
    interpreter, head = start(bounded(SUM, last(2), budget=4, prefill="blocks", prefill_block=num(size)))
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
