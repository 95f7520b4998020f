"""Attention of one query: against torch-free formulas, with windows, caps and sinks, and where floats end."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Call, attend
from kvdsl.interp.attention import over_group

RANDOM = np.random.default_rng(3)
KEY, VALUE, QUERY = RANDOM.normal(size=(5, 4)), RANDOM.normal(size=(5, 3)), RANDOM.normal(size=(2, 4))
PLACES = np.array([4, 0, 3, 1, 2])


def test_softmax_over_the_slots() -> None:
    found = attend(KEY, VALUE, PLACES, QUERY, 4, Call(scaling=0.5))
    weights = np.exp(0.5 * QUERY @ KEY.T)
    probs = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.probs, probs)
    np.testing.assert_allclose(found.out, probs @ VALUE)
    np.testing.assert_allclose(found.logits, 0.5 * QUERY @ KEY.T)
    assert found.visible.all()


@pytest.mark.parametrize(
    ("newest", "window", "seen"), [(4, None, {0, 1, 2, 3, 4}), (2, None, {0, 1, 2}), (4, 2, {3, 4}), (4, 1, {4})]
)
def test_what_a_query_sees(newest: int, window: int | None, seen: set[int]) -> None:
    found = attend(KEY, VALUE, PLACES, QUERY, newest, Call(window=window))
    assert set(PLACES[found.visible].tolist()) == seen
    assert (found.probs[:, ~found.visible] == 0).all()
    assert (found.logits[:, ~found.visible] == -np.inf).all()
    np.testing.assert_allclose(found.probs.sum(axis=1), 1)


def test_free_slots_are_not_seen() -> None:
    places = np.array([4, -1, 3, -1, 2])
    alone = attend(KEY[places >= 0], VALUE[places >= 0], places[places >= 0], QUERY, 4, Call())
    np.testing.assert_allclose(attend(KEY, VALUE, places, QUERY, 4, Call()).out, alone.out)


def test_sinks_take_their_share() -> None:
    sinks = np.array([0.5, -3.0])
    found = attend(KEY, VALUE, PLACES, QUERY, 4, Call(sinks=sinks))
    weights = np.exp(QUERY @ KEY.T)
    np.testing.assert_allclose(found.probs, weights / (weights.sum(axis=1) + np.exp(sinks))[:, None])


def test_caps() -> None:
    found = attend(KEY, VALUE, PLACES, QUERY, 4, Call(scaling=3.0, softcap=2.0))
    np.testing.assert_allclose(found.logits, 2 * np.tanh(3 * QUERY @ KEY.T / 2))


def test_large_logits_do_not_overflow() -> None:
    found = attend(1e4 * KEY, VALUE, PLACES, QUERY, 4, Call())
    assert np.isfinite(found.out).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spreads_as_in_the_formula(bad: float) -> None:
    key = KEY.copy()
    key[2] = bad
    found = attend(key, VALUE, PLACES, np.abs(QUERY), 4, Call())
    assert np.isnan(found.probs[:, 2]).all()
    minus = attend(np.where(np.isfinite(key), key, -np.inf), VALUE, PLACES, np.abs(QUERY), 4, Call())
    assert (minus.probs[:, 2] == 0).all()
    np.testing.assert_allclose(minus.probs.sum(axis=1), 1)


def test_the_group() -> None:
    x = np.array([[1.0, 2.0], [3.0, -4.0]])
    assert over_group(x, "mean").tolist() == [2, -1]
    assert over_group(x, "max").tolist() == [3, 2]
    assert over_group(x, "sum").tolist() == [4, -2]
