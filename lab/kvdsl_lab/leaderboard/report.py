"""The leaderboard for readers: Markdown, and a figure for each column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvdsl.budget import spelled
from kvdsl.files import write_whole
from kvdsl_lab.leaderboard.claim import LEVEL
from kvdsl_lab.leaderboard.run import Pair, Row

NO_MORE = 1.05
"""How many times a policy's bytes another's may be that holds no more: budgets are whole tokens, and caches grow by more than one."""

UNITS = {
    "loss": "nats a token",
    "kl": "nats",
    "same_prefix": "tokens",
    "rouge_l": "ROUGE-L, F",
    "known": "share answered",
    "later": "share answered",
    "accuracy": "share answered rightly",
    "answer_tokens": "tokens of an answer",
    "cut_off": "share of answers that reached the limit",
}


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    about = result["environment"]
    lines = [
        "# Leaderboard",
        "",
        f"{result['model']}, {about['dtype']}, texts of {result['length']} tokens, seed {result['seed']}; kvdsl {about['kvdsl']}, torch "
        f"{about['torch']}, transformers {about['transformers']}; {about['cpu']}.",
        "",
        "Intervals are the middle 95 % of 4,000 bootstrap draws; `behind full` is the paired difference from the full cache, positive "
        "where a policy is worse. A policy's place is 1 + how many others of its budget are better by a paired test (signs flipped at "
        "random, 2.5 %): who shares a place cannot be told apart.",
    ]
    if result["claim"] is not None:
        lines += ["", *_claim(**result["claim"])]
    for one in result["columns"]:
        lines += ["", f"## {one['name']}", "", _explained(one), "", *_table(one["rows"])]
    for measure in dict.fromkeys(row["measure"] for row in result["depths"]):
        own = [row for row in result["depths"] if row["measure"] == measure]
        lines += ["", f"## By depth: {measure}", "", *_by_depth(own)]
    if result["refused"]:
        lines += ["", "## Not measured", ""]
        lines += [
            f"- `{row['policy']}`, budget {_budget(row['budget'])}, {row['task']}: {row['refused']}"
            for row in result["refused"]
        ]
    return "\n".join(lines) + "\n"


def _claim(policies: Sequence[str], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is claimed, in a line for every column and budget, and every comparison."""
    are = "Is" if len(policies) == 1 else "Are"
    lines = [
        f"## {are} {', '.join(f'`{policy}`' for policy in policies)} better?",
        "",
        f"*surely*: of all {len(comparisons)} comparisons together none would look as good in {1 - LEVEL:.1%} of draws if all differences "
        "were chance (signs of texts flipped at random, the largest of the comparisons: Westfall and Young).",
        "",
        *(f"- {line}" for line in claimed(comparisons)),
        "",
        "| | budget | policy | beside | its bytes | better by | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        lines.append(
            f"| {one['column']} | {_budget(one['budget'])} | `{one['policy']}` | `{one['rival']}` | {one['bytes']:.2f} × | "
            f"{_with_interval(*one['better'])} | {one['p']:.2g} |"
        )
    return lines


