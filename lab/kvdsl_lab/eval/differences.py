"""What rows of perplexities tell: their intervals, and which policies can be told from the full cache.

All policies read the same stretches. Which stretches they were is what chance draws: see `kvdsl_lab.leaderboard.summary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdsl_lab.leaderboard.summary import LEAST_ITEMS, REFERENCE, Column, better, draws, interval, signs

Row = dict[str, Any]

UNTOLD = "no difference can be told"


def with_intervals(rows: Sequence[Row]) -> list[Row]:
    """Rows of `perplexities` with `low` and `high`, in which 95 % of the draws of stretches lie.

    With the full cache among the policies a row has also `behind_full`, by how many percent the perplexity is higher, as mean, low and
    high, and `against_full`, the same in words. Of fewer than `LEAST_ITEMS` stretches nothing can be told.
    """
    places = [(row.get("first"), row.get("last")) for row in rows]
    found: dict[int, Row] = {}
    for place in dict.fromkeys(places):
        own = [number for number, other in enumerate(places) if other == place]
        found |= zip(own, _compared([rows[number] for number in own]), strict=True)
    return [found[number] for number in range(len(rows))]


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Rows of the same tokens."""
    pairs = [(row["policy"], row["budget"]) for row in rows]
    losses = {pair: np.array(row["losses"], dtype=np.float64) for pair, row in zip(pairs, rows, strict=True)}
    gains = Column("ppl", ("stretches",), "loss", {pair: [-own] for pair, own in losses.items()})
    drawn, flips = draws(gains), signs(gains)
    full = next((pair for pair in pairs if pair[0] == REFERENCE), None)
    found = []
    for pair, row in zip(pairs, rows, strict=True):
        _, low, high = interval([losses[pair]], -drawn[pair])
        told = {key: None if end is None else float(f"{math.exp(end):.4g}") for key, end in (("low", low), ("high", high))}
        at = list(row).index("ppl") + 1
        more: Row = {}
        if full is not None:
            ends = interval([losses[pair] - losses[full]], drawn[full] - drawn[pair])
            behind = [None if end is None else round(100 * math.expm1(end), 3) for end in ends]
            sure = better(gains, full, pair, flips) or better(gains, pair, full, flips)
            more["behind_full"] = None if pair == full else behind
            more["against_full"] = None if pair == full else _in_words(behind, sure, losses[pair] - losses[full])
        found.append(dict([*list(row.items())[:at], *told.items(), *more.items(), *list(row.items())[at:]]))
    return found


def _in_words(behind: Sequence[float | None], sure: bool, apart: NDArray[np.float64]) -> str:
    mean, low, high = behind
    if not apart.any():
        return "the same"
    if mean is None or low is None or high is None:
        return f"{UNTOLD} from {len(apart)} stretches: take {LEAST_ITEMS} or more"
    if not sure or low * high <= 0:
        return UNTOLD
    near, far = sorted((abs(low), abs(high)))
    return f"{_short(abs(mean))} % {'worse' if mean > 0 else 'better'} ({_short(near)} to {_short(far)})"


def _short(percent: float) -> str:
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
