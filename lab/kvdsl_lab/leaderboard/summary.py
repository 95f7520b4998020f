"""From measurements to a table: means, paired differences with their intervals, and places where these allow them.

All policies were asked the same. A bootstrap draws texts with replacement, the same for every policy, and recomputes what is compared:
the middle 95 % of the draws is its interval. Whether one policy is better than another says a paired test: if neither were, the sign of
each text's difference would be chance. What was measured of parts of a text is averaged: a token that is evicted is gone for all that
come after it, so that parts do not stand for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdsl_lab.leaderboard.run import Pair, Row

DRAWS = 4000
LEAST_ITEMS = 6
"""Of fewer, no test of signs can tell at 2.5 %, and a bootstrap's interval is too narrow."""
REFERENCE = "full"

LESS_IS_BETTER = ("loss", "kl", "answer_tokens", "cut_off")
"""Measures of which less is better."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """What is compared: a measure of one task, or its mean over several tasks.

    Attributes:
        scores: by policy and budget, for every task the mean of each of its texts: [texts] each.
    """

    name: str
    tasks: tuple[str, ...]
    measure: str
    scores: dict[Pair, list[_Floats]]


def column(rows: Sequence[Row], name: str, tasks: Sequence[str], measure: str) -> Column:
    """The scores at those items that every policy and budget has been asked; policies that refused any, and tasks without items, are
    left out.
    """
    of = {(row["task"], row["item"], row["policy"], row["budget"]): row for row in rows if row["task"] in tasks}
    refused = {(policy, budget) for (_, _, policy, budget), row in of.items() if "refused" in row}
    pairs = [pair for pair in dict.fromkeys((policy, budget) for _, _, policy, budget in of) if pair not in refused]
    scores: dict[Pair, list[_Floats]] = {pair: [] for pair in pairs}
    for task in tasks:
        asked = [{item for one, item, *pair in of if one == task and tuple(pair) == wanted} for wanted in pairs]
        items = sorted(set.intersection(*asked)) if asked else []
        for policy, budget in pairs if items else ():
            found = [of[task, item, policy, budget]["values"][measure] for item in items]
            scores[policy, budget].append(np.concatenate([_texts(task, parts) for parts in found]))
    return Column(name, tuple(tasks), measure, scores)


def _texts(task: str, parts: Sequence[float]) -> _Floats:
    """The mean of each of an item's texts, whose parts stand behind one another."""
    from kvdsl_lab.leaderboard.tasks import TASKS

    return np.asarray(np.array(parts, dtype=np.float64).reshape(TASKS[task].kind.rows, -1).mean(1), dtype=np.float64)


def draws(column: Column, seed: int = 0) -> dict[Pair, _Floats]:
    """The mean over tasks and items of every policy and budget in every bootstrap draw: [DRAWS] each."""
    rng = np.random.default_rng(seed)
    counts = [len(items) for items in next(iter(column.scores.values()), [])]
    weights = [rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count for count in counts]
    return {
        pair: np.mean([weight @ items for weight, items in zip(weights, own, strict=True)], axis=0)
        for pair, own in column.scores.items()
    }


def signs(column: Column, seed: int = 0) -> list[_Floats]:
    """Of every task the signs that its texts' differences get in every draw: [DRAWS, texts] each."""
    rng = np.random.default_rng(seed)
    return [rng.choice([-1.0, 1.0], size=(DRAWS, len(own))) for own in next(iter(column.scores.values()), [])]


def better(column: Column, one: Pair, other: Pair, drawn: Sequence[_Floats]) -> bool:
    """Whether the first has the larger scores, by a one-sided paired test at 2.5 %.

    Args:
        drawn: of `signs`.
    """
    differences = [a - b for a, b in zip(column.scores[one], column.scores[other], strict=True)]
    found = np.mean([x.mean() for x in differences])
    flipped = np.mean([own @ x / len(x) for own, x in zip(drawn, differences, strict=True)], axis=0)
    return bool(found > 0 and np.mean(flipped >= found - 1e-12) < 0.025)


