"""What a head remembers of the queries it has seen, in two representations of the same meaning.

`History` is the meaning: per slot the list of what every query gave it, reduced only when asked. `Columns` is
what a backend keeps: a few numbers per slot, updated query by query. An expression asks either by `recall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Protocol

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Remembered, fold, per_slot
from kvdsl.ir.nodes import Axis, Column, Expr, Policy, Reduce
from kvdsl.ir.visitors import children, expressions

Values = Callable[[Expr], Array]
"""The value of an expression at the slots in question, [n], at this moment."""


class Memory(Protocol):
    """What both representations do."""

    def place(self, count: int, values: Values) -> None:
        """Remember `count` new slots, after those that there are."""

    def observe(self, chosen: Indices, values: Values) -> None:
        """Remember what one query gave the chosen slots, which are all that it sees."""

    def recall(self, leaf: Remembered, chosen: Indices) -> Array:
        """A reduction over queries, or a column, at the chosen slots: [n, 1]."""

    def keep(self, kept: Indices) -> None:
        """Forget all but these slots."""

    def clone(self) -> Memory:
        """An independent copy."""


class History:
    """Per slot and body of a reduction over queries, the list of what every query gave."""

    def __init__(self, policy: Policy) -> None:
        self._given: dict[Expr, list[list[float]]] = {body: [] for body in query_bodies(policy)}

    def place(self, count: int, values: Values) -> None:
        """New slots have been given nothing."""
        for lists in self._given.values():
            lists.extend([] for _ in range(count))

    def observe(self, chosen: Indices, values: Values) -> None:
        """Note what each body gives each slot."""
        for body, lists in self._given.items():
            for slot, value in zip(chosen, values(body), strict=True):
                lists[slot].append(float(value))

    def recall(self, leaf: Remembered, chosen: Indices) -> Array:
        """The reduction of a body, from its definition."""
        if leaf.kind == "column":
            raise LookupError(f"the history has no column `{leaf.name}`")
        lists = self._given[leaf.body]
        return per_slot([fold(leaf.op, np.array(lists[slot]), axis=0)[0] for slot in chosen])

    def keep(self, kept: Indices) -> None:
        """Forget the lists of the others."""
        for body, lists in self._given.items():
            self._given[body] = [lists[slot] for slot in kept]

    def clone(self) -> History:
        """An independent copy."""
        return deepcopy(self)


class Columns:
    """One number per slot and state column, by the columns' rules."""

    def __init__(self, columns: tuple[Column, ...], values: dict[str, Array] | None = None) -> None:
        self._columns = columns
        self.values: dict[str, Array] = {column.name: np.zeros(0) for column in columns}
        if values is not None:
            self.values = {name: np.array(values[name], dtype=np.float64) for name in self.values}

    def place(self, count: int, values: Values) -> None:
        """A token's column is found once; the others start so that the first query decides."""
        for column in self._columns:
            new = values(column.body) if column.rule == "token" else np.full(count, _FRESH[column.rule])
            self.values[column.name] = np.concatenate([self.values[column.name], new])

    @np.errstate(all="ignore")
    def observe(self, chosen: Indices, values: Values) -> None:
        """Fold what each column's body gives into the column."""
        for column in self._columns:
            if column.rule != "token":
                old = self.values[column.name][chosen]
                self.values[column.name][chosen] = _RULES[column.rule](old, values(column.body))

    def recall(self, leaf: Remembered, chosen: Indices) -> Array:
        """The column."""
        if leaf.kind == "reduce":
            raise LookupError(f"`{leaf.op}` over queries was not made a column")
        return per_slot(self.values[leaf.name][chosen])

    def keep(self, kept: Indices) -> None:
        """Forget the others."""
        self.values = {name: values[kept] for name, values in self.values.items()}

    def clone(self) -> Columns:
        """An independent copy."""
        return deepcopy(self)


_FRESH = {"sum": 0.0, "squares": 0.0, "max": -np.inf, "min": np.inf, "last": np.nan}
"""What a column holds before the first query; the token's own query follows at once."""

_RULES: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "squares": lambda old, new: old + new**2,
    "max": np.maximum,
    "min": np.minimum,
    "last": lambda old, new: new,
}


def query_bodies(policy: Policy) -> tuple[Expr, ...]:
    """The bodies of the policy's reductions over queries, each once, what another one reads before it."""
    return tuple(dict.fromkeys(body for expr in expressions(policy) for body in _bodies(expr)))


def _bodies(expr: Expr) -> Iterator[Expr]:
    for child in children(expr):
        yield from _bodies(child)
    if isinstance(expr, Reduce) and expr.axis is Axis.QUERY:
        yield expr.body
