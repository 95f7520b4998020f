"""Values of a test: a few for the gate, the others for the nightly run."""

from __future__ import annotations

from collections.abc import Iterable
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


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
