"""Values of a test of which the quick suite tries a few, and the slow one the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values for `parametrize`: these few for every run, the others marked as slow. A tuple is a value for each name."""
    every = list(values)
    missing = [value for value in quick if value not in every]
    assert not missing, f"{missing} are not among the values"
    return [value if value in quick else pytest.param(*_each(value), marks=pytest.mark.slow) for value in every]


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
