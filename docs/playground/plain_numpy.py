"""A stand-in for NumPy in Python alone: for the browser, as no registry has a NumPy that is built for Pyodide.

    plain_numpy.install()  # before kvdsl.interp is imported

Names, arguments and results are NumPy's, and so is what becomes of infinities and NaNs. The reference interpreter may use all of NumPy:
a missing function raises `LacksError` when it is used, and the page refuses the policy.
An array is a list of Python's numbers, in rows. Indexing always copies. Sums are added as Python adds them, so that they may differ from
NumPy's in the last bit.
"""

from __future__ import annotations

import math
import operator
import sys
from array import array as packed
from builtins import max as greatest
from builtins import min as least
from builtins import sum as total
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator
from itertools import accumulate, chain, compress, repeat
from types import ModuleType
from typing import Any

inf, nan = math.inf, math.nan
float64, int64, bool_ = float, int, bool
Shape = tuple[int, ...]


class LacksError(AttributeError):
    """What the stand-in lacks of NumPy."""


class _Lacking:
    """What NumPy has by this name, and the stand-in has not: an error as soon as it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Lacking(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise LacksError(self._name)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Lacking(name)


class float32(float):
    """The dtype: a number that is rounded to it stays a float."""


class errstate(ContextDecorator):
    """Nothing here warns."""

    def __init__(self, **_: str) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def install() -> None:
    """Be `numpy` to what is imported from now on."""
    typing: Any = ModuleType("numpy.typing")
    typing.NDArray, typing.ArrayLike = NDArray, Any
    sys.modules["numpy"], sys.modules["numpy.typing"] = sys.modules[__name__], typing


class ndarray:
    """Numbers of one kind in rows.

    Attributes:
        shape: as NumPy's.
        flat: the numbers, the last axis fastest.
        kind: bool, int or float.
    """

    __slots__ = ("flat", "kind", "shape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, flat: list[Any], shape: Shape, kind: type) -> None:
        self.flat, self.shape, self.kind = flat, shape, kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LacksError(f"ndarray.{name}")

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> _Transposed:
        return _Transposed(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if len(self.shape) == 1:
            return iter(self.flat)
        return (self[index] for index in range(self.shape[0]))

    def rows(self) -> list[list[Any]]:
        """The parts along the last axis."""
        size = self.shape[-1]
        return [self.flat[start : start + size] for start in range(0, len(self.flat), size)] if size else []

    def item(self) -> Any:
        (number,) = self.flat
        return number

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def tolist(self) -> Any:
        if len(self.shape) == 1:
            return list(self.flat)
        return [part.tolist() for part in self] if self.shape else self.item()

    def copy(self) -> ndarray:
        return ndarray(list(self.flat), self.shape, self.kind)

    def astype(self, kind: type) -> ndarray:
        return ndarray(_as_kind(self.flat, kind), self.shape, _KINDS.get(kind, kind))

    def reshape(self, *shape: int) -> ndarray:
        known = math.prod(size for size in shape if size != -1)
        whole = tuple(len(self.flat) // known if size == -1 else size for size in shape)
        if math.prod(whole) != len(self.flat):
            raise ValueError(f"{self.shape} cannot become {shape}")
        return ndarray(list(self.flat), whole, self.kind)

    # -- parts of it ---------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        if len(self.shape) == 1 and type(key) is int:
            return self.flat[key]
        if len(self.shape) == 1 and type(key) is ndarray:  # the most frequent case
            return _row(
                list(compress(self.flat, key.flat) if key.kind is bool else map(self.flat.__getitem__, key.flat)), self.kind
            )
        starts, block, shape = self._places(key)
        if block == 1:
            flat = [self.flat[start] for start in starts]
        else:
            flat = list(chain.from_iterable([self.flat[start : start + block] for start in starts]))
        return ndarray(flat, shape, self.kind) if shape else flat[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        starts, block, shape = self._places(key)
        new = _spread(asarray(value, self.kind), shape)
        for index, start in enumerate(starts):
            self.flat[start : start + block] = new[index * block : (index + 1) * block]

    def _places(self, key: Any) -> tuple[list[int], int, Shape]:
        """Where the chosen numbers begin, how many lie side by side at each place, and their shape together."""
        keys = list(key) if isinstance(key, tuple) else [key]
        given = total(one is not None and one is not Ellipsis for one in keys)
        rest = [slice(None)] * (len(self.shape) - given)
        at = next((index for index, one in enumerate(keys) if one is Ellipsis), len(keys))
        keys[at : at + 1] = rest
        sizes, axes, shape = iter(self.shape), [], []
        for one in keys:
            if one is None:
                shape.append(1)
                continue
            size = next(sizes)
            chosen, stays = _chosen(one, size)
            axes.append((chosen, size))
            shape += [len(chosen)] if stays else []
        block = 1
        while axes and axes[-1][0] == range(axes[-1][1]):
            block *= axes.pop()[1]
        starts, stride = [0], block * math.prod(size for _, size in axes)
        for index, (chosen, size) in enumerate(axes):
            stride //= size or 1
            if index == len(axes) - 1 and isinstance(chosen, range) and chosen.step == 1:
                return [start + chosen.start * stride for start in starts], block * len(chosen), tuple(shape)
            starts = [start + place * stride for start in starts for place in chosen]
        return starts, block, tuple(shape)

    def take(self, index: Any, axis: int) -> Any:
        return self[(slice(None),) * axis + (int(index),)]

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return add(self, other)

    def __radd__(self, other: Any) -> Any:
        return add(other, self)

    def __sub__(self, other: Any) -> Any:
        return subtract(self, other)

    def __rsub__(self, other: Any) -> Any:
        return subtract(other, self)

    def __mul__(self, other: Any) -> Any:
        return multiply(self, other)

    def __rmul__(self, other: Any) -> Any:
        return multiply(other, self)

    def __truediv__(self, other: Any) -> Any:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return divide(other, self)

    def __pow__(self, other: Any) -> Any:
        return multiply(self, self) if other == 2 else power(self, other)

    def __neg__(self) -> Any:
        return negative(self)

    def __lt__(self, other: Any) -> Any:
        return _less(self, other)

    def __le__(self, other: Any) -> Any:
        return _at_most(self, other)

    def __gt__(self, other: Any) -> Any:
        return _less(other, self)

    def __ge__(self, other: Any) -> Any:
        return _at_most(other, self)

    def __eq__(self, other: object) -> Any:
        return _equal(self, other)

    def __ne__(self, other: object) -> Any:
        return _unequal(self, other)

    def __and__(self, other: Any) -> Any:
        return _both(self, other)

    def __or__(self, other: Any) -> Any:
        return _either(self, other)

    def __invert__(self) -> Any:
        return _other_truth(self)

    def __matmul__(self, other: ndarray) -> ndarray:
        """Matrices [a, b] and [b, c]."""
        columns = other.matrix.rows() if isinstance(other, _Transposed) else list(zip(*other.rows(), strict=True))
        flat = [total(map(operator.mul, row, column)) for row in self.rows() for column in columns]
        return ndarray(_as_kind(flat, float), (self.shape[0], other.shape[1]), float)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def sum(self, axis: int | None = None, keepdims: bool = False) -> Any:
        return self.over(axis, _sum, keepdims)

    def mean(self, axis: int | None = None, keepdims: bool = False) -> Any:
        return self.over(axis, _mean, keepdims)

    def max(self, axis: int | None = None, keepdims: bool = False, initial: float | None = None) -> Any:
        most = self if initial is None else concatenate([array([initial]).astype(self.kind), self])
        return most.over(axis, _max, keepdims)

    def any(self, axis: int | None = None) -> Any:
        return self.over(axis, any)

    def over(self, axis: int | None, function: Callable[[list[Any]], Any], keepdims: bool = False) -> Any:
        """A function of the numbers along an axis, or of all of them."""
        if axis is None:
            return function(self.flat)
        size, inner = self.shape[axis], math.prod(self.shape[axis + 1 :])
        outer, shape = math.prod(self.shape[:axis]), self.shape[:axis] + (1,) * keepdims + self.shape[axis + 1 :]
        lines = (
            self.flat[whole * size * inner + part : (whole + 1) * size * inner : inner]
            for whole in range(outer)
            for part in range(inner)
        )
        flat = [function(line) for line in lines]
        return ndarray(flat, shape, type(flat[0]) if flat else float) if shape else flat[0]


class _Transposed(ndarray):
    """A matrix the other way round: found where it is read, and not where it is only multiplied with."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: ndarray) -> None:
        self.matrix, self.shape, self.kind = matrix, matrix.shape[::-1], matrix.kind

    def __getattr__(self, name: str) -> Any:
        if name != "flat":
            return super().__getattr__(name)
        self.flat = list(chain.from_iterable(zip(*self.matrix.rows(), strict=True)))
        return self.flat


