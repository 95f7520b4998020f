"""Whether policies are better than every other, in everything that was measured: a claim that many comparisons must bear out.

Of many comparisons some look good by chance. So they are tested together (Westfall and Young 1993, the largest statistic): were a
difference chance, its sign at every text would be. In a draw the signs of texts are flipped, the same for all policies and budgets,
and the largest of all comparisons' means, each in units of what it is by chance, is noted. `p` of a comparison is the share of draws whose
largest is as large as its own: the chance that any of the comparisons would look as good if all differences were chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard.run import Pair, Row
from kvdsl_lab.leaderboard.summary import LESS_IS_BETTER, REFERENCE, Column, draws, interval, mean_of_tasks, median_bytes

DRAWS = 20_000
LEVEL = 0.025
SUMMED_UP = ("books", "nearness: kl", "chat", "questions: known", "questions: later")
"""What a claim is about. What else a table has are single tasks of the questions, and the same text again."""

Floats = NDArray[np.float64]


def compare(columns: Sequence[Column], rows: Sequence[Row], policies: Sequence[str], seed: int = 0) -> list[dict[str, Any]]:
    """The policies beside every other with the same budget, in every column that sums tasks up.

    Returns:
        `policy`, `column`, `budget`, `rival`; `better`: the difference as in `summary.interval`, positive where the policy is better;
        `p`: see the module; `sure`: whether that is below `LEVEL`; `bytes`: how many times the policy's bytes in use the rival's are.

    Raises:
        KvdslError: if nothing was measured of a policy.
    """
    wanted = [column for column in columns if column.name in SUMMED_UP]
    found = [one for column in wanted for one in _differences(column, policies)]
    for policy in policies:
        if not any(one.ours[0] == policy for one in found):
            raise KvdslError(f"nothing was measured of `{policy}` beside others: it cannot be claimed to be better")
    rng, means, largest = np.random.default_rng(seed), list[float](), np.full(DRAWS, -np.inf)
    for column in wanted:
        for mean, drawn in _flipped([one.items for one in found if one.column is column], rng):
            means.append(mean)
            largest = np.maximum(largest, drawn)
    drawn_means = {column.name: draws(column, seed) for column in wanted}
    told = []
    for one, mean in zip(found, means, strict=True):
        p = float((1 + np.sum(largest >= mean - 1e-9)) / (1 + DRAWS))
        of = drawn_means[one.column.name]
        better = interval(one.items, one.sign * (of[one.ours] - of[one.rival]))
        theirs, own = (median_bytes(rows, one.column, pair, "bytes_in_use") for pair in (one.rival, one.ours))
        told.append({"policy": one.ours[0], "column": one.column.name, "budget": one.ours[1], "rival": one.rival[0],
                     "better": better, "p": round(p, 5), "sure": p < LEVEL, "bytes": round(theirs / own, 3)})  # fmt: skip
    return told


@dataclass(frozen=True)
class _Difference:
    """How much better a policy is than a rival at every text, by task: `sign` times the difference of their scores."""

    column: Column
    ours: Pair
    rival: Pair
    sign: float
    items: list[Floats]


def _differences(column: Column, policies: Sequence[str]) -> Iterator[_Difference]:
    """Every budget of the policies beside every rival that has the same, or none."""
    sign = -1.0 if column.measure in LESS_IS_BETTER else 1.0
    for ours, rival in product(column.scores, repeat=2):
        if ours[0] in policies and rival[0] not in (*policies, REFERENCE) and rival[1] in (None, ours[1]):
            pairs = zip(column.scores[ours], column.scores[rival], strict=True)
            yield _Difference(column, ours, rival, sign, [sign * (own - theirs) for own, theirs in pairs])


def _flipped(comparisons: Sequence[Sequence[Floats]], rng: np.random.Generator) -> Iterator[tuple[float, Floats]]:
    """Of every comparison its mean, and its mean in every draw of signs, in units of what it is by chance."""
    sizes = [len(items) for items in comparisons[0]] if comparisons else []
    signs = [rng.choice([-1.0, 1.0], size=(DRAWS, size)) for size in sizes]
    for comparison in comparisons:
        drawn = np.mean([own @ items / len(items) for own, items in zip(signs, comparison, strict=True)], axis=0)
        spread = float(drawn.std()) or 1.0
        yield mean_of_tasks(comparison) / spread, drawn / spread
