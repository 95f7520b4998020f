"""Pooling along the unprotected slots in the order of the text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdsl.interp import Head, Interpreter, resolve
from kvdsl.ir.nodes import Expr, Keep, Policy
from kvdsl.passes.columns import add_columns

from .policies import ATTN, POSITION, bounded, call, first, last, pool, queries, read, top, where

NAN = math.nan
LAST = queries("last", ATTN)


def scores(row: list[float], *keeps: Keep, op: str = "max", size: float = 3, body: Expr = LAST) -> list[float]:
    """The score of a prompt whose last query gives this row."""
    policy = bounded(pool(op, body, size), *keeps, budget=99)
    found = []
    for form in (policy, add_columns(policy)):
        interpreter, head = _start(form)
        found.append(interpreter.observe_rows(head, np.tile(row, (len(row), 1))).score.tolist())
    np.testing.assert_array_equal(*found)
    return found[0]


def _start(policy: Policy, **given: float) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy, given))
    return interpreter, interpreter.empty()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [0, 5, 1, 2, 8, 3]),
        (2, [5, 5, 5, 8, 8, 8]),  # an even size reaches as far as the next odd one
        (3, [5, 5, 5, 8, 8, 8]),
        (3.9, [5, 5, 5, 8, 8, 8]),
        (5, [5, 5, 8, 8, 8, 8]),
        (99, [8] * 6),
        (math.inf, [8] * 6),
        (0, [0, 5, 1, 2, 8, 3]),
        (-3, [0, 5, 1, 2, 8, 3]),
        (NAN, [0, 5, 1, 2, 8, 3]),
    ],
)
def test_the_largest_near(size: float, expected: list[float]) -> None:
    assert scores([0, 5, 1, 2, 8, 3], size=size) == expected


def test_the_mean_near() -> None:
    assert scores([0, 6, 3, 0, 9], op="mean") == [3, 3, 3, 4, 4.5]


def test_protected_slots_neither_give_nor_take() -> None:
    """Slots 1 and 2 are neighbours of 4 and 5, across the protected 3."""
    row = [9, 1, 2, 8, 4, 5, 7]
    assert scores(row, first(1), last(1), where(_is(3))) == [9, 2, 4, 8, 5, 5, 7]
    assert scores(row, first(1), last(1), where(_is(3)), op="mean") == [9, 1.5, 7 / 3, 8, 11 / 3, 4.5, 7]


def _is(position: float) -> Expr:
    from .policies import binary, num

    return binary(POSITION, "==", num(position))


def test_protection_by_rank_comes_before_the_score() -> None:
    assert scores([9, 1, 2, 8, 4, 5, 7], top(2, LAST)) == [9, 2, 4, 8, 5, 7, 7]


@pytest.mark.parametrize("op", ["max", "mean"])
def test_a_nan_spreads_to_its_neighbours(op: str) -> None:
    found = scores([1, NAN, 2, 3, 4], op=op)
    assert [math.isnan(x) for x in found] == [True, True, True, False, False]
    protected = scores([1, NAN, 2, 3, 4], where(_is(1)), op=op)
    assert [math.isnan(x) for x in protected] == [False, True, False, False, False]


def test_everything_protected_is_not_pooled() -> None:
    assert scores([3, 1, 2], last(9)) == [3, 1, 2]


def test_a_body_without_slots() -> None:
    assert scores([3, 1, 2], body=read("live")) == [3, 3, 3]


def test_neighbours_are_counted_among_the_survivors_in_text_order() -> None:
    """After tokens have left, and whatever order the slots lie in."""
    policy = add_columns(bounded(pool("max", call("neg", LAST), 3), budget=4))
    interpreter, head = _start(policy)
    head = interpreter.resume(np.zeros((4, 0)), np.zeros((4, 0)), [9, 2, 30, 5], {"last_attn": np.zeros(4)}, 31)
    step = interpreter.observe_row(head, [4, 1, 5, 3, 2])
    # In the text's order: position 2 gives -1, 5 gives -3, 9 gives -4, 30 gives -5, and 31 gives -2.
    assert step.position.tolist() == [9, 2, 30, 5, 31]
    assert step.score.tolist() == [-3, -1, -2, -1, -2]
    assert step.evicted.tolist() == [9]


def test_only_a_score_pools() -> None:
    interpreter, head = _start(bounded(POSITION, top(1, pool("max", POSITION, 3))))
    with pytest.raises(LookupError, match="only a score can pool"):
        interpreter.observe_row(head, [1])
