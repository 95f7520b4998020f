"""Values of a test: a few for the gate, the others for the nightly run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def few(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values for `parametrize`: these few for the gate, the others marked `nightly`. A tuple is a value for each name."""
    every = list(values)
    missing = [value for value in quick if value not in every]
    assert not missing, f"{missing} are not among the values"
    return [value if value in quick else pytest.param(*_each(value), marks=pytest.mark.nightly) for value in every]


def thinned(values: Iterable[Any], by: int) -> list[Any]:
    """The same, where none of many similar values matters most: every `by`-th is for the gate."""
    return [
        pytest.param(*_each(value), marks=pytest.mark.nightly) if number % by else value
        for number, value in enumerate(values)
    ]


def paired(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every value of a factor meets every value of every other: of three factors or more a part of all combinations."""
    rows = list(product(*(range(len(values)) for values in factors)))
    pairs = {row: {(one, row[one], other, row[other]) for one, other in combinations(range(len(row)), 2)} for row in rows}
    missing, chosen = set().union(*pairs.values()), list[tuple[int, ...]]()
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(values[at] for values, at in zip(factors, row, strict=True)) for row in sorted(chosen)]


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
