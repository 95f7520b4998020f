"""Medians and quartiles of measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the values that are numbers; NaN if there are none."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return math.nan, math.nan, math.nan
    if len(known) == 1:
        return known[0], known[0], known[0]
    first, _, third = statistics.quantiles(known, n=4, method="inclusive")
    return first, statistics.median(known), third
