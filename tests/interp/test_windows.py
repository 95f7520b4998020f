"""Reductions over the last queries, and moving averages: from what each query gave, in both memories."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Call, Head, Interpreter, resolve
from kvdsl.ir.nodes import Param, Policy
from kvdsl.passes.columns import add_columns
from tests.quick import few

from .policies import ATTN, POSITION, K, Q, binary, bounded, ema, last, num, over, queries, read, recent, top

DIM, GROUP = 4, 2
NAN, INF = float("nan"), float("inf")
FOLDS = {
    "sum": sum,
    "mean": lambda x: sum(x) / len(x) if x else NAN,
    "var": lambda x: sum((y - sum(x) / len(x)) ** 2 for y in x) / len(x) if x else NAN,
    "std": lambda x: (sum((y - sum(x) / len(x)) ** 2 for y in x) / len(x)) ** 0.5 if x else NAN,
    "max": lambda x: max(x, default=-INF),
    "min": lambda x: min(x, default=INF),
}


def trace(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy, window: int | None = None, **given: float) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy, given, prompt=7), Call(window=window))
    return interpreter, interpreter.empty(DIM, DIM)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("count", few([1, 2.9, -4, 50], 2.9))
@pytest.mark.parametrize("op", FOLDS)
def test_a_window_of_queries(form, op: str, count: float, window: int | None) -> None:
    """Prompt of 7, then one by one, evicting: per slot the test's own list of (query, what it gave)."""
    policy = form(bounded(recent(op, ATTN, count), last(1), budget=5))
    interpreter, head = start(policy, window)
    q, k, v = trace(16)
    given: dict[int, dict[int, float]] = {}
    at = 0
    for length in (7, *[1] * 9):
        kept = head.position.tolist() + list(range(at, at + length))
        for query in range(at, at + length):
            given[query] = {}
            seen = [slot for slot in kept if slot <= query and (window is None or query - slot < window)]
            weights = np.exp(q[query] @ k[seen].T)
            for slot, prob in zip(seen, (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0), strict=True):
                given[slot][query] = prob
        step = (interpreter.prefill if length > 1 else _decode(interpreter))(
            head, q[at : at + length], k[at : at + length], v[at : at + length]
        )
        at += length
        newest = at - 1
        width = max(1, int(np.floor(count)))
        for slot, score in zip(step.position.tolist(), step.score, strict=True):
            expected = FOLDS[op]([x for query, x in given[slot].items() if query > newest - width])
            np.testing.assert_allclose(score, expected, rtol=1e-9, atol=1e-12)
    assert len(head.position) == 5


@pytest.mark.parametrize("count", [2, 4, 50])
def test_of_a_policy_when_prefill_it_counts_the_prompts_own_queries(form, count: int) -> None:
    """Prompts of 7, 5 and 2 tokens with decoded ones between: what queries before the prompt gave is not asked for."""
    policy = form(bounded(recent("mean", ATTN, count), last(1), budget=5)).model_copy(update={"when": "prefill"})
    interpreter, head = start(policy)
    q, k, v = trace(17)
    given: dict[int, dict[int, float]] = {}
    at = 0
    for length in (7, 1, 1, 5, 1, 2):
        kept = head.position.tolist() + list(range(at, at + length))
        for query in range(at, at + length):
            seen = [slot for slot in kept if slot <= query]
            weights = np.exp(q[query] @ k[seen].T)
            given[query] = dict(zip(seen, (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0), strict=True))
        step = (interpreter.prefill if length > 1 else _decode(interpreter))(
            head, q[at : at + length], k[at : at + length], v[at : at + length]
        )
        at += length
        if length == 1:
            assert len(step.victims) == 0
            continue
        for slot, score in zip(step.position.tolist(), step.score, strict=True):
            mine = [given[query][slot] for query in range(max(at - length, at - count), at) if slot in given[query]]
            assert score == pytest.approx(sum(mine) / len(mine))
        assert head.live == 5


def _decode(interpreter: Interpreter) -> object:
    return lambda head, q, k, v: interpreter.decode(head, q[0], k[0], v[0])


def test_how_many_queries_a_window_holds(form) -> None:
    """The closed form: min(t, p + W - 1) - max(p, t - N + 1) + 1, not below 0."""
    for reach, count in [(None, 3), (2, 3), (4, 2), (1, 1)]:
        interpreter, head = start(form(bounded(recent("sum", num(1), count), budget=99)), reach)
        step = interpreter.observe_rows(head, np.ones((9, 9)))
        ends = [8 if reach is None else min(8, p + reach - 1) for p in range(9)]
        assert step.score.tolist() == [max(0, end - max(p, 8 - count + 1) + 1) for p, end in enumerate(ends)]