def table(column: Column, rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """A row for every policy and budget, the best first within a budget.

    `mean`, `low`, `high`; `behind_full` likewise, the paired difference, positive where the policy is worse; `place`: 1 + how many
    policies of the same budget are better (see `better`); `bytes`, `token_ms`: medians; `note` where the policy did nothing; `items`:
    how many texts. Of fewer than `LEAST_ITEMS` there is no interval. Problems have `accuracy`, `answer_tokens` and `cut_off` as well.
    """
    sign = -1.0 if column.measure in LESS_IS_BETTER else 1.0
    signed = Column(
        column.name, column.tasks, column.measure, {pair: [sign * x for x in own] for pair, own in column.scores.items()}
    )
    drawn, flips = draws(column, seed), signs(column, seed)
    full = next((pair for pair in column.scores if pair[0] == REFERENCE), None)
    found = []
    for pair, own in column.scores.items():
        policy, budget = pair
        row: Row = {"column": column.name, "policy": policy, "budget": budget, "items": sum(len(x) for x in own),
                    **dict(zip(("mean", "low", "high"), interval(own, drawn[pair]), strict=True))}  # fmt: skip
        if full is not None and pair != full:
            lost = [sign * (whole - x) for whole, x in zip(column.scores[full], own, strict=True)]
            row["behind_full"] = interval(lost, sign * (drawn[full] - drawn[pair]))
        rivals = [other for other in column.scores if other[1] == budget and other != pair and other[0] != REFERENCE]
        row["place"] = 1 + sum(better(signed, other, pair, flips) for other in rivals)
        if column.measure == "accuracy":
            row |= {
                "accuracy": row["mean"],
                **{name: _mean(rows, column, pair, name) for name in ("answer_tokens", "cut_off")},
            }
        found.append({**row, **_costs(rows, column, pair)})
    return sorted(found, key=lambda row: (math.inf if row["budget"] is None else row["budget"], -sign * row["mean"]))


def mean_of_tasks(own: Sequence[_Floats]) -> float:
    """Of the items of every task, [items] each: every task counts alike."""
    return float(np.mean([x.mean() for x in own]))


def interval(own: Sequence[_Floats], drawn: _Floats) -> list[float | None]:
    """The mean of items, by task, and the ends of the middle 95 % of its draws; None for these of fewer than `LEAST_ITEMS`."""
    mean = round(mean_of_tasks(own), 5)
    if sum(len(x) for x in own) < LEAST_ITEMS:
        return [mean, None, None]
    return [mean, *(round(float(end), 5) for end in np.quantile(drawn, [0.025, 0.975]))]


def _costs(rows: Sequence[Row], column: Column, pair: Pair) -> dict[str, Any]:
    own = _measured(rows, column, pair)
    times = [row["token_ms"] for row in own if row["token_ms"] is not None]
    return {
        "bytes": round(median_bytes(rows, column, pair)),
        "token_ms": round(float(np.median(times)), 2) if times else None,
        "note": next((row["note"] for row in own if row["note"]), None) if all(row["note"] for row in own) else None,
    }


def _mean(rows: Sequence[Row], column: Column, pair: Pair, measure: str) -> float:
    """The mean of another measure at what a column shows."""
    return round(float(np.mean([value for row in _measured(rows, column, pair) for value in row["values"][measure]])), 4)


def _measured(rows: Sequence[Row], column: Column, pair: Pair) -> list[Row]:
    return [
        row for row in rows if row["task"] in column.tasks and (row["policy"], row["budget"]) == pair and "values" in row
    ]


def median_bytes(rows: Sequence[Row], column: Column, pair: Pair, which: str = "bytes") -> float:
    """What a policy's cache takes: `bytes`, or `bytes_in_use`, of `kinds.Outcome`."""
    return float(np.median([row[which] for row in _measured(rows, column, pair)]))


def telling(rows: Sequence[Row], tasks: Sequence[str], measure: str, least: float = 0.2) -> list[str]:
    """The tasks whose answers the full cache gives often enough that a policy can lose something: a mean of `least` or more."""
    found = []
    for task in tasks:
        scores = [np.mean(row["values"][measure]) for row in rows
                  if row["task"] == task and row["policy"] == REFERENCE and "values" in row]  # fmt: skip
        if scores and float(np.mean(scores)) >= least:
            found.append(task)
    return found


def by_depth(rows: Sequence[Row]) -> list[Row]:
    """How many of the hidden codes are found, by how deep they stand: `measure, policy, budget, depth, mean, texts`."""
    from kvdsl_lab.leaderboard.facts import DEPTHS, depth_of
    from kvdsl_lab.leaderboard.kinds import Questions

    found: list[Row] = []
    asked = [row for row in rows if row["task"] in ("fact", "facts") and "values" in row]
    for measure in Questions.measures:
        for policy, budget in dict.fromkeys((row["policy"], row["budget"]) for row in asked):
            own = [row for row in asked if (row["policy"], row["budget"]) == (policy, budget)]
            for depth in DEPTHS:
                scores = [row["values"][measure][0] for row in own if depth_of(row["item"]) == depth]
                if scores:
                    row = {"measure": measure, "policy": policy, "budget": budget, "depth": depth}
                    found.append({**row, "mean": round(float(np.mean(scores)), 4), "texts": len(scores)})
    return found


def columns(rows: Sequence[Row]) -> list[Column]:
    """What the leaderboard shows: books, nearness, questions (mean of the tasks that tell something), then every question task."""
    from kvdsl_lab.leaderboard.kinds import Questions
    from kvdsl_lab.leaderboard.tasks import TASKS

    there = [name for name in TASKS if any(row["task"] == name for row in rows)]
    asked = [name for name in there if isinstance(TASKS[name].kind, Questions)]
    found = [
        column(rows, name if len(TASKS[name].kind.measures) == 1 else f"{name}: {measure}", [name], measure)
        for name in there if name not in asked for measure in TASKS[name].kind.measures
    ]  # fmt: skip
    for measure in Questions.measures:
        tell = telling(rows, asked, measure)
        if tell:
            found.append(column(rows, f"questions: {measure}", tell, measure))
        found += [column(rows, f"{name}: {measure}", [name], measure) for name in asked]
    return [one for one in found if any(len(items) for own in one.scores.values() for items in own)]
