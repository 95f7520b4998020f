"""Try kvdsl's cache in every class of AutoModelForCausalLM, and write a report."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvdsl
from kvdsl.environment import environment
from scripts.matrix.rows import ORDER, Row, all_rows, carry_out, everywhere, finished, kind
from scripts.matrix.ways import WAYS

REPORT = Path("results/matrix.json")
BAD = ("wrong", "failed")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", metavar="NAMES", help="Only these, by class, config or model type, with commas: Llama,Phi3.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=REPORT, show_default=True, help="The report."
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Classes at the same time.")
@click.option("--limit", type=click.IntRange(1), default=180, show_default=True, help="Seconds for each class.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, too, in place of the tables.")
def main(only: str | None, out: Path, jobs: int, limit: int, as_json: bool) -> None:
    """Try kvdsl's cache in every class of AutoModelForCausalLM, and write a report.

    The exit code is 1 if anything is wrong or failed, 2 if nothing could begin.

    \b
    Examples:
      python -m scripts.matrix --jobs 2
      python -m scripts.matrix --only Llama,Phi3 --out /tmp/matrix.json
    """
    chosen = named(only)
    prepare()
    made, begun = [], time.perf_counter()
    for row in in_processes(chosen, jobs, limit):
        made.append(row)
        _tell(row, len(made), len(chosen))
    places = {row.name + row.model_type: place for place, row in enumerate(chosen)}
    made.sort(key=lambda row: places[row["name"] + row["type"]])
    report = {"format_version": "1.0", "environment": environment(dtype="float32", seed=7), "rows": made}
    write(report, out)
    click.echo(f"{len(made)} rows in {time.perf_counter() - begun:.0f} s: {out}", err=True)
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show(made)
    sys.exit(any(kind(outcome) in BAD for row in made for outcome in row["ways"].values()))


def named(only: str | None) -> list[Row]:
    """The rows that are asked for, all by default."""
    rows = all_rows()
    words = [word.strip() for word in (only or "").split(",") if word.strip()]
    for word in words:
        if not any(row.answers_to(word) for row in rows):
            raise click.UsageError(f"transformers {transformers.__version__} has no causal language model `{word}`")
    return [row for row in rows if not words or any(row.answers_to(word) for word in words)]


def prepare() -> None:
    """Import and compile what every class needs, once: the processes are copies of this one, which starts no thread."""
    for module in ("generation.utils", "modeling_layers", "models.llama.modeling_llama"):
        importlib.import_module(f"transformers.{module}")

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    kvdsl.load("h2o")


# -- processes ---------------------------------------------------------------------------------------------------------


class _Process:
    """A class that is being tried in a process of its own, which can end in any way."""

    def __init__(self, row: Row, limit: float) -> None:
        context = multiprocessing.get_context("fork")
        self.row, self.begun, self.limit = row, time.monotonic(), limit
        self.outcomes: dict[str, str] = {}
        self.ours, its = context.Pipe(duplex=False)
        self.process = context.Process(target=_try, args=(row, its), daemon=True)
        self.process.start()
        its.close()

    def listen(self) -> dict[str, Any] | None:
        """The row, once it is there: as it was made, or as far as the process came."""
        try:
            while self.ours.poll():
                told = self.ours.recv()
                if isinstance(told, dict):
                    self.process.join()
                    return told
                self.outcomes[told[0]] = told[1]
        except EOFError:
            self.process.join()
            return self._cut_short(f"failed: the process ended with {self.process.exitcode}")
        if time.monotonic() - self.begun < self.limit:
            return None
        self.process.kill()
        self.process.join()
        return self._cut_short(f"failed: not done after {self.limit:.0f} s")

    def _cut_short(self, why: str) -> dict[str, Any]:
        left = iter([name for name in WAYS if name not in self.outcomes])
        self.outcomes[next(left)] = why
        self.outcomes |= dict.fromkeys(left, "not tried: the process had ended")
        return finished(self.row, self.outcomes, time.monotonic() - self.begun)


def _try(row: Row, tell: Connection) -> None:
    """What a process does."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        tell.send(carry_out(row, lambda way, outcome: tell.send((way, outcome))))
    except Exception as error:  # the matrix itself is broken: that is no success
        tell.send(finished(row, everywhere(f"failed: the matrix itself: {type(error).__name__}: {error}"), 0))
    tell.close()
    os._exit(0)  # threads that hang do not hold it


def in_processes(rows: list[Row], jobs: int, limit: float) -> Iterator[dict[str, Any]]:
    """The rows as they are done, each made in a process of its own."""
    waiting, running = list(reversed(rows)), list[_Process]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Process(waiting.pop(), limit))
        wait([one.ours for one in running], timeout=1)
        for one in list(running):
            made = one.listen()
            if made is not None:
                running.remove(one)
                yield made


# -- what is told ------------------------------------------------------------------------------------------------------


def _tell(row: dict[str, Any], number: int, count: int) -> None:
    """A sign of life."""
    counts = Counter(kind(outcome) for outcome in row["ways"].values())
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER if counts[outcome])
    click.echo(f"[{number:3} of {count}] {row['name']} ({row['type']}): {told} ({row['seconds']:.0f} s)", err=True)
    for way, outcome in row["ways"].items():
        if kind(outcome) in BAD:
            click.echo(f"    {way}: {outcome}", err=True)


def write(report: dict[str, Any], out: Path) -> None:
    """The report, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    beside.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, out)


def show(rows: list[dict[str, Any]]) -> None:
    """How many outcomes of each kind there are, of each way and of classes as a whole; and why some were not tried."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("way", *reversed(ORDER)):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way in (*WAYS, ""):
        found = Counter(kind(row["ways"][way]) if way else row["outcome"] for row in rows)
        table.add_row(escape(way) or "the worst of each class", *(str(found[name]) for name in reversed(ORDER)))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in rows:
        if row["outcome"] == "not tried":
            console.print(f"not tried: {row['name']}: {row['reason']}", markup=False)


if __name__ == "__main__":
    main()
