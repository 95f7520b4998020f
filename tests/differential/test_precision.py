"""The ranges of what float32 may make of a number: corners that random policies have found."""

from __future__ import annotations

import numpy as np
import pytest

from .ranges import anything, exactly, multiply


@pytest.mark.parametrize("swap", [False, True])
def test_zero_times_anything_may_be_zero_or_nan(swap: bool) -> None:
    pair = [exactly([0.0]), anything((1,))]
    made = multiply(*(reversed(pair) if swap else pair))
    assert made.holds(np.array([0.0])).all()
    assert made.holds(np.array([np.nan])).all()
    assert not made.holds(np.array([1.0])).any()


def test_zero_times_infinity_is_nan_only() -> None:
    made = multiply(exactly([0.0]), exactly([np.inf]))
    assert made.never.all()
    assert made.holds(np.array([np.nan])).all()
