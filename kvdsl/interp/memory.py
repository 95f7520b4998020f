"""What a head remembers of past queries, in two equivalent representations.

`History` is the definition: per slot the values of every query, reduced only when they are read. `Columns` is what a backend keeps:
a few numbers per slot, updated by every query. Expressions read either by `recall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvdsl.interp.evaluate import WITH_ARGUMENT, Array, Indices, Remembered, as_float32, at_least_one, fold, per_slot
from kvdsl.ir.nodes import Axis, Column, ColumnRef, Expr, Fold, Policy, is_reduction
from kvdsl.ir.ops import REDUCTIONS, RULES
from kvdsl.ir.visitors import children, expressions, parts_of

Values = Callable[[Expr], Array]
"""Evaluates an expression at the slots in question, [n], now; for a fold, its next value."""


@dataclass(frozen=True)
class Moment:
    """Slots, and the newest query observed.

    Attributes:
        chosen: [n] the slots in question.
        position: [n] their positions in the text.
        newest: the position of the newest query that was observed.
        window: a query sees the last `window` tokens only, or None.
        number: evaluates an expression without axes, such as a decay or the size of a window.
        since: the first query that a reduction over the last ones counts.
    """

    chosen: Indices
    position: Indices
    newest: int
    window: int | None
    number: Callable[[Expr], float]
    since: int = 0

    @property
    def observed(self) -> Indices:
        """The number of queries that could see each slot, [n], including its own token's."""
        last = self.newest if self.window is None else np.minimum(self.newest, self.position + self.window - 1)
        return np.maximum(last - self.position + 1, 0)


class Memory(Protocol):
    """The interface of both representations."""

    def place(self, count: int, values: Values, number: Callable[[Expr], float]) -> None:
        """Add `count` new slots after the existing ones."""

    def observe(self, moment: Moment, values: Values) -> None:
        """Record what the newest query gives the chosen slots, which are all that it sees."""

    def recall(self, leaf: Remembered, moment: Moment) -> Array:
        """Return a reduction over queries, a column, or a reduction of a ring, at the chosen slots, [n, 1]."""

    def prune(self, values: Values) -> None:
        """Update folds over prunes at all slots, before some are evicted."""

    def keep(self, kept: Indices) -> None:
        """Drop all but these slots."""

    def clone(self) -> Memory:
        """Return an independent copy."""


class History:
    """Every query's position and value, per slot and body of a reduction over queries, and the values of folds."""

    def __init__(self, policy: Policy) -> None:
        self._received: dict[Expr, list[dict[int, float]]] = {body: [] for body in query_bodies(policy)}
        self._folded: dict[Fold, Array] = {own: np.zeros(0) for own in folds(policy)}

    def place(self, count: int, values: Values, number: Callable[[Expr], float]) -> None:
        """Add new slots without values."""
        for slots in self._received.values():
            slots.extend({} for _ in range(count))
        self._folded = {own: np.concatenate([held, np.full(count, np.nan)]) for own, held in self._folded.items()}

    def observe(self, moment: Moment, values: Values) -> None:
        """Record each body's value at each slot. All folds have their value before the query."""
        found = {own: values(own) for own in self._folded if own.over == "queries"}
        for own, new in found.items():
            self._folded[own][moment.chosen] = new
        for body, slots in self._received.items():
            for slot, value in zip(moment.chosen, values(body), strict=True):
                slots[slot][moment.newest] = float(value)

    def recall(self, leaf: Remembered, moment: Moment) -> Array:
        """Return the reduction of a body, from its definition."""
        match leaf:
            case Fold():
                return per_slot(self._folded[leaf][moment.chosen])
            case ColumnRef(name=name):
                raise LookupError(f"the history has no column `{name}`")
        slots = self._received[leaf.body]
        first = -np.inf
        if leaf.last is not None:
            first = max(moment.since, moment.newest - at_least_one(moment.number(leaf.last)) + 1)
        argument = None if leaf.argument is None else moment.number(leaf.argument)
        holds = slots if leaf.where is None else self._received[leaf.where]
        received = [
            [value for query, value in slots[slot].items() if query >= first and (leaf.where is None or holds[slot][query])]
            for slot in moment.chosen
        ]
        return per_slot([over_queries(leaf.op, values, argument) for values in received])

    def prune(self, values: Values) -> None:
        """Update folds over prunes."""
        found = {own: values(own) for own in self._folded if own.over == "prunes"}
        self._folded |= found

    def keep(self, kept: Indices) -> None:
        """Drop the other slots."""
        self._folded = {own: held[kept] for own, held in self._folded.items()}
        for body, slots in self._received.items():
            self._received[body] = [slots[slot] for slot in kept]

    def clone(self) -> History:
        """Return an independent copy."""
        return deepcopy(self)


def over_queries(op: str, values: list[float], argument: float | None = None) -> float:
    """Reduce the values of one slot, in the order of queries.

    Without values a sum is 0, a max -inf, a min inf, and anything else NaN.
    """
    if not values:
        return REDUCTIONS[op].of_nothing
    if not REDUCTIONS[op].argument:
        return float(fold(op, np.array(values), axis=0)[0])
    assert argument is not None, f"`{op}` takes an argument"
    if op != "ema":
        return float(WITH_ARGUMENT[op](np.array(values), argument))
    average, *later = values
    for value in later:
        average = argument * average + (1 - argument) * value
    return average