def test_the_size_may_read_numbers(form) -> None:
    history = Param(name="history", default=num(3))
    size = binary(read("prompt"), "-", binary(read("layer"), "+", num(4)))  # 7 - (0 + 4)
    policy = form(bounded(recent("sum", num(1), size), budget=99, params=(history,)))
    interpreter, head = start(policy)
    assert interpreter.observe_rows(head, np.ones((6, 6))).score.tolist() == [3, 3, 3, 3, 2, 1]


def test_a_new_token_in_an_old_place_begins_anew(form) -> None:
    """With a budget of 1 every token takes the place of the last: nothing of that one's window is left."""
    interpreter, head = start(form(bounded(recent("sum", ATTN, 4), budget=1)))
    for _ in range(6):
        step = interpreter.observe_row(head, [0.25] * head.live + [0.75])
        assert step.score[-1] == 0.75


def test_a_window_inside_of_a_reduction(form) -> None:
    """How often a token had less than the most of its last 2 queries: the inner one includes the query at hand."""
    running = recent("max", ATTN, 2)
    interpreter, head = start(form(bounded(queries("sum", binary(ATTN, "<", running)), budget=99)))
    rows = [[4, 0, 0, 0], [2, 1, 0, 0], [1, 3, 2, 0], [3, 2, 2, 1]]
    step = interpreter.observe_rows(head, np.array(rows) / 8)
    assert step.score.tolist() == [2, 1, 0, 0]  # 4; 2 < 4; 1 < 2; 3 | 1; 3; 2 < 3 | 2; 2 | 1


def test_windows_of_what_reads_q(form) -> None:
    dot = over("sum", "dim", binary(Q, "*", K))
    interpreter, head = start(form(bounded(recent("max", dot, 2), budget=99)))
    q, k, v = trace(5)
    score = interpreter.prefill(head, q, k, v).score
    dots = np.einsum("lgd,sd->lgs", q, k).mean(axis=1)
    np.testing.assert_allclose(score, [dots[max(s, 3) :, s].max() for s in range(5)])


def test_rings_of_one_body_and_size_are_one_column() -> None:
    policy = add_columns(bounded(recent("sum", ATTN, 4), top(2, recent("max", ATTN, 4)), top(1, recent("sum", ATTN, 5))))
    assert [(column.rule, column.size) for column in policy.columns] == [("ring", num(4)), ("ring", num(5))]


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.9, 1.0])
def test_moving_averages(form, decay: float) -> None:
    """e = x at a slot's first query, then decay e + (1 - decay) x; an evicted place begins anew."""
    policy = form(bounded(ema(ATTN, decay), last(1), budget=3))
    interpreter, head = start(policy)
    rows = np.random.default_rng(0).random((12, 12))
    average: dict[int, float] = {}
    for token in range(12):
        row = rows[token, : head.live + 1]
        for slot, x in zip([*head.position.tolist(), token], row, strict=True):
            average[slot] = x if slot == token else decay * average[slot] + (1 - decay) * x
        step = interpreter.observe_row(head, row)
        np.testing.assert_allclose(step.score, [average[slot] for slot in step.position], rtol=1e-12)
        assert head.live == min(token + 1, 3)


def test_a_moving_average_of_a_prompt(form) -> None:
    interpreter, head = start(form(bounded(ema(ATTN, 0.5), budget=99)))
    step = interpreter.observe_rows(head, [[1, 9, 9], [0.5, 0.25, 9], [0.25, 0.75, 0.5]])
    assert step.score.tolist() == [0.5, 0.5, 0.5]


def test_a_moving_average_ends_with_the_models_window(form) -> None:
    interpreter, head = start(form(bounded(ema(POSITION, 0.5), budget=99)), window=2)
    assert interpreter.observe_rows(head, np.ones((4, 4))).score.tolist() == [0, 1, 2, 3]


def test_resuming_rings_from_a_backends_slots() -> None:
    """Slots in any order, free ones between, and rings with more places than this row uses."""
    policy = add_columns(bounded(binary(recent("mean", ATTN, 3), "+", ema(ATTN, 0.5)), last(1), budget=6))
    q, k, v = trace(20)
    interpreter, head = start(policy)
    interpreter.prefill(head, q[:10], k[:10], v[:10])
    order = np.array([4, -1, 0, 5, 2, -1, 1, 3])
    columns = {name: column[order] for name, column in head.columns.items()}
    (ring,) = (name for name, column in columns.items() if column.ndim == 2)
    columns[ring] = np.concatenate([columns[ring], np.full((8, 2), 1e9)], axis=1)
    places = np.where(order < 0, -1, head.position[order])
    resumed = interpreter.resume(head.key[order], head.value[order], places, columns, head.seen)
    for token in range(10, 20):
        one, other = (interpreter.decode(state, q[token], k[token], v[token]) for state in (head, resumed))
        assert one.evicted.tolist() == other.evicted.tolist()
        np.testing.assert_allclose(one.score, other.score[np.argsort(other.position)])
