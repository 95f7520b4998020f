"""What a search leaves: finalists as .kv files that a person can read, a page, a picture, and the same for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvdsl.files import write_whole
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_expression, print_keep, print_policy
from kvdsl.ir.visitors import with_policy
from kvdsl_lab.search.evolve import Found
from kvdsl_lab.search.proof import Row


def name_of(number: int) -> str:
    """The name of the finalist with this number, from 1 on: of its file and, in camel case, of its policy."""
    return f"found_{number}"


def written(found: Found, number: int, told: str) -> str:
    """A finalist as the text of a .kv file.

    Args:
        told: where it was found, and what was measured, for its docstring.
    """
    from kvdsl.diagnostics import Sink
    from kvdsl.source import SourceFile
    from kvdsl.syntax.formatter import format_source

    policy = with_policy(found.policy, name=f"Found{number}", stem=name_of(number), doc="")
    text = print_policy(policy).replace("{\n", f'{{\n  """\n  {_lines(told)}\n  """\n', 1)
    formatted = format_source(SourceFile(f"{name_of(number)}.kv", text), Sink())
    assert formatted is not None, text
    return formatted


def docstring(found: Found, about: Mapping[str, Any], seeds: Mapping[str, Found]) -> str:
    """Where a finalist was found, and how it was judged beside the best seed."""
    name, best = min(seeds.items(), key=lambda named: named[1].error)
    budgets, tasks = (" and ".join(map(str, about[name])) for name in ("budgets", "tasks"))
    return (
        f"Found by `kvdsl search` on {about['model']} (seed {about['seed']}) at budgets of {budgets} tokens ({tasks}): the next token's "
        f"distribution, on {_judged_on(about)}, "
        f"is {found.error:.4f} nats from the full cache's where `{name}`, the best that it began with, is {best.error:.4f} away."
    )


def _judged_on(about: Mapping[str, Any]) -> str:
    return (
        "a text that was not searched on, by which it was chosen"
        if about["chosen on another text"]
        else "the text that was searched on"
    )


def _lines(text: str) -> str:
    return "\n  ".join(textwrap.wrap(text, 110))


def in_words(policy: Policy) -> str:
    """What a policy does, in a line."""
    assert policy.score is not None
    parts = [f"score {print_expression(policy.score)}", *(print_keep(keep) for keep in policy.keeps)]
    if policy.group != "mean":
        parts.append(f"group {policy.group}")
    return " · ".join(parts)


# -- pages -------------------------------------------------------------------------------------------------------------


def page(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    about, counts = result["environment"], result["counts"]
    budgets, tasks = (", ".join(map(str, result[name])) for name in ("budgets", "tasks"))
    lines = [
        "# A search for policies",
        "",
        f"`kvdsl search` on {result['model']}, budgets of {budgets} tokens, judged by {tasks}, seed {result['seed']}; kvdsl "
        f"{about['kvdsl']}, torch {about['torch']}, {about['cpu']}. {counts['tried']} policies were tried, {counts['admitted']} of them "
        f"were within the bounds; judging took {60 * counts['processor_hours']:.3g} minutes of a processor"
        + (f", {60 * result['choosing_hours']:.3g} of them on another text." if result["chosen on another text"] else "."),
        "",
        f"*error*: how far the next token's distribution is from the full cache's, in nats, on {_judged_on(result)}; the geometric "
        "mean over the budgets and tasks. "
        "*state*: bytes of a slot beside key, value and position.",
        "",
        "## What was found",
        "",
        "| policy | error | state | |",
        "|---|---|---|---|",
        *(f"| {one['name']} | {one['error']:.4f} | {one['state_bytes']} | `{one['text']}` |" for one in result["finalists"]),
        *(
            f"| {one['name']} (seed) | {one['error']:.4f} | {one['state_bytes']} | `{one['text']}` |"
            for one in result["seeds"]
        ),
        "",
        "Everything on the front, where nothing else is better in error, on the text that was searched on, bytes and operations at once:",
        "",
        *(
            f"- {one['error']:.4f}, {one['state_bytes']} bytes, {one['nodes']} operations: `{one['text']}`"
            for one in result["front"]
        ),
    ]
    if result["ablations"]:
        lines += ["", f"## What {result['finalists'][0]['name']} is without its parts", "", "| | error |", "|---|---|"]
        lines += [f"| {one['what']} | {one['error']:.4f} |" for one in result["ablations"]]
    lines += ["", *_proven(result), *_history(result)]
    return "\n".join(lines) + "\n"


def _history(result: Mapping[str, Any]) -> list[str]:
    """Which moves brought something, and what the cheap step was worth."""
    lines = [
        "",
        "## The moves",
        "",
        "*climbed*: was judged by the next token; *better*: than what it was made from, there.",
        "",
        "| move | tried | let in | climbed | better |",
        "|---|---|---|---|---|",
        *(
            f"| {one['move']} | {one['tried']} | {one['admitted']} | {one['climbed']} | {one['better']} |"
            for one in result["moves"]
        ),
    ]
    step = result["cheap_step"]
    if step["rank_correlation"] is not None and step["rank_correlation_of_the_best"] is not None:
        lines += [
            "",
            f"The attention's output orders the {step['policies']} policies that climbed as the next token does with a rank correlation "
            f"of {step['rank_correlation']:.2f}; the best {step['best']} of them with {step['rank_correlation_of_the_best']:.2f}.",
        ]
    return lines


def _proven(result: Mapping[str, Any]) -> list[str]:
    if not result["proof"]:
        return []
    agreement = result["agreement"]
    lines = [
        "## On unseen text",
        "",
        f"The loss of {result['stretches']} stretches of {result['tokens']} tokens that the judge has not seen, token by token, behind the "
        "first tokens that fill the budget. *behind*: the difference from the best seed, with the middle 95 % of bootstrap draws; "
        "*better*: whether a paired test says so, at 2.5 % divided by how often it is asked.",
        "",
    ]
    if all(one["rank_correlation"] is not None for one in agreement):
        lines += ["How well the judge orders these policies as their losses do, as a correlation of ranks:", ""]
        lines += [f"- by {one['rung']}: {one['rank_correlation']:.2f}" for one in agreement]
        lines += [""]
    lines += ["| policy | budget | nats a token | behind the best seed | better |", "|---|---|---|---|---|"]
    for row in result["proof"]:
        name = f"`{row['name']}`" + ("" if row["is_seed"] else " (found)")
        better = "" if row["is_seed"] else {True: "yes", False: "no", None: "too few stretches to tell"}[row["better"]]
        lines.append(f"| {name} | {row['budget']} | {row['loss']:.4f} | {behind(row)} | {better} |")
    return lines


def behind(row: Mapping[str, Any], decimals: int = 4) -> str:
    """How far a row of the proof is from the best seed, with the interval if there were stretches enough for one."""
    mean, low, high = row["behind"]
    spread = "" if low is None else f" ({low:+.{decimals}f} to {high:+.{decimals}f})"
    return f"{mean:+.{decimals}f}{spread}"


def told(found: Found) -> dict[str, Any]:
    """A policy for JSON."""
    return {
        "key": found.key, "text": in_words(found.policy), "error": round(found.error, 6),
        "errors": [round(error, 6) for error in found.errors], "state_bytes": found.size.state_bytes, "nodes": found.size.nodes,
    }  # fmt: skip


def proof_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A proof for JSON."""
    return [
        {"name": row.name, "budget": row.budget, "loss": round(row.loss, 5),
         "behind": [end if end is None else round(end, 5) for end in row.behind], "better": row.better, "is_seed": row.is_seed}
        for row in rows
    ]  # fmt: skip


def save(result: Mapping[str, Any], out: Path, *, drawn: bool = True) -> None:
    """The page, the picture and the result itself, into a folder."""
    write_whole(out / "search.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / "search.md", page(result))
    if drawn:
        from kvdsl_lab.reproduce.plots import draw

        draw(partial(plot, result=result), result["front"], [out / "search.png"])


def plot(figure: Any, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """The curve of the search, and the front among the seeds."""
    left, right = figure.subplots(1, 2)
    left.plot([tried for tried, _ in result["curve"]], [error for _, error in result["curve"]], drawstyle="steps-post")
    left.set_xlabel("policies tried")
    left.set_ylabel("best error")
    for label, found, error, marker in (("front", rows, "error", "o"), ("seeds", result["seeds"], "searched_error", "x")):
        right.plot([one["state_bytes"] for one in found], [one[error] for one in found], marker, label=label)
    right.set_xlabel("bytes of state a slot")
    right.set_ylabel("error on the text that is searched on")
    right.legend()