class Columns:
    """One number per slot and state column, by the columns' rules, and N numbers for a ring.

    A column whose body reads another one is updated after it, in any order of the list.
    """

    def __init__(self, columns: tuple[Column, ...], values: Mapping[str, Array] | None = None) -> None:
        self._columns = _read_before_reading(columns)
        self.values: dict[str, Array] = {column.name: np.zeros(0) for column in columns}
        if values is not None:
            self.values = {name: np.array(values[name], dtype=np.float64) for name in self.values}

    def place(self, count: int, values: Values, number: Callable[[Expr], float]) -> None:
        """Add new slots. A token's column is computed once and rounded to float32, so that equal values are equal in backends too.

        The others start so that the first query decides.
        """
        for column in self._columns:
            old, new = self.values[column.name], np.zeros(0)
            if column.rule == "token":
                new = as_float32(values(column.body))
            elif column.rule == "ring":
                new = np.full((count, old.shape[1] if len(old) else _ring_size(column, number)), np.nan)
            else:
                new = np.full(count, RULES[column.rule].fresh)
            self.values[column.name] = np.concatenate([old, new]) if len(old) else new

    def observe(self, moment: Moment, values: Values) -> None:
        """Update each column with its body. A fold's body reads all folds before the query."""
        found = {column.name: values(column.body) for column in self._columns if column.rule == "fold"}
        for column in self._columns:
            if column.rule not in ("token", "fold", "prune"):
                self._fold(column, moment, values(column.body))
        for name, new in found.items():
            self.values[name][moment.chosen] = new

    @np.errstate(all="ignore")
    def _fold(self, column: Column, moment: Moment, new: Array) -> None:
        held, chosen = self.values[column.name], moment.chosen
        if column.rule == "ring":
            held[chosen, moment.newest % _ring_size(column, moment.number)] = new
        elif column.rule == "ema":
            assert column.decay is not None
            decay = moment.number(column.decay)
            is_first = moment.position == moment.newest
            held[chosen] = np.where(is_first, new, decay * held[chosen] + (1 - decay) * new)
        else:
            held[chosen] = _RULES[column.rule](held[chosen], new)

    def recall(self, leaf: Remembered, moment: Moment) -> Array:
        """Return the column, or the reduction of a ring."""
        if leaf.kind != "column":
            raise LookupError(f"the {leaf.kind} was not made a column")
        held = self.values[leaf.name][moment.chosen]
        return per_slot(held) if leaf.op is None else self._over_ring(leaf, leaf.op, held, moment)

    def _over_ring(self, leaf: ColumnRef, op: str, held: Array, moment: Moment) -> Array:
        """Reduce the values that a ring still holds, from the oldest query to the newest."""
        column = next(column for column in self._columns if column.name == leaf.name)
        argument = None if leaf.argument is None else moment.number(leaf.argument)
        size = _ring_size(column, moment.number)
        queries = range(max(moment.since, moment.newest - size + 1), moment.newest + 1)
        reach = np.inf if moment.window is None else moment.window
        return per_slot(
            [
                over_queries(op, [places[query % size] for query in queries if own <= query < own + reach], argument)
                for places, own in zip(held, moment.position, strict=True)
            ]
        )

    def prune(self, values: Values) -> None:
        """Update the columns of prunes."""
        self.values |= {column.name: values(column.body) for column in self._columns if column.rule == "prune"}

    def keep(self, kept: Indices) -> None:
        """Drop the other slots."""
        self.values = {name: values[kept] for name, values in self.values.items()}

    def clone(self) -> Columns:
        """Return an independent copy."""
        return deepcopy(self)


def _ring_size(column: Column, number: Callable[[Expr], float]) -> int:
    assert column.size is not None
    return int(at_least_one(number(column.size)))


def _read_before_reading(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Sort columns so that each follows those that its body reads; folds are read before the query."""
    by_name = {column.name: column for column in columns if column.rule not in ("fold", "prune")}

    def with_what_it_reads(column: Column) -> Iterator[Column]:
        for part in parts_of(column.body, ColumnRef):
            if part.name in by_name:
                yield from with_what_it_reads(by_name[part.name])
        yield column

    return tuple(dict.fromkeys(read for column in columns for read in with_what_it_reads(column)))


_RULES: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "squares": lambda old, new: old + new**2,
    "max": np.maximum,
    "min": np.minimum,
    "last": lambda old, new: new,
}


def query_bodies(policy: Policy) -> tuple[Expr, ...]:
    """Return the bodies of the policy's reductions over queries, each once, inner ones first."""
    return tuple(dict.fromkeys(body for expr in expressions(policy) for body in _bodies(expr)))


def folds(policy: Policy) -> tuple[Fold, ...]:
    """Return the policy's folds, each once."""
    return tuple(dict.fromkeys(part for expr in expressions(policy) for part in parts_of(expr, Fold)))


def _bodies(expr: Expr) -> Iterator[Expr]:
    for child in children(expr):
        yield from _bodies(child)
    if is_reduction(expr, Axis.QUERY) and expr.within != "text":
        yield expr.body
        if expr.where is not None:
            yield expr.where
