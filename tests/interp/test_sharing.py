"""Heads that decide together: victims shared by heads and layers, and a budget across heads, by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdsl.interp import Call, Interpreter, Layer, Numbers, resolve
from kvdsl.interp.settle import victims_across
from kvdsl.ir.nodes import LayerRange, Policy
from kvdsl.passes.columns import add_columns

from .policies import ATTN, POSITION, K, Random, binary, bounded, last, num, over, pool, queries, recent, select, top, where

HEADS, GROUP, DIM = 3, 2, 4
SUM, LAST = queries("sum", ATTN), queries("last", ATTN)
NAN = math.nan


def trace(tokens: int, heads: int = HEADS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(heads, tokens, GROUP, DIM)), *random.normal(size=(2, heads, tokens, DIM))


def probabilities(q: np.ndarray, k: np.ndarray, token: int, kept: list[int]) -> np.ndarray:
    """Of each head, the mean over its group: [H, len(kept)]."""
    weights = np.exp(np.einsum("hgd,hsd->hgs", q[:, token], k[:, kept]))
    return (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1)


# -- each by itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [bounded(SUM, last(2), budget=5), bounded(Random(), budget=5, cap="hard")], ids=["h2o", "random"]
)
def test_independent_heads_are_those_of_the_interpreter(form, policy: Policy) -> None:
    policy = form(policy)
    q, k, v = trace(16)
    calls = [Call(sinks=np.full(GROUP, float(head))) for head in range(HEADS)]
    numbers = resolve(policy, prompt=9, layer=2, layers=4)
    layer = Layer(policy, numbers, calls, heads=HEADS, head_offset=6, seed=11)
    heads = layer.empty(DIM, DIM)
    machines = [Interpreter(policy, numbers, calls[head], head_index=6 + head, seed=11) for head in range(HEADS)]
    alone = [machine.empty(DIM, DIM) for machine in machines]
    for token in range(8, 16):
        if token == 8:
            steps = layer.prefill(heads, q[:, :9], k[:, :9], v[:, :9])
            expected = [machines[h].prefill(alone[h], q[h, :9], k[h, :9], v[h, :9]) for h in range(HEADS)]
        else:
            steps = layer.decode(heads, q[:, token], k[:, token], v[:, token])
            expected = [machines[h].decode(alone[h], q[h, token], k[h, token], v[h, token]) for h in range(HEADS)]
        for one, other in zip(steps, expected, strict=True):
            assert (one.out == other.out).all()
            assert one.evicted.tolist() == other.evicted.tolist()
            assert one.score.tolist() == other.score.tolist()
    assert len({tuple(head.position) for head in heads}) > 1


# -- victims shared by heads -----------------------------------------------------------------------------------------


def test_the_heads_mean_decides(form) -> None:
    """H2O whose heads agree: the lowest mean of the heads' sums leaves all of them."""
    layer = Layer(form(bounded(SUM, last(2), budget=5, victims="heads")), resolve(bounded(SUM, budget=5)), heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(20)
    kept: list[int] = []
    total: dict[int, np.ndarray] = {}
    for token in range(20):
        kept.append(token)
        total[token] = np.zeros(HEADS)
        for slot, x in zip(kept, probabilities(q, k, token, kept).T, strict=True):
            total[slot] += x
        if token == 6:
            layer.prefill(heads, q[:, :7], k[:, :7], v[:, :7])
        elif token > 6:
            layer.decode(heads, q[:, token], k[:, token], v[:, token])
        if token >= 6 and len(kept) > 5:
            gone = sorted(kept[:-2], key=lambda slot: (total[slot].mean(), slot))[: len(kept) - 5]
            kept = [slot for slot in kept if slot not in gone]
        if token >= 6:
            assert [head.position.tolist() for head in heads] == [kept] * HEADS


def rows(*given: list[float]) -> list[np.ndarray]:
    """Per head a prompt whose last query gives this row."""
    return [np.tile(row, (len(row), 1)) for row in given]


def test_a_nan_of_one_head_is_everybodys(form) -> None:
    layer = Layer(form(bounded(LAST, budget=3, victims="heads")), resolve(bounded(LAST, budget=3)), heads=2)
    steps = layer.observe_rows(layer.empty(), rows([1, 2, 3, 4], [1, 2, NAN, 4]))
    assert [step.evicted.tolist() for step in steps] == [[2], [2]]
    assert [step.score.tolist()[3] for step in steps] == [4, 4]


def test_protection_is_shared(form) -> None:
    """`keep top` ranks by the mean, `keep where` holds if it holds for any head."""
    policy = form(bounded(POSITION, top(1, LAST), where(binary(LAST, ">", num(7))), budget=2, victims="heads"))
    layer = Layer(policy, resolve(policy), heads=2)
    steps = layer.observe_rows(layer.empty(), rows([0, 7, 6, 0, 0], [0, 3, 0, 8, 0]))
    for step in steps:
        assert step.protected.tolist() == [False, True, False, True, False]
        assert step.by[0].tolist() == [0, 5, 3, 4, 0]
        assert step.by[1].tolist() == [0, 0, 0, 1, 0]
        assert step.evicted.tolist() == [0, 2, 4]


def test_pools_of_heads_that_agree_run_along_the_shared_unprotected_slots(form) -> None:
    policy = form(bounded(pool("max", LAST, 3), where(binary(LAST, ">", num(8))), budget=9, victims="heads"))
    layer = Layer(policy, resolve(policy), heads=2)
    steps = layer.observe_rows(layer.empty(), rows([1, 2, 9, 4, 0], [1, 2, 3, 4, 0]))
    pooled = [[2, 4, 9, 4, 4], [2, 4, 3, 4, 4]]
    for step in steps:
        assert step.score.tolist() == np.mean(pooled, axis=0).tolist()


def test_room_is_made_together(form) -> None:
    policy = form(bounded(LAST, budget=2, victims="heads", cap="hard"))
    layer = Layer(policy, resolve(policy), heads=2)
    heads = layer.empty()
    layer.observe_rows(heads, rows([5, 6], [4, 1]))
    steps = layer.observe_row(heads, [[1, 1, 1], [1, 1, 1]])
    assert [step.evicted.tolist() for step in steps] == [[1], [1]]
    assert [head.position.tolist() for head in heads] == [[0, 2], [0, 2]]


def test_slots_may_lie_in_other_orders(form) -> None:
    policy = add_columns(bounded(LAST, budget=3, victims="heads"))
    layer = Layer(policy, resolve(policy), heads=2)
    orders = [[0, 1, 2], [2, 0, 1]]
    heads = [
        machine.resume(np.zeros((3, 0)), np.zeros((3, 0)), order, {"last_attn": np.zeros(3)}, 3)
        for machine, order in zip(layer.machines, orders, strict=True)
    ]
    steps = layer.observe_row(heads, [[5, 1, 3, 9], [2, 4, 4, 9]])  # the other's by position: 4, 4, 2
    assert [step.score.tolist() for step in steps] == [[4.5, 2.5, 2.5, 9], [2.5, 4.5, 2.5, 9]]
    assert [step.evicted.tolist() for step in steps] == [[1], [1]]


def test_selection_stays_each_heads_own() -> None:
    policy = bounded(SUM, last(1), budget=9, victims="heads", select=select(3, over("sum", "dim", K)))
    layer = Layer(policy, resolve(policy), heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(8)
    for token in range(8):
        steps = layer.decode(heads, q[:, token], k[:, token], v[:, token])
    for head, step in enumerate(steps):
        best = sorted(range(7), key=lambda slot: k[head, slot].sum())[-2:]
        assert np.flatnonzero(step.selected).tolist() == sorted([*best, 7])


# -- victims shared by layers ----------------------------------------------------------------------------------------


def test_all_layers_agree(form) -> None:
    """Two layers of three heads, one lockstep; a layer outside of `layers` keeps everything and has no say."""
    policy = form(bounded(SUM, last(2), budget=5, victims="layers", layers=LayerRange(low=num(1))))
    numbers = [resolve(policy, layer=index, layers=3) for index in range(3)]
    layer = Layer(policy, numbers, heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(16, heads=3 * HEADS)
    kept: list[int] = []
    total: dict[int, np.ndarray] = {}
    for token in range(16):
        kept.append(token)
        total[token] = np.zeros(2 * HEADS)
        for slot, x in zip(kept, probabilities(q[HEADS:], k[HEADS:], token, kept).T, strict=True):
            total[slot] += x
        layer.decode(heads, q[:, token], k[:, token], v[:, token])
        if len(kept) > 5:
            kept.remove(min(kept[:-2], key=lambda slot: (total[slot].mean(), slot)))
        assert [head.position.tolist() for head in heads[HEADS:]] == [kept] * 2 * HEADS
        assert [head.position.tolist() for head in heads[:HEADS]] == [[*range(token + 1)]] * HEADS


def test_heads_of_several_layers_agree_by_layer(form) -> None:
    policy = form(bounded(LAST, budget=2, victims="heads"))
    layer = Layer(policy, [resolve(policy, layer=index, layers=2) for index in range(2)], heads=2)
    steps = layer.observe_rows(layer.empty(), rows([1, 5, 5], [6, 4, 1], [9, 1, 3], [9, 4, 3]))
    assert [step.score.tolist() for step in steps] == [[3.5, 4.5, 3]] * 2 + [[9, 2.5, 3]] * 2
    assert [step.evicted.tolist() for step in steps] == [[2], [2], [1], [1]]


# -- a budget across heads -------------------------------------------------------------------------------------------


def across(floor: float, budget: float = 4, **more: object) -> Policy:
    return bounded(SUM, last(1), budget=budget, across=num(floor), when="prefill", **more)


def brute(orders: list[list[tuple[int, float, int]]], excess: int, floor: int) -> list[list[int]]:
    """One slot after the other: the lowest of all heads that may still give one. An order is (class, score, position)."""
    left = [list(order) for order in orders]
    gone: list[list[int]] = [[] for _ in orders]
    for _ in range(excess):
        givers = [head for head, order in enumerate(left) if len(order) > floor]
        head = min(givers, key=lambda head: (*left[head][0], head))
        gone[head].append(left[head].pop(0)[2])
    return gone


@pytest.mark.parametrize("floor", [0, 0.2, 0.5, 0.74, 1])
@pytest.mark.parametrize("seed", range(3))
def test_heads_share_one_budget(form, seed: int, floor: float) -> None:
    policy = form(across(floor))
    numbers = resolve(policy)
    assert numbers.floor == int(floor * 4)
    layer = Layer(policy, numbers, heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(14, seed=seed)
    q[0] *= 5  # this head attends to few
    layer.prefill(heads, q[:, :10], k[:, :10], v[:, :10])
    total = np.zeros((HEADS, 10))
    for token in range(10):
        total[:, : token + 1] += probabilities(q, k, token, [*range(token + 1)])
    orders = [[*sorted([(0, total[h, s], s) for s in range(9)]), (2, total[h, 9], 9)] for h in range(HEADS)]
    gone = brute(orders, 10 * HEADS - 4 * HEADS, int(floor * 4))
    kept = [[slot for slot in range(10) if slot not in mine] for mine in gone]
    assert [head.position.tolist() for head in heads] == kept
    assert sum(map(len, kept)) == 4 * HEADS
    assert floor < 1 or [len(mine) for mine in kept] == [4] * HEADS
    for token in range(10, 14):
        layer.decode(heads, q[:, token], k[:, token], v[:, token])
    assert [head.position.tolist() for head in heads] == [[*mine, 10, 11, 12, 13] for mine in kept]


def test_each_forward_of_the_prompt_settles() -> None:
    policy = across(0)
    layer = Layer(policy, resolve(policy), heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(12)
    for begin in (0, 6):
        layer.prefill(heads, q[:, begin : begin + 6], k[:, begin : begin + 6], v[:, begin : begin + 6])
        assert sum(head.live for head in heads) == 4 * HEADS


def leaving(*heads: tuple[list[float], tuple[int, ...]], budget: float, floor: float = 0) -> list[list[int]]:
    given = [
        (np.array(score, dtype=float), np.isin(np.arange(len(score)), protected), np.arange(len(score)))
        for score, protected in heads
    ]
    return [gone.tolist() for gone in victims_across(given, [Numbers({}, budget, floor=floor)] * len(given))]


@pytest.mark.parametrize(
    ("heads", "budget", "floor", "expected"),
    [
        ([([1, 2, 3], ()), ([4, 5, 6], ())], 2, 0, [[0, 1], []]),
        ([([1, 2, 3], ()), ([4, 5, 6], ())], 2, 2, [[0], [0]]),
        ([([1, 2, 3], ()), ([4, 5, 6], ())], 1, 0, [[0, 1, 2], [0]]),
        ([([1, 1], ()), ([1, 1], ())], 1, 0, [[0], [0]]),  # ties: the older
        ([([1, 1, 1], ()), ([1, 1, 1], ())], 2.5, 0, [[0], []]),  # then the lower head
        ([([1, 2], ()), ([NAN, 3], ())], 1.5, 0, [[], [0]]),  # NaN first
        ([([-1, 2], ()), ([-2, NAN], ())], 1.5, 0, [[], [1]]),
        ([([1, 2, 0], (0, 1, 2)), ([7, 8, 9], ())], 2, 0, [[], [0, 1]]),  # the unprotected of any head
        ([([1, 2, 0], (0, 1, 2)), ([7, 8, 9], (0, 1))], 1, 0, [[0, 1], [2, 0]]),
        ([([1, 2, 0], (0, 1, 2)), ([7, 8, 0], (0, 1, 2))], 0.5, 0, [[0, 1, 2], [0, 1]]),  # the newest last of all
        ([([1, 2, 3], ()), ([4, 5, 6], ())], 3, 0, [[], []]),
        ([([1, 2, 3], ()), ([4, 5, 6], ())], math.inf, 0, [[], []]),
        ([([1], ()), ([4, 5, 6, 7], ())], 2, 1, [[], [0]]),
    ],
)
def test_who_leaves_of_all_heads(heads: list, budget: float, floor: float, expected: list[list[int]]) -> None:
    assert leaving(*heads, budget=budget, floor=floor) == expected


@pytest.mark.parametrize("floor", [0, 0.5])
def test_windows_across_heads(form, floor: float) -> None:
    """AdaKV's shape: a window's attention, pooled, and the window itself protected in every head."""
    policy = form(bounded(pool("max", recent("sum", ATTN, 3), 3), last(3), budget=5, across=num(floor), when="prefill"))
    layer = Layer(policy, resolve(policy), heads=HEADS)
    heads = layer.empty(DIM, DIM)
    q, k, v = trace(12)
    layer.prefill(heads, q, k, v)
    votes = np.zeros((HEADS, 12))
    for token in (9, 10, 11):
        votes[:, : token + 1] += probabilities(q, k, token, [*range(token + 1)])
    pooled = [[max(votes[h, max(0, s - 1) : min(9, s + 2)]) for s in range(9)] for h in range(HEADS)]
    orders = [[*sorted((0, pooled[h][s], s) for s in range(9)), (1, 0, 9), (1, 0, 10), (2, 0, 11)] for h in range(HEADS)]
    gone = brute(orders, 7 * HEADS, int(floor * 5))
    assert [head.position.tolist() for head in heads] == [[s for s in range(12) if s not in mine] for mine in gone]


def test_one_head_shares_with_itself() -> None:
    policy = across(0.5)
    interpreter = Interpreter(policy, resolve(policy))
    q, k, v = trace(9)
    head = interpreter.empty(DIM, DIM)
    step = interpreter.prefill(head, q[0], k[0], v[0])
    assert head.live == 4
    assert step.evicted.size == 5
