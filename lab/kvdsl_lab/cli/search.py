"""`kvdsl search`: policies that nobody has written."""

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
    help="Tokens that policies may keep; all budgets count alike.",
)
@click.option(
    "--task",
    default="text,prompt",
    show_default=True,
    metavar="A,B",
    help="What policies are judged by: a text that is read token by token, a prompt of four budgets with a few tokens behind it.",
)
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10, show_default=True, help="For search and proof."
)
@click.option("--evaluations", type=click.IntRange(1), help="Stop after so many policies, whatever the time.")
@click.option("--bytes", "state_bytes", type=click.IntRange(0), default=16, show_default=True,
              help="State that a policy may have of a slot, in bytes.")  # fmt: skip
@click.option(
    "--operations", type=click.IntRange(1), default=24, show_default=True, help="Nodes that its expressions may have."
)
@click.option(
    "--trigger", type=click.IntRange(1), default=1, show_default=True, help="Tokens over its budget that it may hold."
)
@click.option(
    "--finalists", type=click.IntRange(1), default=3, show_default=True, help="Policies that are written and proven."
)
@click.option("--texts", type=click.IntRange(1), default=18, show_default=True, help="Stretches of text that are judged on.")
@click.option("--choose-on", "choice", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True), metavar="FILE",
              help="Choose the finalists among the best by another text, however long that takes "
                   "[default: by what is searched on].")  # fmt: skip
@texts("choice")
@click.option("--stretches", type=click.IntRange(1), default=8, show_default=True, help="Of unseen text, for the proof.")
@model_option
@text_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("search"), show_default=True,
              help="Folder for policies, page and database.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Forget what was found before.")
@click.option("--no-plots", is_flag=True, help="No picture; needs no matplotlib.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's own].")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
              help="Processes that judge; of several, each has a thread and a model of its own.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@dtype_option
@json_option
def command(
    budget: str, task: str, minutes: float, evaluations: int | None, state_bytes: int, operations: int, trigger: int, finalists: int,
    texts: int, choice: Path | None, stretches: int, model: str | None, text: Path | None, out: Path, fresh: bool, no_plots: bool,
    threads: int | None, workers: int, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Search for policies: change those that there are, judge, keep the best, again.

    Candidates are judged by the error that they leave in the attention's output, on queries, keys and values that are recorded from
    the model over a text; the better ones by how far the model's next token is from the full cache's. What is found is written as
    .kv files into OUT, and compared with the best of the shipped policies by the loss of text that the judge has not seen, read token
    by token. OUT/search.md says what came of it.

    Everything stands in OUT/search.sqlite: a search that was stopped goes on with the same command, and with more --minutes.

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
        raise click.BadParameter(f"there is no task `{unknown[0]}`; there are {', '.join(TASKS)}", param_hint="--task")
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