class NDArray:
    """The annotation."""

    def __class_getitem__(cls, kind: type) -> type[ndarray]:
        return ndarray


def _chosen(key: Any, size: int) -> tuple[Sequence[int], bool]:
    """The indices that a key means along an axis, and whether the axis stays."""
    if isinstance(key, slice):
        return range(*key.indices(size)), True
    if isinstance(key, ndarray) and key.shape:
        if key.kind is bool:
            return list(compress(range(size), key.flat)), True
        return list(map(range(size).__getitem__, key.flat)), True
    return [range(size)[operator.index(key)]], False


# -- making ------------------------------------------------------------------------------------------------------------

_KINDS: dict[type, type] = {float32: float}
"""What a dtype's numbers are."""


def _as_kind(flat: list[Any], kind: type) -> list[Any]:
    return list(packed("f", flat)) if kind is float32 else list(map(kind, flat))


def array(values: Any, dtype: type | None = None) -> ndarray:
    """An array of its own, from one or from nested lists."""
    flat, shape = _unpacked(values)
    if dtype is not None:
        return ndarray(_as_kind(flat, dtype), shape, _KINDS.get(dtype, dtype))
    if isinstance(values, ndarray):
        return ndarray(list(flat), shape, values.kind)
    kinds = set(map(type, flat))
    kind = float if float in kinds or not kinds else int if int in kinds else bool
    return ndarray(_as_kind(flat, kind), shape, kind)


