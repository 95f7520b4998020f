"""The steps of a head: prompts, rows that are given, resuming from a backend's slots, and every corner."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdsl.interp import Call, Head, Interpreter, Numbers, Step, attend, resolve
from kvdsl.ir.nodes import Axis, Expr, Policy, Random, Reduce
from kvdsl.ir.visitors import with_policy
from kvdsl.passes.columns import add_columns

from .policies import (
    ATTN,
    FULL,
    H2O,
    LOGIT,
    NORM1_V,
    POSITION,
    ROCO,
    SCISSORHANDS,
    TOVA,
    VATP_H2O,
    WINDOW,
    K,
    Q,
    binary,
    bounded,
    first,
    last,
    num,
    over,
    queries,
    read,
    top,
    where,
)

DIM, GROUP = 4, 2
ALL = {
    "full": FULL,
    "window": WINDOW,
    "h2o": H2O,
    "scissorhands": SCISSORHANDS,
    "tova": TOVA,
    "roco": ROCO,
    "vatp": VATP_H2O,
}


def trace(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy, call: Call | None = None, **given: float) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy, given), call or Call())
    return interpreter, interpreter.empty(DIM, DIM)


def rows(policy: Policy, *given_rows: list[float]) -> list[list[int]]:
    """Who leaves after each attention row."""
    interpreter, head = start(policy)
    return [interpreter.observe_row(head, row).evicted.tolist() for row in given_rows]


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1, 1, 10), (1,) * 12])
@pytest.mark.parametrize("name", ALL)
def test_how_a_prompt_is_cut_means_nothing_while_all_fits(name: str, chunks: tuple[int, ...], window: int | None) -> None:
    q, k, v = trace(12)
    given = {} if name == "full" else {"budget": 12}
    (one, whole), (_, parts) = (start(ALL[name], Call(window=window), **given) for _ in range(2))
    expected = one.prefill(whole, q, k, v)
    outs, at = [], 0
    for length in chunks:
        step = one.prefill(parts, q[at : at + length], k[at : at + length], v[at : at + length])
        outs.append(step.out)
        at += length
        assert step.victims.size == 0
    np.testing.assert_allclose(np.concatenate(outs), expected.out, rtol=1e-12, atol=1e-14)
    if expected.score is not None:
        np.testing.assert_allclose(step.score, expected.score, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(step.attn, expected.attn, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_a_budget_that_fits_is_full_attention(name: str) -> None:
    q, k, v = trace(9)
    interpreter, head = start(ALL[name], **({} if name == "full" else {"budget": 9}))
    for token in range(9):
        step = interpreter.decode(head, q[token], k[token], v[token])
        plain = attend(k[: token + 1], v[: token + 1], np.arange(token + 1), q[token], token, Call())
        np.testing.assert_allclose(step.out, plain.out)
    assert head.live == head.seen == 9


def test_a_second_chunk_sees_the_survivors() -> None:
    q, k, v = trace(10)
    interpreter, head = start(WINDOW, budget=4)
    interpreter.prefill(head, q[:6], k[:6], v[:6])
    assert head.position.tolist() == [2, 3, 4, 5]
    step = interpreter.prefill(head, q[6:], k[6:], v[6:])
    for token in range(6, 10):
        seen = np.arange(2, token + 1)
        plain = attend(k[seen], v[seen], seen, q[token], token, Call())
        np.testing.assert_allclose(step.out[token - 6], plain.out)
    assert step.position.tolist() == list(range(2, 10))
    assert head.position.tolist() == [6, 7, 8, 9]


def test_an_evicted_token_comes_back_with_nothing() -> None:
    """A slot's history begins with its own token: what an earlier one gave the same place is forgotten."""
    for policy in (H2O, add_columns(H2O)):
        interpreter, head = start(policy, budget=1)
        for _ in range(4):
            step = interpreter.observe_row(head, [0.25] * head.live + [0.75])
            assert step.score[-1] == 0.75


# -- rows that floats hold exactly -----------------------------------------------------------------------------------


def test_tova_by_rows() -> None:
    policy = bounded(queries("last", ATTN), budget=2)
    assert rows(policy, [1], [0.5, 0.5], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]) == [[], [], [0], [2]]


def test_h2o_by_rows() -> None:
    policy = bounded(queries("sum", ATTN), last(1), budget=2)
    assert rows(policy, [1], [0.25, 0.75], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]) == [[], [], [1], [2]]


def test_ties_keep_the_newer() -> None:
    policy = bounded(num(1), budget=2)
    assert rows(policy, [1], [0.5, 0.5], [0.5, 0.25, 0.25], [1, 0, 0]) == [[], [], [0], [1]]


def test_a_nan_row_leaves_first() -> None:
    policy = bounded(queries("sum", ATTN), budget=2)
    assert rows(policy, [1], [0.25, 0.75], [0.5, np.nan, 0.5])[-1] == [1]


