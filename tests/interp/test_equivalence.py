"""The two memories mean the same: a full history, and the state columns that a backend keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdsl.interp import Call, Interpreter, Rope, Step, resolve
from kvdsl.ir.nodes import Expr, Policy
from kvdsl.passes.columns import add_columns

from .policies import (
    ATTN,
    LOGIT,
    NORM1_V,
    POSITION,
    K,
    Q,
    V,
    binary,
    bounded,
    call,
    ema,
    first,
    last,
    num,
    over,
    over_page,
    over_sketch,
    pool,
    queries,
    read,
    recent,
    select,
    sketch,
    top,
    where,
)

DIM, VALUE_DIM = 3, 4

NUMBERS = st.sampled_from([0.0, 0.25, 1.0, 3.0]).map(num) | st.sampled_from(
    ["budget", "prompt", "layer", "layers", "live"]
).map(read)
SLOTS = st.sampled_from(
    [
        POSITION,
        read("age"),
        read("observed"),
        call("random"),
        NORM1_V,
        over("max", "dim", binary(K, "*", K)),
        over("mean", "dim", V),
    ]
)
PER_QUERY = st.sampled_from([ATTN, ATTN, LOGIT, call("exp", ATTN)])
DOT = over("sum", "dim", binary(Q, "*", K))
EXACT = ["max", "min", "last"]
"""The reductions over queries that round nothing, so that a condition may read them."""


def _smooth(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Arithmetic that turns small differences into small differences."""
    pairs = st.builds(binary, inner, st.sampled_from(["+", "-", "*"]), inner)
    extremes = st.builds(call, st.sampled_from(["min", "max"]), inner, inner)
    return pairs | extremes | st.builds(call, st.sampled_from(["neg", "abs"]), inner)


