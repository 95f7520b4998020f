"""The playground's stand-in for NumPy, against NumPy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "playground"))

import plain_numpy as plain

SHAPES = [(3, 4), (3, 1), (1, 4), (1, 1), (4,), (3, 4)]

shapes = st.sampled_from(SHAPES)
awkward = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 3.0, 1e200, -1e200, 800.0, math.inf, -math.inf, math.nan])
plainly = st.integers(-40, 40).map(lambda x: x / 4)


@st.composite
def arrays(draw: Any, shapes: Any = shapes, numbers: Any = awkward) -> np.ndarray:
    shape = draw(shapes)
    size = math.prod(shape)
    return np.array(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(shape)


def ours(x: Any) -> Any:
    """What the stand-in has for what NumPy has."""
    if isinstance(x, np.generic):
        return x.item()
    return plain.array(x.tolist(), plain_kind(x)).reshape(*x.shape) if isinstance(x, np.ndarray) else x


def plain_kind(x: np.ndarray) -> type:
    return {"f": float, "i": int, "b": bool}[x.dtype.kind]


def same(found: Any, expected: Any, rtol: float = 1e-14) -> None:
    """Equal in shape, kind and numbers; sums may differ in the last bits."""
    expected = np.asarray(expected)
    if not expected.shape:
        assert not isinstance(found, plain.ndarray)
        found = plain.array([found])
        expected = expected[None]
    assert found.shape == expected.shape
    assert found.kind is plain_kind(expected)
    np.testing.assert_allclose(found.tolist(), expected.tolist(), rtol=rtol, atol=1e-300)


PAIRS = ["add", "subtract", "multiply", "divide", "mod", "power", "minimum", "maximum"]
SINGLES = [
    "negative",
    "abs",
    "sqrt",
    "exp",
    "log",
    "arccos",
    "tanh",
    "cos",
    "sin",
    "floor",
    "ceil",
    "isnan",
    "isinf",
    "isfinite",
]
REDUCTIONS = ["sum", "mean", "var", "std", "max", "min", "median"]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=30)
@given(a=arrays(), b=arrays())
@np.errstate(all="ignore")
def test_functions_of_two(name: str, a: np.ndarray, b: np.ndarray) -> None:
    if name == "power":  # of -inf NumPy itself makes NaN on machines with AVX-512, and what C says, inf, on others
        a = np.where(np.isneginf(a), -1.0, a)
    same(getattr(plain, name)(ours(a), ours(b)), getattr(np, name)(a, b))


@pytest.mark.parametrize("name", SINGLES)
@settings(max_examples=30)
@given(a=arrays())
@np.errstate(all="ignore")
def test_functions_of_one(name: str, a: np.ndarray) -> None:
    same(getattr(plain, name)(ours(a)), getattr(np, name)(a))


@settings(max_examples=30)
@given(a=arrays(), b=arrays(), c=arrays())
@np.errstate(all="ignore")
def test_operators(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    x, y = ours(a), ours(b)
    for one, two in ((a, b), (a, 2.0), (2.0, a), (a, 1.5)):
        first, second = ours(one), ours(two)
        same(first + second, one + two)
        same(first - second, one - two)
        same(first * second, one * two)
        same(first / second, one / two)
        same(first < second, one < two)
        same(first >= second, one >= two)
    same(x == y, a == b)
    same((x != y) & (x > y), (a != b) & (a > b))
    same((x <= y) | ~(x < 0), (a <= b) | ~(a < 0))
    same(-(x**2), -(a**2))
    same(plain.where(x < y, ours(c), 0), np.where(a < b, c, 0))


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=30)
@given(a=arrays(st.sampled_from([(3, 4), (1, 5), (4, 1)]), st.one_of(plainly, st.just(math.nan))))
@np.errstate(all="ignore")
def test_reductions(name: str, a: np.ndarray) -> None:
    for axis in (0, 1):
        same(getattr(plain, name)(ours(a), axis), getattr(np, name)(a, axis))
    same(getattr(plain, name)(ours(a[0]), 0), getattr(np, name)(a[0], 0))
    same(getattr(plain, name)(a[0].tolist()), getattr(np, name)(a[0].tolist()))
    same(getattr(plain, name)(ours(a)), getattr(np, name)(a))


def test_reductions_as_methods() -> None:
    a = np.arange(24.0).reshape(2, 3, 4)
    for axis in (0, 1, 2):
        same(ours(a).mean(axis=axis), a.mean(axis=axis))
        same(ours(a).max(axis=axis, keepdims=True), a.max(axis=axis, keepdims=True))
        same((ours(a) > 13).any(axis=axis), (a > 13).any(axis=axis))
    same(ours(a).sum(), a.sum())
    same(plain.zeros(0, int).max(initial=-1), -1)
    same(plain.zeros(0).sum(), 0.0)


ROWS = np.arange(24.0).reshape(2, 3, 4)
MATRIX, ROW = ROWS[0], np.array([5, 3, 8, 1])
MASK, PLACES = np.array([True, False, True]), np.array([2, 0, -1])
KEYS: list[tuple[np.ndarray, Any]] = [
    (ROW, 2), (ROW, -1), (ROW, slice(1, 3)), (ROW, slice(None, None, -1)), (ROW, np.array([True, False, False, True])),
    (ROW, PLACES), (ROW, np.array([], dtype=int)), (ROW, None), (ROW, (Ellipsis, None)), (MATRIX, 1), (MATRIX, MASK),
    (MATRIX, PLACES), (MATRIX, slice(0, 2)), (MATRIX, (slice(None), 0)), (MATRIX, (slice(None), slice(2, None))),
    (MATRIX, (slice(None), np.array([3, 1]))), (MATRIX, (PLACES, 1)), (MATRIX, (Ellipsis, np.array([0, 2]))),
    (MATRIX, (slice(None), None)), (MATRIX, None), (ROWS, (1, slice(1, 3))), (ROWS, (slice(None), 0)), (ROWS, (Ellipsis, PLACES)),
    (ROWS, (0, 2, slice(None))), (ROWS, np.array([1, 0])),
]  # fmt: skip


def in_ours(key: Any) -> Any:
    return tuple(map(ours, key)) if isinstance(key, tuple) else ours(key)


@pytest.mark.parametrize(("x", "key"), KEYS)
def test_parts(x: np.ndarray, key: Any) -> None:
    same(ours(x)[in_ours(key)], x[key])


@pytest.mark.parametrize(("x", "key"), KEYS)
def test_parts_are_set(x: np.ndarray, key: Any) -> None:
    for value in (x[key] * 10, 7):
        expected, found = x.copy(), ours(x)
        expected[key] = value
        found[in_ours(key)] = ours(value)
        same(found, expected)


def test_what_is_not_there() -> None:
    for x, key in ((ROW, 4), (ROW, np.array([4])), (MATRIX, 3), (MATRIX, (slice(None), np.array([4])))):
        with pytest.raises(IndexError):
            ours(x)[in_ours(key)]
    with pytest.raises(ValueError):
        ours(ROW) + plain.arange(3)
    with pytest.raises(ValueError):
        ours(ROW).reshape(3, -1)


@settings(max_examples=30)
@given(a=arrays(st.just((3, 4)), plainly), b=arrays(st.just((4, 2)), plainly))
def test_products(a: np.ndarray, b: np.ndarray) -> None:
    same(ours(a) @ ours(b), a @ b)
    same(ours(a) @ ours(a).T, a @ a.T)
    same(ours(a).T.copy(), a.T)


@settings(max_examples=30)
@given(a=arrays(st.just((3, 3)), plainly), b=arrays(st.just((3, 2)), plainly))
def test_equations(a: np.ndarray, b: np.ndarray) -> None:
    a = a + 100 * np.eye(3)
    same(plain.linalg.solve(ours(a), ours(b)), np.linalg.solve(a, b), rtol=1e-12)
    for module, matrix in ((plain, ours(a * 0)), (np, a * 0)):
        with pytest.raises(module.linalg.LinAlgError):
            module.linalg.solve(matrix, matrix)


def test_what_it_lacks_is_said_when_it_is_used() -> None:
    for use in (plain.einsum, plain.fft.rfft, lambda x: ours(ROW).argpartition(x), lambda x: ours(MATRIX).T.trace(x)):
        with pytest.raises(plain.LacksError):
            use(1)
    assert not hasattr(plain, "__path__")


MAKING: list[Callable[[Any], Any]] = [
    lambda np: np.zeros((2, 3)), lambda np: np.zeros(2, dtype=bool), lambda np: np.full(3, 2.5), lambda np: np.full((2, 2), -np.inf),
    lambda np: np.arange(4), lambda np: np.arange(2, 5), lambda np: np.array([[1, 2], [3, 4]]), lambda np: np.array([1, 2.5]),
    lambda np: np.array([1.0, 0.0], dtype=bool), lambda np: np.asarray([2, 3], dtype=np.float64), lambda np: np.full_like(np.arange(3), 7),
    lambda np: np.stack([np.arange(3), np.arange(3)]), lambda np: np.concatenate([np.zeros((2, 1)), np.full((2, 2), 1.0)], axis=1),
    lambda np: np.concatenate([np.arange(2), np.full(1, 0.5)]), lambda np: np.pad(np.full((2, 3), 1.0), ((0, 0), (0, 2))),
    lambda np: np.expand_dims(np.arange(3), 1), lambda np: np.broadcast_to(np.arange(3).reshape(-1, 1), (3, 2)),
    lambda np: np.delete(np.arange(5), np.array([1, 3])), lambda np: np.array([0.1, 1e39, -3.0]).astype(np.float32).astype(np.float64),
    lambda np: np.floor(np.array([2.7, 3.0])).astype(np.int64), lambda np: np.array([[1.0, 2.0]]).take(np.array(-1), 1),
    lambda np: np.where(np.array([True, False]), 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKING)
@np.errstate(over="ignore")
def test_making(make: Callable[[Any], Any]) -> None:
    same(make(plain), make(np))


@settings(max_examples=30)
@given(st.lists(st.integers(-3, 3), min_size=1), st.lists(st.integers(-3, 3)))
def test_orders_and_sets(xs: list[int], ys: list[int]) -> None:
    x, y = np.array(xs), np.array(ys, dtype=int)
    same(plain.argsort(ours(x), kind="stable"), np.argsort(x, kind="stable"))
    same(plain.lexsort((ours(x), ours(-x), ours(x > 0))), np.lexsort((x, -x, x > 0)))
    same(plain.sort(ours(x)), np.sort(x))
    same(plain.unique(ours(x)), np.unique(x))
    same(plain.cumsum(ours(x)), np.cumsum(x))
    same(plain.isin(ours(x), ours(y)), np.isin(x, y))
    same(plain.setdiff1d(ours(x), ours(y)), np.setdiff1d(x, y))
    same(plain.flatnonzero(ours(x)), np.flatnonzero(x))
    same(plain.count_nonzero(ours(x)), np.count_nonzero(x))
