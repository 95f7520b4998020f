"""Compact positions: attention as if the survivors were the whole text, from vectors that were never rotated."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Call, Head, Interpreter, Rope, resolve
from kvdsl.ir.nodes import Policy
from kvdsl.ir.visitors import with_policy
from kvdsl.passes.columns import add_columns

from . import brute
from .policies import ATTN, POSITION, K, Q, binary, bounded, call, first, last, num, over, queries, read

DIM, GROUP = 8, 2
ROPES = {
    "half": Rope(np.array([1.0, 0.5, 0.1, 0.01])),
    "interleaved": Rope(np.array([1.0, 0.5, 0.1, 0.01]), "interleaved"),
    "partial": Rope(np.array([0.7, 0.05])),
    "partial interleaved": Rope(np.array([0.7, 0.05]), "interleaved"),
    "behind": Rope(np.array([0.9, 0.2, 0.03]), offset=2),
    "behind interleaved": Rope(np.array([0.9, 0.2]), "interleaved", offset=4),
}


def rotated(x: np.ndarray, position: float, rope: Rope) -> np.ndarray:
    return brute.rotated(x, position, rope.inv_freq, rope.pairing, rope.offset)


def at_their_places(x: np.ndarray, rope: Rope) -> np.ndarray:
    """Vectors [tokens, ..., D], each rotated at its own place in the text, as a model gives them."""
    return np.stack([np.apply_along_axis(rotated, -1, one, place, rope) for place, one in enumerate(x)])


def trace(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy, rope: Rope | None, window: int | None = None) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy), Call(window=window, rope=rope))
    return interpreter, interpreter.empty(DIM, DIM)


def from_scratch(q: np.ndarray, k: np.ndarray, v: np.ndarray, live: list[int], newest: int, seen: list[int], rope: Rope):
    """Attention of unrotated vectors at positions 0 .. n - 1: [G, Dv] and the probabilities."""
    rank = {slot: place for place, slot in enumerate(sorted(live))}
    keys = np.stack([rotated(k[slot], rank[slot], rope) for slot in seen])
    query = np.stack([rotated(one, rank[newest], rope) for one in q[newest]])
    weights = np.exp(query @ keys.T)
    probs = weights / weights.sum(axis=1, keepdims=True)
    return probs @ v[seen], probs


@pytest.mark.parametrize("name", ROPES)
def test_turning_is_by_the_distance(name: str) -> None:
    rope, x = ROPES[name], np.random.default_rng(0).normal(size=(5, 3, DIM))
    shift = np.random.default_rng(1).integers(-9, 9, size=(5, 3))
    turned = rope.rotate(x, shift)
    for at in np.ndindex(5, 3):
        np.testing.assert_allclose(turned[at], rotated(x[at], shift[at], rope), atol=1e-14)
    np.testing.assert_allclose(rope.rotate(turned, -shift), x, atol=1e-14)


@pytest.mark.parametrize("form", ["history", "columns"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ROPES)
def test_attention_at_ranks(name: str, window: int | None, form: str) -> None:
    """A policy that leaves holes: a prompt of 9 and another of 3, then tokens one by one."""
    rope = ROPES[name]
    policy = bounded(queries("sum", ATTN), first(1), last(2), budget=6, positions="compact")
    interpreter, head = start(add_columns(policy) if form == "columns" else policy, rope, window)
    q, k, v = trace(24)
    query, key = at_their_places(q, rope), at_their_places(k, rope)
    total, kept, at = dict[int, float](), list[int](), 0
    for length in (9, 3, *[1] * 12):
        tokens = slice(at, at + length)
        outs = []
        for token in range(at, at + length):
            kept.append(token)
            total[token] = 0.0
            seen = [slot for slot in kept if window is None or token - slot < window]
            out, probs = from_scratch(q, k, v, kept, token, seen, rope)
            outs.append(out)
            for slot, x in zip(seen, probs.mean(axis=0), strict=True):
                total[slot] += x
        if length > 1:
            step = interpreter.prefill(head, query[tokens], key[tokens], v[tokens])
        else:
            step = interpreter.decode(head, query[at], key[at], v[at])
        np.testing.assert_allclose(step.out, np.stack(outs) if length > 1 else outs[0], atol=1e-12)
        at += length
        safe = {kept[0], *kept[-2:]}
        gone = sorted((slot for slot in kept if slot not in safe), key=lambda slot: (total[slot], slot))
        kept = [slot for slot in kept if slot not in gone[: max(0, len(kept) - 6)]]
        assert head.position.tolist() == kept


def test_without_holes_nothing_turns() -> None:
    q, k, v = trace(9)
    for layout in ("half", "interleaved"):
        rope = Rope(np.array([1.0, 0.3]), layout)
        (compact, one), (plain, other) = (
            start(bounded(POSITION, budget=99, positions=positions), rope) for positions in ("compact", "original")
        )
        np.testing.assert_array_equal(compact.prefill(one, q, k, v).out, plain.prefill(other, q, k, v).out)


def test_a_model_without_rotary_positions_has_nothing_to_turn() -> None:
    q, k, v = trace(9)
    (compact, one), (plain, other) = (
        start(bounded(POSITION, first(1), last(1), budget=3, positions=positions), None)
        for positions in ("compact", "original")
    )
    for token in range(9):
        steps = (compact.decode(one, q[token], k[token], v[token]), plain.decode(other, q[token], k[token], v[token]))
        np.testing.assert_array_equal(steps[0].out, steps[1].out)


def test_the_order_of_slots_means_nothing() -> None:
    rope = ROPES["half"]
    policy = add_columns(bounded(POSITION, first(2), budget=5, positions="compact"))
    interpreter, head = start(policy, rope)
    q, k, v = trace(12)
    query, key = at_their_places(q, rope), at_their_places(k, rope)
    interpreter.prefill(head, query[:11], key[:11], v[:11])
    order = np.array([3, -1, 0, 4, 1, 2])
    places = np.where(order < 0, -1, head.position[order])
    resumed = interpreter.resume(head.key[order], head.value[order], places, {}, head.seen)
    steps = [interpreter.decode(state, query[11], key[11], v[11]) for state in (head, resumed)]
    np.testing.assert_allclose(steps[0].out, steps[1].out)
    expected, _ = from_scratch(q, k, v, [0, 1, 8, 9, 10, 11], 11, [0, 1, 8, 9, 10, 11], rope)
    np.testing.assert_allclose(steps[0].out, expected)


def test_expressions_see_the_text() -> None:
    """`q` and `k` are as they arrived, and positions, ages and `keep last` those of the text."""
    rope = ROPES["interleaved"]
    dot = over("sum", "dim", binary(Q, "*", K))
    score = binary(queries("last", dot), "+", binary(num(1000), "*", POSITION))
    by_age = binary(binary(num(1e6), "*", read("age")), "+", score)
    policy = with_policy(bounded(call("max", by_age), last(1), budget=4, positions="compact"), group="sum")
    interpreter, head = start(policy, rope)
    q, k, v = trace(8)
    query, key = at_their_places(q, rope), at_their_places(k, rope)
    for token in range(8):
        step = interpreter.decode(head, query[token], key[token], v[token])
        dots = (query[token] @ key[step.position].T).sum(axis=0)
        np.testing.assert_allclose(step.score, 1e6 * (token - step.position) + 1000 * step.position + dots)
    assert head.position.tolist() == [0, 1, 2, 7]
