"""Who leaves: the pure functions of a settle, on rows that floats hold exactly, and in every corner."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdsl.interp import Numbers, overflow, victims
from kvdsl.interp.settle import ascending, first, last, top

NAN, INF = math.nan, math.inf


def leaving(score: list[float], k: int, protected: tuple[int, ...] = (), position: list[int] | None = None) -> list[int]:
    place = np.arange(len(score)) if position is None else np.array(position)
    mask = np.isin(np.arange(len(score)), protected)
    return victims(np.array(score), mask, place, k).tolist()


@pytest.mark.parametrize(
    ("score", "k", "protected", "expected"),
    [
        ([3, 1, 2], 1, (), [1]),
        ([3, 1, 2], 2, (), [1, 2]),
        ([3, 1, 2], 0, (), []),
        ([1, 1, 1], 2, (), [0, 1]),  # ties: the older leaves first
        ([0.0, -0.0, 0.0], 1, (), [0]),  # -0 equals +0
        ([-0.0, 0.0, 1.0], 1, (), [0]),
        ([1, NAN, -INF], 2, (), [1, 2]),  # NaN is below -inf
        ([1, NAN, NAN], 1, (), [1]),
        ([INF, INF, 5], 2, (), [2, 0]),
        ([0, 1, 2], 1, (0,), [1]),
        ([NAN, 1, 2], 1, (0,), [1]),  # protection is stronger than NaN
        ([0, 1, 2], 2, (0, 1), [2, 0]),  # all candidates, then the lowest protected
        ([2, 1, 0], 2, (0, 1, 2), [1, 0]),  # the newest last of all, even with the lowest score
        ([2, 1, 0], 3, (0, 1, 2), [1, 0, 2]),
        ([2, 1, 0], 1, (0, 1), [2]),  # the newest has no privilege of its own
        ([7], 1, (0,), [0]),
        ([7], 1, (), [0]),
    ],
)
def test_victims(score: list[float], k: int, protected: tuple[int, ...], expected: list[int]) -> None:
    assert leaving(score, k, protected) == expected


def test_the_order_of_slots_means_nothing() -> None:
    assert leaving([1, 1, 1, 0], 2, position=[5, 2, 9, 7]) == [3, 1]
    assert leaving([1, 1, 1, 1], 3, (0, 1, 2, 3), position=[5, 2, 9, 7]) == [1, 0, 3]


@given(st.data(), st.integers(1, 12))
def test_victims_are_the_lowest(data: st.DataObject, n: int) -> None:
    values = st.sampled_from([NAN, -INF, -1.0, -0.0, 0.0, 0.5, 1.0, INF])
    score = np.array(data.draw(st.lists(values, min_size=n, max_size=n)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    position = np.array(data.draw(st.permutations(range(3, 3 + n))))
    k = data.draw(st.integers(0, n))
    gone = victims(score, mask, position, k).tolist()
    assert len(set(gone)) == len(gone) == k

    def leaves_before(a: int, b: int) -> bool:
        """The rules one by one."""
        newest = position.argmax()
        if mask[a] != mask[b]:
            return bool(mask[b])
        if mask[a] and newest in (a, b):
            return bool(b == newest)
        if math.isnan(score[a]) != math.isnan(score[b]):
            return math.isnan(score[a])
        if math.isnan(score[a]) or score[a] == score[b]:
            return bool(position[a] < position[b])
        return bool(score[a] < score[b])

    assert all(leaves_before(a, b) for a, b in pairwise(gone))
    assert all(leaves_before(a, b) for a in gone for b in range(n) if b not in gone)


def test_ascending_is_stable_in_text_order() -> None:
    x = np.array([1.0, NAN, 1.0, NAN, -INF])
    assert ascending(x, np.array([4, 3, 2, 1, 0])).tolist() == [3, 1, 4, 2, 0]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, 0), (-3, 0), (1, 1), (1.99, 1), (2, 2), (9, 4), (INF, 4), (-INF, 0), (NAN, 0), (0.5, 0)],
)
def test_counts_are_floored_and_clipped(count: float, expected: int) -> None:
    position, by = np.array([7, 1, 4, 9]), np.array([0.0, 2.0, 1.0, 2.0])
    assert first(position, count).tolist() == np.isin(position, [1, 4, 7, 9][:expected]).tolist()
    assert last(position, count).tolist() == np.isin(position, [9, 7, 4, 1][:expected]).tolist()
    assert top(by, position, count).tolist() == np.isin(position, [9, 1, 4, 7][:expected]).tolist()


def test_top_ranks_nan_lowest() -> None:
    by = np.array([NAN, -INF, NAN, 0.0])
    assert top(by, np.arange(4), 2).tolist() == [False, True, False, True]
    assert top(by, np.arange(4), 3).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("live", "numbers", "expected"),
    [
        (8, {"budget": 8}, 0),
        (9, {"budget": 8}, 1),
        (40, {"budget": 8}, 32),
        (3, {"budget": 8}, 0),
        (40, {"budget": INF}, 0),
        (40, {"budget": 8, "trigger": 0}, 0),
        (11, {"budget": 8, "trigger": 4}, 0),
        (12, {"budget": 8, "trigger": 4}, 4),
        (12, {"budget": 8, "slack": 2}, 4),  # slack without max_drop does nothing
        (12, {"budget": 8, "trigger": 4, "max_drop": 3}, 4),  # no slack: down to C
        (12, {"budget": 8, "trigger": 4, "slack": 2, "max_drop": 3}, 3),
        (12, {"budget": 8, "trigger": 4, "slack": 2, "max_drop": 1}, 2),  # never above C + slack
        (12, {"budget": 8, "trigger": 4, "slack": 2, "max_drop": 9}, 4),  # never below C
    ],
)
def test_overflow(live: int, numbers: dict[str, float], expected: int) -> None:
    assert overflow(live, Numbers(params={}, **numbers)) == expected


def test_lazy_pruning_drops_its_steady_state() -> None:
    """design: with max_drop d the steady state drops max(min(d, R), R - slack) tokens at a time."""
    for trigger, slack, drop in [(4, 2, 1), (4, 2, 3), (32, 24, 8), (32, 16, 8), (5, 9, 2)]:
        numbers = Numbers(params={}, budget=10, trigger=trigger, slack=slack, max_drop=drop)
        live, dropped = 0, []
        for _ in range(500):
            live += 1
            k = overflow(live, numbers)
            live -= k
            dropped += [k] if k else []
        assert dropped[-1] == max(min(drop, trigger), trigger - slack)