def _unpacked(values: Any) -> tuple[list[Any], Shape]:
    if isinstance(values, ndarray):
        return values.flat, values.shape
    if isinstance(values, (bool, int, float)):
        return [values], ()
    parts = list(values)
    if not parts or isinstance(parts[0], (bool, int, float)):
        return parts, (len(parts),)
    unpacked = [_unpacked(part) for part in parts]
    return list(chain.from_iterable(flat for flat, _ in unpacked)), (len(parts), *unpacked[0][1])


def asarray(values: Any, dtype: type | None = None) -> ndarray:
    """The array itself if it is one, of the kind."""
    if isinstance(values, ndarray) and (dtype is None or dtype is values.kind):
        return values
    return array(values, dtype)


def full(shape: int | Shape, value: Any, dtype: type | None = None) -> ndarray:
    """The same number everywhere."""
    whole = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = dtype or type(value)
    return ndarray([kind(value)] * math.prod(whole), whole, kind)


def zeros(shape: int | Shape, dtype: type = float) -> ndarray:
    """Zeros."""
    return full(shape, 0, dtype)


def full_like(other: ndarray, value: Any) -> ndarray:
    """As large as another one, and of its kind."""
    return full(other.shape, value, other.kind)


def arange(*bounds: int, dtype: type = int) -> ndarray:
    """Numbers in a row, as `range` has them."""
    flat = list(map(dtype, range(*bounds)))
    return ndarray(flat, (len(flat),), dtype)


