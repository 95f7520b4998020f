"""What float32 can tell of a number: arithmetic with guaranteed bounds.

A value is a `Range`: every result that float32 arithmetic may give, whatever the order of its sums and whether or not products
are fused into them, lies in it. An operation that is exact in float32 (integers, mostly) leaves a range as sharp as it was; every
other widens it by a few units in the last place, and cancellation, thresholds, divisions and exponentials then amplify that as they
amplify rounding errors. Ranges err on the wide side, by a small factor: they treat operands as independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvdsl.interp.evaluate import WITH_ARGUMENT
from kvdsl.interp.evaluate import fold as exact_fold
from kvdsl.ir.ops import REDUCTIONS

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

UNIT = 2.0**-23  # twice the relative error of one rounding
LIBRARY = 8 * UNIT  # exp, log, pow, tanh: a few units in the last place, in every library that a backend uses
TINY = 1e-37  # results below the normal numbers may be flushed to zero
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Range:
    """Bounds of a value, elementwise. `nan`: it may be NaN. Where lo > hi, it is nothing else."""

    lo: Array
    hi: Array
    nan: Mask

    @property
    def never(self) -> Mask:
        """Where the value is NaN for certain."""
        return self.lo > self.hi

    @property
    def sharp(self) -> Mask:
        """Where the value is one number."""
        return (self.lo == self.hi) & ~self.nan

    def __getitem__(self, index: object) -> Range:
        return Range(self.lo[index], self.hi[index], self.nan[index])  # type: ignore[index]

    def map(self, function: Callable[[NDArray[np.generic]], NDArray[np.generic]]) -> Range:
        """The same change of shape for bounds and marks."""
        return Range(*(function(x) for x in (self.lo, self.hi, self.nan)))  # type: ignore[arg-type]

    def holds(self, x: Array) -> Mask:
        """Whether a value is possible."""
        return np.where(np.isnan(x), self.nan, (self.lo <= x) & (x <= self.hi))


def exactly(x: object) -> Range:
    """Numbers that every backend holds as they are."""
    given = np.asarray(x, dtype=np.float64)
    bad = np.isnan(given)
    return Range(np.where(bad, np.inf, given), np.where(bad, -np.inf, given), bad)


def rounded(x: object) -> Range:
    """Numbers that a backend rounds to float32."""
    given = exactly(x)
    return widened(given, UNIT, ~_in_float32(given))


def anything(shape: tuple[int, ...]) -> Range:
    """No knowledge."""
    return Range(np.full(shape, -np.inf), np.full(shape, np.inf), np.ones(shape, dtype=bool))


def join(a: Range, b: Range) -> Range:
    """What may be one or the other."""
    return Range(np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.nan | b.nan)


def stack(ranges: list[Range]) -> Range:
    """Along a new first axis."""
    return Range(*(np.stack([getattr(one, name) for one in ranges]) for name in ("lo", "hi", "nan")))


def joined(ranges: list[Range]) -> Range:
    """Along the first axis."""
    return Range(*(np.concatenate([getattr(one, name) for one in ranges]) for name in ("lo", "hi", "nan")))


def choose(condition: Mask, a: Range, b: Range) -> Range:
    """Elementwise, by a condition that is known."""
    return Range(*(np.where(condition, getattr(a, name), getattr(b, name)) for name in ("lo", "hi", "nan")))


def _in_float32(x: Range) -> Mask:
    with np.errstate(over="ignore"):
        return x.sharp & (x.lo.astype(np.float32) == x.lo) & ((np.abs(x.lo) > 1e-35) | (x.lo == 0))


def widened(x: Range, error: float, where: Mask | bool = True) -> Range:
    """Rounded outwards by a relative error, to infinity where float32 ends."""
    lo = np.where(np.isfinite(x.lo) & where, x.lo - (np.abs(x.lo) * error + TINY), x.lo)
    hi = np.where(np.isfinite(x.hi) & where, x.hi + (np.abs(x.hi) * error + TINY), x.hi)
    lo = np.where((lo > LARGEST) & np.isfinite(lo), LARGEST, lo)
    hi = np.where((hi < -LARGEST) & np.isfinite(hi), -LARGEST, hi)
    lo, hi = np.where(lo < -LARGEST, -np.inf, lo), np.where(hi > LARGEST, np.inf, hi)
    impossible = x.never
    return Range(np.where(impossible, np.inf, lo), np.where(impossible, -np.inf, hi), x.nan)


def _result(corners: list[Array], nan: Mask, never: Mask, error: float = UNIT, exact: Mask | bool = False) -> Range:
    """From the values at the corners of a box of operands. A corner without a value says that NaN is possible there."""
    lost = reduce(np.logical_and, [np.isnan(c) for c in corners])
    unclear = reduce(np.logical_or, [np.isnan(c) for c in corners])
    lo = reduce(np.fmin, corners)
    hi = reduce(np.fmax, corners)
    never = never | lost
    raw = Range(np.where(never, np.inf, lo), np.where(never, -np.inf, hi), nan | unclear | never)
    return widened(raw, error, ~(exact & _in_float32(raw)))


def _pair(a: Range, b: Range) -> tuple[Mask, Mask, Mask]:
    """Of an operation on two ranges: whether NaN comes in, whether nothing else does, and whether both are single numbers."""
    return a.nan | b.nan, a.never | b.never, a.sharp & b.sharp


def _may_be(x: Range, value: float) -> Mask:
    return (x.lo <= value) & (value <= x.hi)


def infinite(x: Range) -> Mask:
    """Where a value may be infinite."""
    return _may_be(x, np.inf) | _may_be(x, -np.inf)


def _only(x: Range, value: float) -> Mask:
    return (x.lo == value) & (x.hi == value)


def _endless(x: Range) -> Mask:
    """Nothing but one of the infinities."""
    return (x.lo == x.hi) & np.isinf(x.lo)


def add(a: Range, b: Range) -> Range:
    nan, never, exact = _pair(a, b)
    nan = nan | (_may_be(a, np.inf) & _may_be(b, -np.inf)) | (_may_be(a, -np.inf) & _may_be(b, np.inf))
    return _result([a.lo + b.lo, a.hi + b.hi, a.lo + b.hi, a.hi + b.lo], nan, never, exact=exact)


def negative(a: Range) -> Range:
    return Range(-a.hi, -a.lo, a.nan)


def subtract(a: Range, b: Range) -> Range:
    return add(a, negative(b))


def multiply(a: Range, b: Range) -> Range:
    nan, never, exact = _pair(a, b)
    nan = nan | (_may_be(a, 0) & infinite(b)) | (_may_be(b, 0) & infinite(a))
    corners = [a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi]
    made = _result(corners, nan, never, exact=exact)
    # Where 0 * inf took the place of a corner, 0 * (a number) may still be: unless nothing but 0 meets nothing but infinity.
    crosses = (_may_be(a, 0) | _may_be(b, 0)) & ~(never | (_only(a, 0) & _endless(b)) | (_only(b, 0) & _endless(a)))
    return Range(
        np.where(crosses, np.minimum(made.lo, 0), made.lo), np.where(crosses, np.maximum(made.hi, 0), made.hi), made.nan
    )


def divide(a: Range, b: Range) -> Range:
    nan, never, exact = _pair(a, b)
    nan = nan | (infinite(a) & infinite(b))
    zero = _may_be(b, 0)
    both_zero = (a.lo == 0) & (a.hi == 0) & (b.lo == 0) & (b.hi == 0)
    quotient = _result([a.lo / b.lo, a.lo / b.hi, a.hi / b.lo, a.hi / b.hi], nan, never, exact=exact)
    unbounded = Range(np.where(never | both_zero, np.inf, -np.inf), np.where(never | both_zero, -np.inf, np.inf),
                      nan | (zero & _may_be(a, 0)) | never)  # fmt: skip
    return choose(zero, unbounded, quotient)


def modulo(a: Range, b: Range) -> Range:
    nan, never, exact = _pair(a, b)
    value = np.mod(a.lo, b.lo)
    sharp = _result([value], nan, never, exact=exact)
    same = (b.lo == b.hi) & np.isfinite(b.lo) & (b.lo != 0) & (np.floor(a.lo / b.lo) == np.floor(a.hi / b.lo))
    inside = _result([value, np.mod(a.hi, b.lo)], nan, never)
    loose = Range(np.minimum(b.lo, 0), np.maximum(b.hi, 0), nan | _may_be(b, 0) | infinite(a))
    far = infinite(b)  # the remainder by infinity is the number itself, or infinity
    loose = choose(far, anything(loose.lo.shape), widened(loose, UNIT))
    loose = Range(np.where(never, np.inf, loose.lo), np.where(never, -np.inf, loose.hi), loose.nan)
    return choose(exact, sharp, choose(same, inside, loose))


def power(a: Range, b: Range) -> Range:
    nan, never, exact = _pair(a, b)
    corners = [a.lo**b.lo, a.lo**b.hi, a.hi**b.lo, a.hi**b.hi]
    never = never & ~(_may_be(a, 1) | _may_be(b, 0))  # 1 ** NaN and NaN ** 0 are 1
    one = exactly(np.ones(never.shape))
    made = _result(corners, nan, never, LIBRARY)
    made = choose((a.nan & _may_be(b, 0)) | (b.nan & _may_be(a, 1)), join(made, one), made)
    whole = (b.lo == b.hi) & (b.lo == np.floor(b.lo)) & np.isfinite(b.lo)
    crosses = (a.lo < 0) & (a.hi > 0)
    with_zero = join(made, exactly(np.zeros(made.lo.shape)))
    clear = exact | (a.lo > 0) | ((a.lo >= 0) & (b.lo > 0)) | (whole & ((b.lo > 0) | (a.hi < 0)))
    return choose(clear, choose(crosses & whole & ~exact, with_zero, made), anything(made.lo.shape))


def square(a: Range) -> Range:
    made = multiply(a, a)
    smallest = np.where(_may_be(a, 0), 0.0, np.minimum(a.lo**2, a.hi**2))
    lo = np.where(made.never, np.inf, np.maximum(np.where(a.sharp, made.lo, smallest * (1 - UNIT)), 0))
    return Range(lo, made.hi, a.nan)


def _monotone(function: Callable[[Array], Array], error: float, start: float = -np.inf) -> Callable[[Range], Range]:
    """A rising function that has no value below `start`."""

    def apply(a: Range) -> Range:
        never = a.never | (a.hi < start)
        nan = a.nan | (a.lo < start)
        inside = np.maximum(a.lo, start)
        return _result([function(inside), function(a.hi)], nan, never, error, exact=a.sharp & (error == UNIT))

    return apply


def _arccosine(a: Range) -> Range:
    """It falls, and is of numbers from -1 to 1."""
    outside, never = (a.lo < -1) | (a.hi > 1), (a.lo > 1) | (a.hi < -1)
    ends = [np.arccos(np.clip(end, -1, 1)) for end in (a.lo, a.hi)]
    return _result(ends, a.nan | outside, a.never | never, LIBRARY)


def _absolute(a: Range) -> Range:
    lo = np.where(_may_be(a, 0), 0.0, np.minimum(np.abs(a.lo), np.abs(a.hi)))
    hi = np.maximum(np.abs(a.lo), np.abs(a.hi))
    return Range(np.where(a.never, np.inf, lo), np.where(a.never, -np.inf, hi), a.nan)


def _exact_step(function: Callable[[Array], Array]) -> Callable[[Range], Range]:
    return lambda a: Range(function(a.lo), function(a.hi), a.nan)


def largest(a: Range, b: Range) -> Range:
    never = a.never | b.never
    return Range(
        np.where(never, np.inf, np.maximum(a.lo, b.lo)), np.where(never, -np.inf, np.maximum(a.hi, b.hi)), a.nan | b.nan
    )


def smallest(a: Range, b: Range) -> Range:
    return negative(largest(negative(a), negative(b)))


# -- conditions: 0 or 1, or undecided ------------------------------------------------------------------------------------


def _condition(certain: Mask, possible: Mask) -> Range:
    return Range(certain.astype(np.float64), possible.astype(np.float64), np.zeros(np.shape(certain), dtype=bool))


def _less(a: Range, b: Range) -> Range:
    return _condition((a.hi < b.lo) & ~a.nan & ~b.nan, (a.lo < b.hi) & ~a.never & ~b.never)


def _at_most(a: Range, b: Range) -> Range:
    return _condition((a.hi <= b.lo) & ~a.nan & ~b.nan, (a.lo <= b.hi) & ~a.never & ~b.never)


def _equal(a: Range, b: Range) -> Range:
    possible = (a.lo <= b.hi) & (b.lo <= a.hi) & ~a.never & ~b.never
    return _condition(possible & a.sharp & b.sharp, possible)


def holds(x: Range) -> tuple[Mask, Mask]:
    """Certainly, possibly: a number holds where it is not 0, so a NaN does."""
    return (x.lo > 0) | (x.hi < 0), (x.lo != 0) | (x.hi != 0) | x.nan


def _not(x: Range) -> Range:
    certain, possible = holds(x)
    return _condition(~possible, ~certain)


def _and(a: Range, b: Range) -> Range:
    return _condition(*(left & right for left, right in zip(holds(a), holds(b), strict=True)))


def _or(a: Range, b: Range) -> Range:
    return _condition(*(left | right for left, right in zip(holds(a), holds(b), strict=True)))


def _where(condition: Range, yes: Range, no: Range) -> Range:
    certain, possible = holds(condition)
    return choose(certain, yes, choose(~possible, no, join(yes, no)))


tanh = _monotone(np.tanh, LIBRARY)

FUNCTIONS: dict[str, Callable[..., Range]] = {
    "neg": negative,
    "not": _not,
    "abs": _absolute,
    "sqrt": _monotone(np.sqrt, UNIT, 0.0),
    "exp": _monotone(np.exp, LIBRARY),
    "log": _monotone(np.log, LIBRARY, 0.0),
    "acos": _arccosine,
    "floor": _exact_step(np.floor),
    "ceil": _exact_step(np.ceil),
    "min": lambda *args: reduce(smallest, args),
    "max": lambda *args: reduce(largest, args),
    "where": _where,
}

OPERATORS: dict[str, Callable[[Range, Range], Range]] = {
    "+": add,
    "-": subtract,
    "*": multiply,
    "/": divide,
    "%": modulo,
    "**": power,
    "<": _less,
    "<=": _at_most,
    ">": lambda a, b: _less(b, a),
    ">=": lambda a, b: _at_most(b, a),
    "==": _equal,
    "!=": lambda a, b: _not(_equal(a, b)),
    "and": _and,
    "or": _or,
}


# -- reductions ----------------------------------------------------------------------------------------------------------


def total(x: Range, axis: int) -> Range:
    """A sum in any order. Sums of integers are exact as long as float32 holds them."""
    size = np.maximum(np.abs(x.lo), np.abs(x.hi))
    count = x.lo.shape[axis]
    never, nan = x.never.any(axis, keepdims=True), x.nan.any(axis, keepdims=True)
    nan = nan | (_may_be(x, np.inf).any(axis, keepdims=True) & _may_be(x, -np.inf).any(axis, keepdims=True))
    lo, hi, reach = (y.sum(axis, keepdims=True) for y in (x.lo, x.hi, np.where(np.isfinite(size), size, 0)))
    whole = (x.sharp & (x.lo == np.floor(x.lo))).all(axis, keepdims=True) & (reach < 2**24)
    slack = np.where(whole, 0, (count + 1) * UNIT * reach + TINY)
    overflows = reach > LARGEST
    lo = np.where(np.isnan(lo) | overflows, -np.inf, lo - slack)
    hi = np.where(np.isnan(hi) | overflows, np.inf, hi + slack)
    return widened(Range(np.where(never, np.inf, lo), np.where(never, -np.inf, hi), nan | overflows | never), 0.0)


def _extreme(x: Range, axis: int) -> Range:
    never = x.never.any(axis, keepdims=True)
    lo, hi = x.lo.max(axis, keepdims=True), x.hi.max(axis, keepdims=True)
    return Range(np.where(never, np.inf, lo), np.where(never, -np.inf, hi), x.nan.any(axis, keepdims=True))


def _mean(x: Range, axis: int) -> Range:
    count = np.full([1] * x.lo.ndim, float(x.lo.shape[axis]))
    return widened(divide(total(x, axis), exactly(count)), UNIT)


def _variance(x: Range, axis: int) -> Range:
    return _mean(square(subtract(x, _mean(x, axis))), axis)


_FOLDS: dict[str, Callable[[Range, int], Range]] = {
    "sum": total,
    "mean": _mean,
    "var": _variance,
    "std": lambda x, axis: FUNCTIONS["sqrt"](_variance(x, axis)),
    "max": _extreme,
    "min": lambda x, axis: negative(_extreme(negative(x), axis)),
}


def with_argument(op: str, x: Range, argument: float) -> Range:
    """Reduce what one slot was given by a reduction with an argument, which rises with its values."""
    never, nan = x.never.any(keepdims=True), x.nan.any(keepdims=True)
    sizes = [np.abs(end[np.isfinite(end)]) for end in (x.lo, x.hi)]
    slack = 4 * UNIT * max((float(size.max()) for size in sizes if size.size), default=0.0)
    lo, hi = (np.reshape(WITH_ARGUMENT[op](end, argument), 1) for end in (x.lo, x.hi))
    return _result([lo - slack, hi + slack], nan, never)


def fold(op: str, x: Range, axis: int) -> Range:
    """Reduce an axis to size 1. What rises with its values lies between what their bounds give."""
    if op in _FOLDS:
        return _FOLDS[op](x, axis)
    assert REDUCTIONS[op].rises, f"say what the bounds of `{op}` are"
    never, nan = x.never.any(axis, keepdims=True), x.nan.any(axis, keepdims=True)
    return _result([exact_fold(op, x.lo, axis), exact_fold(op, x.hi, axis)], nan, never)


# -- who ranks above whom ------------------------------------------------------------------------------------------------


def may_precede(x: Range, tie: NDArray[np.int64]) -> Mask:
    """[n, n]: whether a may rank below b, NaN lowest, of equals the one with the smaller tie."""
    lo, nan, never = (y[:, None] for y in (x.lo, x.nan, x.never))
    older = tie[:, None] < tie[None, :]
    below = ~never & ~x.never[None] & ((lo < x.hi[None]) | ((lo <= x.hi[None]) & older))
    return below | (nan & ~x.never[None]) | (nan & x.nan[None] & older)


def rank(by: Range, tie: NDArray[np.int64]) -> Range:
    """[n]: how many rank lower, at least and at most."""
    maybe = may_precede(by, tie)
    np.fill_diagonal(maybe, False)
    return Range(
        (maybe & ~maybe.T).sum(0).astype(np.float64), maybe.sum(0).astype(np.float64), np.zeros(len(tie), dtype=bool)
    )


def in_top(by: Range, count: float, tie: NDArray[np.int64]) -> tuple[Mask, Mask]:
    """Which, [n], may be among the `count` that rank highest, and which are for certain."""
    maybe = may_precede(by, tie)
    np.fill_diagonal(maybe, False)
    surely_above = (maybe & ~maybe.T).sum(1)  # of a: b, where a may rank below b but b not below a
    perhaps_above = maybe.sum(1)
    return surely_above < count, perhaps_above < count


def highest(x: Range) -> Range:
    """The largest of [n], where NaN is lower than any number: a range of no dimension."""
    numbers = ~x.never
    if not numbers.any():
        return exactly(np.nan)
    sure = ~x.nan
    lo = x.lo[sure].max() if sure.any() else -np.inf
    return Range(np.asarray(lo), np.asarray(x.hi[numbers].max()), np.asarray(not sure.any()))