def claimed(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came of a claim, a line for every policy, column and budget: surely better than how many, and who is ahead."""
    groups: dict[tuple[str, float | None, str], list[Mapping[str, Any]]] = {}
    for one in comparisons:
        groups.setdefault((one["column"], one["budget"], one["policy"]), []).append(one)
    return [_what_came(column, budget, policy, own) for (column, budget, policy), own in groups.items()]


def _what_came(column: str, budget: float | None, policy: str, comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Of one policy in a column, at a budget: first beside those that hold no more, then beside the others."""
    fair = [one for one in comparisons if one["bytes"] <= NO_MORE]
    more = [one for one in comparisons if one["bytes"] > NO_MORE]
    told = [f"surely better than {sum(one['sure'] for one in fair)} of {len(fair)}" + (" that hold no more" if more else "")]
    ahead = [one["rival"] for one in fair if one["better"][0] < 0]
    if ahead:
        told.append(f"behind {', '.join(ahead)}")
    if fair:
        best = min(fair, key=lambda one: float(one["better"][0]))
        told.append(f"better than the best of them, `{best['rival']}`, by {_with_interval(*best['better'])}")
    if more:
        named = ", ".join(f"{one['rival']} ({one['bytes']:.1f} ×)" for one in more if one["better"][0] < 0)
        told.append(f"of {len(more)} that hold more {named or 'none'} ahead")
    at = "" if budget is None else f", budget {spelled(budget)}"
    return f"{column}{at}: `{policy}` is {'; '.join(told)}"


def _explained(one: Mapping[str, Any]) -> str:
    tasks = ", ".join(one["tasks"])
    texts = max(row["items"] for row in one["rows"])
    unit = UNITS[one["measure"]]
    return f"{unit[0].upper()}{unit[1:]}, {texts} texts of {tasks}."


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| place | policy | budget | mean | behind full | cache | note |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        behind = row.get("behind_full")
        told = "" if behind is None else _with_interval(*behind)
        place = "" if row["policy"] == "full" else row["place"]
        lines.append(
            f"| {place} | `{row['policy']}` | {_budget(row['budget'])} | {_with_interval(row['mean'], row['low'], row['high'])} | {told} | "
            f"{row['bytes'] / 2**20:.1f} MiB | {row['note'] or ''} |"
        )
    return lines


def _by_depth(rows: Sequence[Row]) -> list[str]:
    depths = sorted({row["depth"] for row in rows})
    texts = min(row["texts"] for row in rows)
    lines = [
        f"Share answered, by where the code stands, of {texts} texts or more a cell.",
        "",
        f"| policy | budget | {' | '.join(f'{depth:.0%}' for depth in depths)} |",
        "|---" * (2 + len(depths)) + "|",
    ]
    found: dict[Pair, dict[float, str]] = {}
    for row in rows:
        found.setdefault((row["policy"], row["budget"]), {})[row["depth"]] = f"{row['mean']:.2f}"
    for (policy, budget), own in found.items():
        lines.append(f"| `{policy}` | {_budget(budget)} | {' | '.join(own.get(depth, '') for depth in depths)} |")
    return lines


def _with_interval(mean: float, low: float | None, high: float | None) -> str:
    return f"{mean:.3g}" if low is None or high is None else f"{mean:.3g} ({low:.3g} to {high:.3g})"


def _budget(budget: float | None) -> str:
    return "" if budget is None else spelled(budget)


def draw(result: Mapping[str, Any], folder: Path) -> list[str]:
    """A figure for every column, quality against what the cache takes and against the time of a token: the files' names."""
    from kvdsl_lab.reproduce.plots import draw as draw_figure

    names = []
    for one in result["columns"]:
        name = one["name"].replace(": ", "_").replace(" ", "_") + ".png"
        draw_figure(partial(_plot, one=one), one["rows"], [folder / name])
        names.append(name)
    return names


def _plot(figure: Any, rows: Sequence[Row], one: Mapping[str, Any]) -> None:
    by_bytes, by_time = figure.subplots(1, 2, sharey=True)
    for policy in dict.fromkeys(row["policy"] for row in sorted(rows, key=lambda row: row["place"])):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["bytes"])
        curve(by_bytes, own, [row["bytes"] / 2**20 for row in own], policy)
        curve(by_time, own, [row["token_ms"] for row in own], policy)
    by_bytes.set_xlabel("cache, MiB")
    by_time.set_xlabel("a token alone, ms")
    by_bytes.set_ylabel(UNITS[one["measure"]])
    figure.suptitle(one["name"])


def curve(axes: Any, own: Sequence[Row], places: Sequence[float], policy: str, colour: str | None = None) -> None:
    """One policy's means at these places, with their intervals where all are known; the full cache is black."""
    known = all(row["low"] is not None for row in own)
    spread = [[row["mean"] - row["low"] for row in own], [row["high"] - row["mean"] for row in own]] if known else None
    axes.errorbar(
        places, [row["mean"] for row in own], yerr=spread, marker="o", markersize=3, linewidth=1, elinewidth=0.5,
        color="black" if policy == "full" else colour, label=policy,
    )  # fmt: skip


def save(result: Mapping[str, Any], out: Path, *, drawn: bool) -> None:
    """`leaderboard.md`, and the figures, beside `leaderboard.json`."""
    write_whole(out / "leaderboard.md", markdown(result))
    if drawn:
        draw(result, out)