# -- putting together --------------------------------------------------------------------------------------------------


def concatenate(parts: Iterable[Any], axis: int = 0) -> ndarray:
    """Arrays one after the other along an axis."""
    arrays = [asarray(part) for part in parts]
    first = arrays[0]
    blocks = [math.prod(one.shape[axis:]) for one in arrays]
    flat = list(
        chain.from_iterable(
            one.flat[whole * block : (whole + 1) * block]
            for whole in range(math.prod(first.shape[:axis]))
            for one, block in zip(arrays, blocks, strict=True)
        )
    )
    length = total(one.shape[axis] for one in arrays)
    return ndarray(flat, (*first.shape[:axis], length, *first.shape[axis + 1 :]), _common(one.kind for one in arrays))


def _common(kinds: Iterable[type]) -> type:
    return greatest(kinds, key=(bool, int, float).index)


def stack(parts: Iterable[ndarray]) -> ndarray:
    """Arrays of one shape along a new first axis."""
    return array(list(parts))


def expand_dims(x: Any, axis: int) -> ndarray:
    """An axis of size 1 more."""
    whole = asarray(x)
    return ndarray(list(whole.flat), (*whole.shape[:axis], 1, *whole.shape[axis:]), whole.kind)


def pad(x: ndarray, widths: Sequence[tuple[int, int]]) -> ndarray:
    """Zeros before and after each axis."""
    for axis, width in enumerate(widths):
        before, after = (zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.kind) for count in width)
        x = concatenate([before, x, after], axis)
    return x


def delete(x: ndarray, gone: ndarray) -> ndarray:
    """What is left of a row without these places."""
    left_out = set(gone.flat)
    flat = [number for place, number in enumerate(x.flat) if place not in left_out]
    return ndarray(flat, (len(flat),), x.kind)


def broadcast_to(x: Any, shape: Shape) -> ndarray:
    """Repeated to a larger shape."""
    whole = asarray(x)
    return ndarray(list(_spread(whole, shape)), shape, whole.kind)


def _spread(x: ndarray, shape: Shape) -> list[Any]:
    """An array's numbers, repeated to a larger shape."""
    if x.shape == shape:
        return x.flat
    old, flat, block = (1,) * (len(shape) - len(x.shape)) + x.shape, x.flat, 1
    if len(old) > len(shape) or any(have not in (1, want) for have, want in zip(old, shape, strict=True)):
        raise ValueError(f"{x.shape} cannot be spread to {shape}")
    if 0 in shape:
        return []
    for have, want in zip(reversed(old), reversed(shape), strict=True):
        if have != want and block == 1:
            flat = list(chain.from_iterable([repeat(number, want) for number in flat]))
        elif have != want:
            parts = (flat[start : start + block] * want for start in range(0, len(flat), block))
            flat = list(chain.from_iterable(parts))
        block *= want
    return flat


def _together(arrays: Sequence[ndarray]) -> tuple[list[Iterable[Any]], Shape]:
    """The numbers of arrays that meet, and the shape in which they do."""
    shapes = {one.shape for one in arrays}
    if len(shapes) == 1:
        return [one.flat for one in arrays], arrays[0].shape
    most = greatest(map(len, shapes))
    sizes = zip(*((1,) * (most - len(shape)) + shape for shape in shapes), strict=True)
    whole = tuple(next((size for size in along if size != 1), 1) for along in sizes)
    count = math.prod(whole)
    return [one.flat * count if len(one.flat) == 1 else _spread(one, whole) for one in arrays], whole


# -- number by number --------------------------------------------------------------------------------------------------