def _jumping(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    pairs = st.builds(binary, inner, st.sampled_from([">", "<=", "==", "!=", "and", "or"]), inner)
    return pairs | st.builds(lambda x: call("not", x), inner) | st.builds(call, st.just("where"), inner, inner, inner)


def _relative(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Over slots: how a slot compares with those that the query sees."""
    folds = st.sampled_from(["sum", "mean", "max", "min"])
    return st.builds(lambda op, body: over(op, "slot", body), folds, inner)


LEAVES = PER_QUERY | SLOTS | NUMBERS
BODIES = st.recursive(LEAVES, lambda inner: _smooth(inner) | _jumping(inner) | _relative(inner), max_leaves=4)
SIZES = st.sampled_from([1, 2, 3.5, 20])
EXACT_FOLDS = st.builds(queries, st.sampled_from(EXACT), BODIES)
EXACT_FOLDS |= st.builds(recent, st.sampled_from(["sum", "mean", "var", "std", "max", "min"]), BODIES, SIZES)
FOLDS = st.builds(queries, st.sampled_from(["sum", "mean", "var", "std", *EXACT]), BODIES)
FOLDS |= st.builds(queries, st.sampled_from(["sum", "mean", *EXACT]), st.just(DOT))
FOLDS |= st.builds(recent, st.sampled_from(["sum", "mean", "std", "max"]), BODIES, SIZES)
FOLDS |= st.builds(ema, BODIES, st.sampled_from([0, 0.5, 0.9]))
FOLDS |= st.builds(lambda running: queries("sum", binary(ATTN, ">", running)), EXACT_FOLDS)
FOLDS |= st.builds(lambda running: queries("mean", binary(LOGIT, "-", running)), FOLDS)
SCORES = st.recursive(FOLDS | FOLDS | SLOTS, lambda inner: _smooth(inner) | _relative(inner), max_leaves=4)
KEEPS = st.one_of(
    st.integers(0, 3).map(first),
    st.integers(0, 3).map(last),
    st.builds(top, st.integers(0, 3), SCORES),
    st.builds(lambda by: where(binary(by, ">", num(0.5))), EXACT_FOLDS),
)
EXACT_KEEPS = st.one_of(
    st.integers(0, 3).map(first),
    st.integers(0, 3).map(last),
    st.builds(top, st.integers(0, 3), EXACT_FOLDS),
    st.builds(lambda by: where(binary(by, ">", num(0.5))), EXACT_FOLDS),
)
POOLED = st.builds(pool, st.sampled_from(["max", "mean"]), SCORES, st.sampled_from([1, 3, 4, 99]))
MATCHES = st.sampled_from(
    [
        DOT,
        POSITION,
        call("random"),
        over_sketch("sum", binary(Q, "*", K)),
        binary(DOT, "-", over("max", "dim", over_page("max", K))),
    ]
)
CALLS = st.builds(
    Call,
    scaling=st.sampled_from([0.5, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, None, 1, 3]),
    rope=st.sampled_from([None, Rope(np.array([0.5])), Rope(np.array([0.7]), "interleaved", offset=1)]),
)


@st.composite
def random_policies(draw: st.DrawFn) -> Policy:
    selects = draw(st.booleans())
    return bounded(
        draw(SCORES | SCORES | POOLED),
        *draw(st.lists(EXACT_KEEPS if selects else KEEPS, max_size=2)),
        budget=draw(st.integers(1, 6)),
        group=draw(st.sampled_from(["mean", "max", "sum"])),
        trigger=num(draw(st.sampled_from([1, 1, 3, 0]))),
        slack=num(draw(st.sampled_from([0, 1]))),
        max_drop=num(draw(st.sampled_from([0, 0, 2]))),
        cap=draw(st.sampled_from(["soft", "soft", "hard"])),
        when=draw(st.sampled_from(["both", "both", "prefill", "decode"])),
        positions=draw(st.sampled_from(["original", "compact"])),
        prefill=draw(st.sampled_from(["whole", "blocks"])),
        prefill_block=num(draw(st.sampled_from([1, 2]))),
        pages=num(draw(st.sampled_from([1, 2, 3]))),
        sketch=sketch(draw(st.integers(1, DIM)), draw(st.sampled_from([Q, call("abs", Q)])), draw(st.integers(1, 4))),
        select=select(draw(st.integers(1, 6)), draw(MATCHES)) if selects else None,
    )


@pytest.mark.nightly
@settings(deadline=None, max_examples=75)
@given(random_policies(), CALLS, st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_history_and_columns_agree(policy: Policy, setting: Call, group: int, prompt: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    sinks = random.normal(size=group) if seed % 2 else None
    setting = replace(setting, sinks=sinks)
    numbers = resolve(policy, prompt=prompt, layer=1, layers=3)
    machines = [Interpreter(rule, numbers, setting, head_index=1, seed=seed) for rule in (policy, add_columns(policy))]
    heads = [machine.empty(DIM, VALUE_DIM) for machine in machines]
    for turn, length in enumerate((prompt, *[1] * 10)):
        if length == 0:
            continue
        q = random.normal(size=(length, group, DIM))
        k, v = random.normal(size=(length, DIM)), random.normal(size=(length, VALUE_DIM))
        if turn == 0:
            steps = [machine.prefill(head, q, k, v) for machine, head in zip(machines, heads, strict=True)]
        else:
            steps = [machine.decode(head, q[0], k[0], v[0]) for machine, head in zip(machines, heads, strict=True)]
        for one, other in zip(*([*step.earlier, step] for step in steps), strict=True):
            precision = 1e-6 * (1 + max((_largest(x) for x in other.columns.values()), default=0))
            _compare(one, other, precision)
            if one.victims.tolist() != other.victims.tolist():
                assert _nearly_tied(one, precision), (one, other)
                return
        np.testing.assert_array_equal(steps[0].out, steps[1].out)
        np.testing.assert_array_equal(*(step.selected for step in steps))
        assert heads[0].position.tolist() == heads[1].position.tolist() == steps[0].kept.tolist()


def _largest(x: np.ndarray) -> float:
    return float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0))


def _compare(one: Step, other: Step, precision: float) -> None:
    for x, y in zip((one.score, *one.by), (other.score, *other.by), strict=True):
        if x is not None:
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=precision)


def _nearly_tied(step: Step, precision: float) -> bool:
    """Whether two slots have nearly the same score, or nearly the same rank in a keep."""
    ranked = [np.sort(x) for x in (step.score, *step.by) if x is not None]
    return any((np.diff(x) <= precision + 1e-6 * np.abs(x[1:])).any() for x in ranked)


@pytest.mark.parametrize("op", ["var", "std"])
def test_deviation_of_what_reads_q(op: str) -> None:
    policy = bounded(queries(op, DOT), budget=100)
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(6, 2, DIM)), random.normal(size=(6, DIM)), random.normal(size=(6, DIM))
    numbers = resolve(policy)
    scores = []
    for rule in (policy, add_columns(policy)):
        interpreter = Interpreter(rule, numbers)
        scores.append(interpreter.prefill(interpreter.empty(DIM, DIM), q, k, v).score)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)
