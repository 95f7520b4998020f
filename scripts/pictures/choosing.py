"""Which policy for which job, from the committed leaderboard of SmolLM2: what a text costs, and what is found again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "results" / "leaderboard"

PANELS = (
    ("books", "books", "going on with a text", "nats a token more than full"),
    ("questions", "questions: known", "asked in the prompt", "share answered"),
    ("questions", "questions: later", "asked after evicting", "share answered"),
)
"""Folder, column, title and unit of each."""
HIDDEN = ("window", "knorm", "random")
"""So much worse with texts that the others would be a line."""


def choosing(path: Path) -> None:
    """Draw it."""
    from kvdsl_lab.reproduce.plots import draw

    columns = [_rows(folder, name) for folder, name, _, _ in PANELS]
    draw(partial(_plot, columns=columns), [], [path])


def _rows(folder: str, name: str) -> list[dict[str, Any]]:
    result = json.loads((RESULTS / folder / "leaderboard.json").read_text(encoding="utf-8"))
    rows = next(column["rows"] for column in result["columns"] if column["name"] == name)
    if name != "books":
        return list(rows)
    # What the stretches differ by is in every policy's loss, and says nothing of it.
    behind = ({"behind_full": [0.0, 0.0, 0.0]} | row for row in rows)
    return [row | dict(zip(("mean", "low", "high"), row["behind_full"], strict=True)) for row in behind]


def _plot(figure: Any, rows: Any, columns: list[list[dict[str, Any]]]) -> None:
    from kvdsl_lab.leaderboard.report import curve

    figure.set_size_inches(9.5, 3.4)
    policies = list(dict.fromkeys(row["policy"] for rows in columns for row in rows))
    colours = dict(zip(policies, (*(f"C{n}" for n in range(10)), "gold", "navy", "lime"), strict=False))
    for axes, rows, (_, _, title, unit) in zip(figure.subplots(1, len(PANELS)), columns, PANELS, strict=True):
        for policy in policies:
            own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["bytes"])
            if own and not (unit.startswith("nats") and policy in HIDDEN):
                curve(axes, own, [row["bytes"] / 2**20 for row in own], policy, colours[policy])
        axes.set_title(title)
        axes.set_xlabel("cache, MiB")
        axes.set_ylabel(unit)
