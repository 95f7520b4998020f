"""Which slots, pages and dims are the highest: ties, NaN, protected slots and holes. Queries select in `tests.differential`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdsl.interp.attention import selected, sketch_dims

NAN = math.nan


def chosen(by: list[float], count: float, protected: tuple[int, ...] = (), page: float = 1, place: list[int] | None = None):
    position = np.arange(len(by)) if place is None else np.array(place)
    mask = np.isin(np.arange(len(by)), protected)
    return np.flatnonzero(selected(np.array(by, dtype=float), position, mask, count, page)).tolist()


@pytest.mark.parametrize(
    ("by", "count", "protected", "expected"),
    [
        ([3, 1, 2], 2, (), [0, 2]),
        ([3, 1, 2], 1, (), [0]),
        ([3, 1, 2], 0, (), [0]),  # one at least
        ([3, 1, 2], 1.9, (), [0]),
        ([3, 1, 2], 3, (), [0, 1, 2]),
        ([3, 1, 2], math.inf, (), [0, 1, 2]),
        ([1, 1, 1], 2, (), [1, 2]),  # ties: the newer
        ([0.0, -0.0], 1, (), [1]),
        ([-0.0, 0.0], 1, (), [1]),
        ([NAN, -math.inf, NAN], 1, (), [1]),  # NaN is lowest
        ([NAN, -math.inf, NAN], 2, (), [1, 2]),
        ([3, 1, 2], 2, (1,), [0, 1]),  # the protected count
        ([3, 1, 2], 1, (1,), [1]),
        ([3, 1, 2], 1, (1, 2), [1, 2]),  # and are selected in any case
        ([NAN, 1, 2], 2, (0,), [0, 2]),
    ],
)
def test_who_is_selected(by: list[float], count: float, protected: tuple[int, ...], expected: list[int]) -> None:
    assert chosen(by, count, protected) == expected


def test_the_newer_is_the_later_in_the_text() -> None:
    assert chosen([1, 1, 1], 2, place=[7, 1, 3]) == [0, 2]


@pytest.mark.parametrize(
    ("by", "count", "protected", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 3, (), [4, 5]),  # pages of two; three tokens are one page
        ([1, 2, 3, 4, 5, 6], 4, (), [2, 3, 4, 5]),
        ([9, 2, 3, 4, 5, 6], 2, (), [0, 1]),  # a page ranks by its best
        ([9, 2, 3, 4, 5, 6], 1, (), [0, 1]),
        ([9, NAN, 3, 4, 5, 6], 2, (), [0, 1]),  # a NaN does not spoil its page
        ([NAN, NAN, 3, -9, NAN, NAN], 4, (), [2, 3, 4, 5]),
        ([7, 7, 7, 7, 7, 7], 2, (), [4, 5]),  # of equals the higher page
        ([9, 2, 3, 4, 5, 6], 2, (3,), [2, 3]),
        ([9, 2, 3, 4, 5, 6], 4, (3,), [0, 1, 2, 3]),
        ([9, 2, 3, 4, 5, 6], 2, (1, 4), [0, 1, 4, 5]),
        ([9, 2, 3, 4, 5, 6], 99, (), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_pages_are_selected_whole(by: list[float], count: float, protected: tuple[int, ...], expected: list[int]) -> None:
    assert chosen(by, count, protected, page=2) == expected


def test_pages_with_holes() -> None:
    """Pages of 4 go by the text's positions: slots at 0, 3 | 4 | 11 | 13, 14; the last page is not full."""
    place = [13, 0, 3, 4, 11, 14]
    assert chosen([1, 2, 3, 4, 5, 0], 4, page=4, place=place) == [4]
    assert chosen([1, 2, 3, 4, 5, 0], 8, page=4, place=place) == [3, 4]
    assert chosen([6, 2, 3, 4, 5, 0], 8, page=4, place=place) == [0, 4, 5]
    assert chosen([1, 2, 3, 4, 5, 0], 4, (5,), page=4, place=place) == [0, 5]


def test_the_dims_of_a_sketch() -> None:
    assert sketch_dims(np.array([1.0, 5, 3, 5]), 2).tolist() == [1, 3]
    assert sketch_dims(np.array([5.0, 5, 5, 5]), 2).tolist() == [0, 1]  # of equals the lower
    assert sketch_dims(np.array([0.0, -0.0]), 1).tolist() == [0]
    assert sketch_dims(np.array([NAN, -math.inf, NAN]), 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a sketch of 5 dims of keys that have 4"):
        sketch_dims(np.zeros(4), 5)
