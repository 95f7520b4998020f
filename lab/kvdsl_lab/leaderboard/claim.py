"""Whether one policy is better than every other, in everything that was measured: a claim that many comparisons must bear out.

Of many comparisons some look good by chance. So they are tested together (Westfall and Young 1993, the largest statistic): were a
difference chance, its sign at every item would be. In a draw the signs of items are flipped, the same for all policies and budgets,
and the largest of all comparisons' means, each in units of what it is by chance, is noted. `p` of a comparison is the share of draws whose
largest is as large as its own: the chance that any of the comparisons would look as good if all differences were chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdsl.budget import spelled
from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard.run import Pair
from kvdsl_lab.leaderboard.summary import LESS_IS_BETTER, REFERENCE, Column

DRAWS = 20_000
LEVEL = 0.025
_SUMMED_UP = ("books", "nearness: kl", "chat", "questions: known", "questions: later")
"""What a claim is about. What else a table has are single tasks of the questions, and the same text again."""

Floats = NDArray[np.float64]


def compare(columns: Sequence[Column], policy: str, seed: int = 0) -> list[dict[str, Any]]:
    """The policy beside every other with the same budget, in every column that sums tasks up.

    Returns:
        `column`, `budget`, `rival`; `better`: the mean difference and the middle 95 % of it, positive where the policy is better;
        `p`: see the module; `sure`: whether that is below `LEVEL`.

    Raises:
        KvdslError: if nothing was measured of the policy.
    """
    wanted = [column for column in columns if column.name in _SUMMED_UP]
    found = [one for column in wanted for one in _differences(column, policy)]
    if not found:
        raise KvdslError(f"nothing was measured of `{policy}` beside others: it cannot be claimed to be better")
    rng, means, largest = np.random.default_rng(seed), list[float](), np.full(DRAWS, -np.inf)
    for column in wanted:
        own = [one for one in found if one[0] is column]
        for mean, drawn in zip(*_flipped([differences for *_, differences in own], rng), strict=True):
            means.append(mean)
            largest = np.maximum(largest, drawn)
    return [
        {"column": column.name, "budget": budget, "rival": rival, "better": _interval(differences, seed),
         "p": round(p, 5), "sure": p < LEVEL}
        for (column, budget, rival, differences), mean in zip(found, means, strict=True)
        for p in [float((1 + np.sum(largest >= mean - 1e-9)) / (1 + DRAWS))]
    ]  # fmt: skip


def _differences(column: Column, policy: str) -> Iterator[tuple[Column, float | None, str, list[Floats]]]:
    """How much better the policy is at every item, by task, for every budget and rival."""
    sign = -1.0 if column.measure in LESS_IS_BETTER else 1.0
    for (name, budget), own in column.scores.items():
        if name != policy:
            continue
        for rival in column.scores:
            if rival[0] in (policy, REFERENCE) or not _meet(budget, rival):
                continue
            theirs = column.scores[rival]
            yield column, budget, rival[0], [sign * (a - b) for a, b in zip(own, theirs, strict=True)]


def _meet(budget: float | None, rival: Pair) -> bool:
    return rival[1] is None or rival[1] == budget


def _flipped(comparisons: Sequence[Sequence[Floats]], rng: np.random.Generator) -> tuple[list[float], list[Floats]]:
    """Of every comparison its mean, and its mean in every draw of signs, in units of what it is by chance."""
    if not comparisons:
        return [], []
    sums: list[Floats] = [np.zeros(DRAWS) for _ in comparisons]
    for task, items in enumerate(comparisons[0]):
        signs = rng.choice(np.array([-1, 1], dtype=np.float32), size=(DRAWS, len(items)))
        for total, comparison in zip(sums, comparisons, strict=True):
            total += signs @ comparison[task].astype(np.float32) / max(1, len(items))
    means, drawn = [], []
    for total, comparison in zip(sums, comparisons, strict=True):
        spread = float(total.std()) or 1.0
        means.append(sum(float(x.mean()) for x in comparison) / spread)
        drawn.append(total / spread)
    return means, drawn


def _interval(differences: Sequence[Floats], seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    drawn = np.mean(
        [rng.multinomial(len(x), np.full(len(x), 1 / len(x)), size=4000) @ x / len(x) for x in differences], axis=0
    )
    mean = float(np.mean([x.mean() for x in differences]))
    return [round(float(x), 5) for x in (mean, *np.quantile(drawn, [0.025, 0.975]))]


def in_words(policy: str, comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came of it, a line for every column and budget: surely better than whom, and who is not surely worse."""
    lines = []
    for column, budget in dict.fromkeys((one["column"], one["budget"]) for one in comparisons):
        own = [one for one in comparisons if (one["column"], one["budget"]) == (column, budget)]
        sure, rest = ([one for one in own if one["sure"] is said] for said in (True, False))
        best = min(own, key=lambda one: one["better"][0])
        told = f"surely better than {len(sure)} of {len(own)}"
        ahead = [one["rival"] for one in rest if one["better"][0] < 0]
        told += f"; behind {', '.join(ahead)}" if ahead else ""
        mean, low, high = best["better"]
        at = "" if budget is None else f", budget {spelled(budget)}"
        beside = f"the best other, `{best['rival']}`: {mean:+.3g} ({low:+.3g} to {high:+.3g})"
        lines.append(f"{column}{at}: `{policy}` is {told}; {beside}")
    return lines