def test_a_prompt_by_rows() -> None:
    interpreter, head = start(bounded(queries("mean", ATTN), budget=2))
    step = interpreter.observe_rows(head, [[1, 9, 9], [0.5, 0.5, 9], [0.25, 0.25, 0.5]])
    assert step.score.tolist() == [1.75 / 3, 0.375, 0.5]
    assert step.evicted.tolist() == [1]


def test_values_may_come_with_a_row() -> None:
    interpreter, head = start(bounded(binary(queries("sum", ATTN), "*", NORM1_V), budget=9))
    interpreter.observe_row(head, [1], v=[1, -1, 0, 0])
    assert interpreter.observe_row(head, [0.5, 0.5], v=[4, 0, 0, 0]).score.tolist() == [3, 2]


# -- keeps -----------------------------------------------------------------------------------------------------------


def test_protected_is_the_union() -> None:
    by_attention = top(1, queries("last", ATTN))
    policy = bounded(POSITION, first(1), last(1), by_attention, where(binary(POSITION, "==", num(2))), budget=4)
    interpreter, head = start(policy)
    step = interpreter.observe_rows(head, np.array([[0.125, 0.25, 0.125, 0.125, 0.25, 0.125]] * 6))
    assert step.protected.tolist() == [True, False, True, False, True, True]
    assert step.evicted.tolist() == [1, 3]
    assert [by is None for by in step.by] == [True, True, False, False]


@pytest.mark.parametrize(("budget", "left"), [(3, [1, 0]), (1, [1, 0, 2, 3]), (2, [1, 0, 2])])
def test_everything_protected(budget: int, left: list[int]) -> None:
    policy = bounded(queries("last", ATTN), where(num(1)), budget=budget)
    interpreter, head = start(policy)
    step = interpreter.observe_rows(head, np.array([[0.25, 0.125, 0.375, 0.5, 0.0]] * 5))
    assert step.evicted.tolist() == left
    assert head.position[-1] == 4


def test_keeps_may_read_what_the_head_holds() -> None:
    policy = bounded(POSITION, last(binary(read("live"), "/", num(2))), first(binary(read("budget"), "-", num(3))), budget=4)
    interpreter, head = start(policy)
    step = interpreter.observe_rows(head, np.ones((7, 7)))
    assert step.protected.tolist() == [True, False, False, False, True, True, True]


# -- corners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_one_token(name: str) -> None:
    q, k, v = trace(1)
    interpreter, head = start(ALL[name])
    step = interpreter.decode(head, q[0], k[0], v[0])
    np.testing.assert_allclose(step.out, np.broadcast_to(v[0], (GROUP, DIM)))
    assert step.attn.tolist() == [1]
    assert step.evicted.size == 0