def _each(
    plain: Callable[..., list[Any]], careful: Callable[..., Any] | None = None, gives: type | None = None
) -> Callable[..., Any]:
    """A function of numbers as one of arrays.

    Args:
        plain: of the arguments' numbers, fast; it may raise where NumPy gives an infinity or a NaN.
        careful: of a number each, for where it does.
        gives: the kind of the results; that of the arguments unless said.
    """

    def function(*args: Any) -> Any:
        arrays = [asarray(one) for one in args]
        numbers, shape = _together(arrays)
        try:
            flat = plain(*numbers)
        except (ArithmeticError, ValueError):
            if careful is None:
                raise
            flat = list(map(careful, *numbers))
        return ndarray(flat, shape, gives or _common(one.kind for one in arrays)) if shape else flat[0]

    return function


def _mapped(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda *numbers: list(map(function, *numbers))


def _quotient(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return nan if a == 0 or a != a else math.copysign(inf, a) * math.copysign(1, b)


def _power(a: float, b: float) -> float:
    is_odd = b == b // 1 and b % 2 == 1
    try:
        return math.pow(a, b)
    except OverflowError:
        return -inf if a < 0 and is_odd else inf
    except ValueError:
        if a != 0:
            return nan
        return math.copysign(inf, a) if is_odd else inf


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return inf


def _whole(rounded: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: math.copysign(float(rounded(x)), x) if math.isfinite(x) else x


add, subtract, multiply = (_each(_mapped(of)) for of in (operator.add, operator.sub, operator.mul))
divide = _each(_mapped(operator.truediv), _quotient, float)
mod = _each(_mapped(operator.mod), lambda a, b: a % b if b else nan)
power = _each(_mapped(math.pow), _power, float)
minimum = _each(lambda xs, ys: [x if x <= y or x != x else y for x, y in zip(xs, ys, strict=True)])
maximum = _each(lambda xs, ys: [x if x >= y or x != x else y for x, y in zip(xs, ys, strict=True)])
negative, abs = _each(_mapped(operator.neg)), _each(_mapped(operator.abs))
sqrt = _each(_mapped(math.sqrt), lambda x: math.sqrt(x) if x >= 0 else nan, float)
exp = _each(_mapped(math.exp), _exp, float)
log = _each(_mapped(math.log), lambda x: math.log(x) if x > 0 else -inf if x == 0 else nan, float)
tanh = _each(_mapped(math.tanh), None, float)
cos = _each(_mapped(math.cos), lambda x: math.cos(x) if math.isfinite(x) else nan, float)
sin = _each(_mapped(math.sin), lambda x: math.sin(x) if math.isfinite(x) else nan, float)
arccos = _each(_mapped(math.acos), lambda x: math.acos(x) if -1 <= x <= 1 else nan, float)
floor, ceil = (_each(_mapped(_whole(to)), None, float) for to in (math.floor, math.ceil))
isnan, isinf, isfinite = (_each(_mapped(of), None, bool) for of in (math.isnan, math.isinf, math.isfinite))
_less, _at_most = _each(_mapped(operator.lt), None, bool), _each(_mapped(operator.le), None, bool)
_equal, _unequal = _each(_mapped(operator.eq), None, bool), _each(_mapped(operator.ne), None, bool)
_both, _either = _each(_mapped(operator.and_)), _each(_mapped(operator.or_))
_other_truth = _each(_mapped(operator.not_), None, bool)
_choice = _each(lambda truths, xs, ys: [x if truth else y for truth, x, y in zip(truths, xs, ys, strict=True)])


def where(condition: Any, yes: Any, no: Any) -> ndarray:
    """One or the other, number by number."""
    kind = _common(asarray(one).kind for one in (yes, no))
    chosen: ndarray = _choice(condition, asarray(yes, kind), asarray(no, kind))
    return ndarray(chosen.flat, chosen.shape, kind)


# -- reductions --------------------------------------------------------------------------------------------------------


def _sum(line: list[float]) -> float:
    return total(line) if line else 0.0


def _mean(line: list[float]) -> float:
    return total(line) / len(line) if line else nan


def _var(line: list[float]) -> float:
    mean = _mean(line)
    return _mean([(x - mean) * (x - mean) for x in line])


def _or_nan(function: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """A function of numbers that is NaN where one of them is."""
    return lambda line: nan if math.isnan(total(line)) and any(map(math.isnan, line)) else function(line)


def _middle(line: list[float]) -> float:
    ordered, half = sorted(line), len(line) // 2
    return ordered[half] if len(line) % 2 else (ordered[half - 1] + ordered[half]) / 2


_max, _min, _median = _or_nan(greatest), _or_nan(least), _or_nan(_middle)


def _along(function: Callable[[list[float]], float]) -> Callable[..., Any]:
    return lambda x, axis=None: asarray(x).over(axis, function)


sum, mean, var = _along(_sum), _along(_mean), _along(_var)
std = _along(lambda line: math.sqrt(_var(line)))
max, min, median = _along(_max), _along(_min), _along(_median)


# -- linear equations --------------------------------------------------------------------------------------------------


class linalg:
    """The part of NumPy that solves."""

    class LinAlgError(ValueError):
        """There is no solution."""

    @staticmethod
    def solve(a: ndarray, b: ndarray) -> ndarray:
        """The inverse of a matrix times another one, by elimination."""
        rows = [[*left, *right] for left, right in zip(a.rows(), b.rows(), strict=True)]
        for place in range(len(rows)):
            best = greatest(range(place, len(rows)), key=lambda row: abs(rows[row][place]))
            rows[place], rows[best] = rows[best], rows[place]
            if rows[place][place] == 0:
                raise linalg.LinAlgError("Singular matrix")
            pivot = [number / rows[place][place] for number in rows[place]]
            rows = [
                pivot if row == place else [x - y * other[place] for x, y in zip(other, pivot, strict=True)]
                for row, other in enumerate(rows)
            ]
        return ndarray([number for row in rows for number in row[len(rows) :]], b.shape, float)


# -- orders and sets ---------------------------------------------------------------------------------------------------


def argsort(x: ndarray, kind: str = "stable") -> ndarray:
    """The places of a row's numbers from the lowest to the highest, of equals the first one first."""
    return lexsort([x])


def lexsort(keys: Sequence[ndarray]) -> ndarray:
    """Sort by several rows; the last one counts most."""
    ranks = keys[0].flat if len(keys) == 1 else list(zip(*(key.flat for key in reversed(keys)), strict=True))
    return _row(sorted(range(len(ranks)), key=ranks.__getitem__), int)


def sort(x: ndarray) -> ndarray:
    """A row's numbers from the lowest to the highest."""
    return _row(sorted(x.flat), x.kind)


def cumsum(x: ndarray) -> ndarray:
    """A row's sums up to each number."""
    return _row(list(accumulate(x.flat)), x.kind)


def unique(x: ndarray) -> ndarray:
    """The same, each once."""
    return _row(sorted(set(x.flat)), x.kind)


def isin(x: ndarray, among: ndarray) -> ndarray:
    """Which of a row's numbers are among others."""
    known = set(among.flat)
    return _row([number in known for number in x.flat], bool)


def setdiff1d(x: ndarray, without: ndarray) -> ndarray:
    """A row's numbers that are not among others, ascending and each once."""
    return _row(sorted(set(x.flat) - set(without.flat)), x.kind)


def flatnonzero(x: ndarray) -> ndarray:
    """Where numbers are not 0."""
    return _row([place for place, number in enumerate(x.flat) if number], int)


def count_nonzero(x: ndarray) -> int:
    """How many are not 0."""
    return total(map(bool, x.flat))


def _row(flat: list[Any], kind: type) -> ndarray:
    return ndarray(flat, (len(flat),), kind)
