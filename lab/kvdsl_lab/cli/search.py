"""`kvdsl search`: search for new policies."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import FORMAT_VERSION, json_option
from kvdsl.cli.options import dtype_option, model_option, texts
from kvdsl_lab.cli.measuring import text_option, whole_numbers

PROOF_SHARE = 1 / 3
"""Of --minutes, at most, for the proof; the best finalist and the best seed are always compared."""


@click.command()
@click.option(
    "--budget",
    default="128",
    show_default=True,
    metavar="N,M",
    help="Tokens that policies may keep; all budgets have equal weight.",
)
@click.option(
    "--task",
    default="text,prompt",
    show_default=True,
    metavar="A,B",
    help="Tasks: a text that is read token by token, or a prompt of four budgets with a few tokens after it.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=10,
    show_default=True,
    help="Time for search and proof.",
)
@click.option("--evaluations", type=click.IntRange(1), help="Stop after this many policies.")
@click.option("--bytes", "state_bytes", type=click.IntRange(0), default=16, show_default=True,
              help="Largest state per slot, in bytes.")  # fmt: skip
@click.option(
    "--operations",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="Largest number of nodes in a policy's expressions.",
)
@click.option(
    "--trigger",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Tokens that a policy may hold beyond its budget.",
)
@click.option("--finalists", type=click.IntRange(1), default=3, show_default=True, help="Policies to write and to prove.")
@click.option("--texts", type=click.IntRange(1), default=18, show_default=True, help="Stretches of text for the search.")
@click.option("--choose-on", "choice", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True), metavar="FILE",
              help="Choose the finalists among the best on another text, without a time limit "
                   "[default: on the search's text].")  # fmt: skip
@texts("choice")
@click.option(
    "--stretches", type=click.IntRange(1), default=8, show_default=True, help="Stretches of unseen text for the proof."
)
@model_option
@text_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("search"), show_default=True,
              help="Folder for policies, page and database.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Discard earlier results.")
@click.option("--no-plots", is_flag=True, help="Skip the picture; needs no matplotlib.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's].")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
              help="Processes that judge; with more than one, each has one thread and its own model.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@dtype_option
@json_option
def command(
    budget: str, task: str, minutes: float, evaluations: int | None, state_bytes: int, operations: int, trigger: int, finalists: int,
    texts: int, choice: Path | None, stretches: int, model: str | None, text: Path | None, out: Path, fresh: bool, no_plots: bool,
    threads: int | None, workers: int, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Search for policies: vary existing ones, judge them, keep the best, repeat.

    The search records a model's queries, keys and values over a text. It judges candidates by the error of the attention output, and
    the better ones by the KL divergence of the model's next token from the full cache's. It writes the finalists as .kv files into OUT
    and compares them with the best shipped policies by their loss on unseen text, read token by token. OUT/search.md has the results.

    OUT/search.sqlite saves everything: the same command continues a stopped search, also with more --minutes.

    \b
    Examples:
      kvdsl search --budget 32 --minutes 1
      kvdsl search --model smollm2 --text book.txt --budget 64,128 --minutes 60
      kvdsl search --model smollm2 --text book.txt --choose-on another.txt
      kvdsl search --model smollm2 --task prompt --bytes 4 --operations 8
    """
    import torch

    from kvdsl.cli.progress import status
    from kvdsl_lab.search import report
    from kvdsl_lab.search.judge import TASKS
    from kvdsl_lab.search.run import Plan, opened
    from kvdsl_lab.search.space import Bounds

    tasks = tuple(dict.fromkeys(task.split(",")))
    if unknown := [name for name in tasks if name not in TASKS]:
        raise click.BadParameter(f"unknown task `{unknown[0]}`; the tasks are {', '.join(TASKS)}", param_hint="--task")
    if threads:
        torch.set_num_threads(threads)
    until = time.monotonic() + 60 * minutes
    bounds = Bounds(state_bytes, operations, trigger=trigger)
    plan = Plan(model, dtype, text, tuple(sorted(set(whole_numbers(budget)))), tasks, bounds, seed, stretches, texts, choice)
    with opened(plan, out, fresh=fresh, workers=workers) as run, status("kvdsl search") as tell:
        run.search(until - 60 * minutes * PROOF_SHARE, evaluations, tell)
        result = {"format_version": FORMAT_VERSION, **run.finish(finalists, until, tell)}
    report.save(result, out, drawn=not no_plots)
    if as_json:
        click.echo(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        _show(result, out)


_VERDICTS = {
    True: "better than the best seed",
    False: "not shown to be better than the best seed",
    None: "too few stretches to tell from the best seed",
}


def _show(result: dict[str, Any], out: Path) -> None:
    from kvdsl_lab.cli.measuring import show
    from kvdsl_lab.search.report import behind

    rows = [*result["finalists"], *result["seeds"]]
    show(
        [
            {name: row[name] for name in ("name", "error", "state_bytes", "text")}
            for row in sorted(rows, key=lambda row: float(row["error"]))
        ]
    )
    for row in result["proof"]:
        if not row["is_seed"]:
            verdict = _VERDICTS[row["better"]]
            click.echo(f"{row['name']} at {row['budget']}, unseen text: {verdict}, {behind(row)} nats a token")
    click.echo(f"policies, page and database: {out}")