@pytest.mark.parametrize("name", [name for name in ALL if name != "full"])
def test_budget_one_keeps_one(name: str) -> None:
    q, k, v = trace(6)
    interpreter, head = start(ALL[name], budget=1)
    for token in range(6):
        interpreter.decode(head, q[token], k[token], v[token])
        assert head.live == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("as_columns", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_bad_numbers_neither_raise_nor_warn(name: str, as_columns: bool, bad: float) -> None:
    q, k, v = trace(12)
    k[3], v[5], q[7] = bad, bad, bad
    interpreter, head = start(
        add_columns(ALL[name]) if as_columns else ALL[name], **({} if name == "full" else {"budget": 4})
    )
    with np.errstate(all="raise"):
        interpreter.prefill(head, q[:6], k[:6], v[:6])
        for token in range(6, 12):
            interpreter.decode(head, q[token], k[token], v[token])
    assert head.live == (12 if name == "full" else 4)


def test_lazy_pruning_waits_for_its_trigger() -> None:
    policy = bounded(POSITION, budget=4, trigger=num(3), slack=num(1), max_drop=num(1))
    interpreter, head = start(policy)
    sizes = []
    for _ in range(12):
        interpreter.observe_row(head, np.ones(head.live + 1))
        sizes.append(head.live)
    assert sizes == [1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 5, 6]
    never, head = start(with_policy(policy, trigger=num(0)))
    assert never.observe_rows(head, np.ones((9, 9))).victims.size == 0


# -- what inputs mean ------------------------------------------------------------------------------------------------


def score_of(body: Expr, tokens: int = 5, call: Call | None = None, **more: object) -> Step:
    policy = bounded(body, budget=100, **more)
    q, k, v = trace(tokens)
    interpreter, head = start(policy, call)
    return interpreter.prefill(head, q, k, v)


def test_inputs_in_a_settle() -> None:
    assert score_of(read("age")).score.tolist() == [4, 3, 2, 1, 0]
    assert score_of(read("live")).score.tolist() == [5] * 5
    assert score_of(read("observed")).score.tolist() == [5, 4, 3, 2, 1]
    assert score_of(read("observed"), call=Call(window=2)).score.tolist() == [2, 2, 2, 2, 1]
    assert score_of(read("budget")).score.tolist() == [100] * 5


def test_inputs_at_a_query() -> None:
    assert score_of(queries("sum", read("age"))).score.tolist() == [10, 6, 3, 1, 0]
    assert score_of(queries("max", read("live"))).score.tolist() == [5] * 5
    assert score_of(queries("min", read("live"))).score.tolist() == [1, 2, 3, 4, 5]
    in_sight = queries("last", over("sum", "slot", num(1)))
    assert score_of(in_sight, call=Call(window=2)).score.tolist() == [2] * 5
    assert len(set(score_of(queries("max", Random())).score)) == 5


def test_the_group_is_reduced_at_the_leaf() -> None:
    q, k, _ = trace(5)
    logits = np.einsum("lgd,sd->gls", q, k)
    weights = np.exp(logits) * np.tri(5)
    probs = weights / weights.sum(axis=-1, keepdims=True)
    for group, reduced in {"mean": probs.mean(axis=0), "max": probs.max(axis=0), "sum": probs.sum(axis=0)}.items():
        squares = score_of(queries("sum", binary(ATTN, "*", ATTN)), group=group).score
        np.testing.assert_allclose(squares, (reduced**2).sum(axis=0))
    np.testing.assert_allclose(score_of(queries("last", LOGIT)).score, logits.mean(axis=0)[-1])


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_what_reads_q_is_reduced_over_the_group(group: str) -> None:
    q, k, _ = trace(5)
    dots = np.abs(np.einsum("lgd,sd->lgs", q, k))
    per_query = getattr(dots, group)(axis=1)
    body = over("sum", "dim", binary(Q, "*", K))
    score = score_of(
        queries("last", binary(body, "*", binary(num(1), "-", binary(num(2), "*", binary(body, "<", num(0)))))), group=group
    )
    np.testing.assert_allclose(score.score, per_query[-1])
    once = score_of(queries("last", binary(queries("max", body), "+", num(1))), group=group).score
    highest = getattr(np.einsum("lgd,sd->lgs", q, k), group)(axis=1)
    np.testing.assert_allclose(once, [highest[s:, s].max() + 1 for s in range(5)])


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "roco", "vatp", "tova", "scissorhands"])
def test_resuming_from_a_backends_slots(name: str) -> None:
    """Any order of slots, with free ones between, gives what the head itself gives."""
    policy = add_columns(ALL[name])
    q, k, v = trace(20)
    interpreter, head = start(policy, budget=6)
    interpreter.prefill(head, q[:10], k[:10], v[:10])
    order = np.array([4, -1, 0, 5, 2, -1, 1, 3])
    resumed = interpreter.resume(
        head.key[order],
        head.value[order],
        np.where(order < 0, -1, head.position[order]),
        {name: column[order] for name, column in head.columns.items()},
        head.seen,
    )
    for token in range(10, 20):
        one, other = (interpreter.decode(state, q[token], k[token], v[token]) for state in (head, resumed))
        np.testing.assert_allclose(one.out, other.out)
        assert one.evicted.tolist() == other.evicted.tolist()
        by_position = np.argsort(other.position)
        np.testing.assert_allclose(one.score, other.score[by_position])
        for column, values in one.columns.items():
            np.testing.assert_allclose(values, other.columns[column][by_position])


@pytest.mark.parametrize("policy", [ROCO, add_columns(ROCO)], ids=["history", "columns"])
def test_a_clone_is_independent(policy: Policy) -> None:
    q, k, v = trace(12)
    interpreter, head = start(policy, budget=5)
    interpreter.prefill(head, q[:8], k[:8], v[:8])
    copy = head.clone()
    steps = [[interpreter.decode(state, q[t], k[t], v[t]) for t in range(8, 12)] for state in (copy, head)]
    for one, other in zip(*steps, strict=True):
        assert one.score.tolist() == other.score.tolist()
        assert one.evicted.tolist() == other.evicted.tolist()


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_a_settle_leaves_what_was_asked_for(budget: int, trigger: int, prompt: int, seed: int) -> None:
    policy = bounded(Random(), last(1), trigger=num(trigger))
    interpreter = Interpreter(policy, resolve(policy, {"budget": budget}), seed=seed)
    head = interpreter.empty()
    if prompt:
        interpreter.observe_rows(head, np.ones((prompt, prompt)))
    for _ in range(12):
        step = interpreter.observe_row(head, np.ones(head.live + 1))
        assert len(step.position) <= max(budget + trigger, prompt + 1)
        assert head.live < budget + trigger
        assert step.kept.tolist() == head.position.tolist()
        assert step.kept[-1] == head.seen - 1


def test_the_two_memories_refuse_each_others_leaves() -> None:
    column = add_columns(H2O).score
    with pytest.raises(LookupError, match="no column `sum_attn`"):
        rows(with_policy(H2O, score=column), [1.0])
    unlowered = with_policy(add_columns(H2O), score=Reduce(op="sum", axis=Axis.QUERY, body=ATTN))
    with pytest.raises(LookupError, match="not made a column"):
        rows(unlowered, [1.0])


def test_numbers_default_to_eager_eviction() -> None:
    assert Numbers({}, 4).trigger == 1


def test_the_interpreter_needs_no_torch() -> None:
    program = "import sys, kvdsl.interp; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
