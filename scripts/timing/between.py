#!/usr/bin/env python
"""Whether one decode step became slower between two checkouts: the same step of both in turns, and of the second against itself.

git worktree add ../before COMMIT
scripts/timing/between.py ../before --json > results/cpu/between.json

A process's memory lies somewhere else every time it starts, which moves a step by several percent, and a machine drifts. So each
start has three processes (before, after, and after once more), which take short turns; a ratio is the median over turns of one start,
and the figure is the median over starts. How far `again` lies from 1 is what this machine can tell apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from kvdsl.environment import environment

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
CELLS = ["roco:fp32", "h2o:fp32", "roco:bf16", "h2o:bf16"]
STEPS = 9
"""Of a turn; its time is their median."""


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--cell", "cells", multiple=True, default=CELLS, show_default=True, help="POLICY:DTYPE; may be repeated.")
@click.option("--live", type=click.IntRange(8), default=4096, show_default=True, help="Slots that a step attends to.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Rows; 8 KV heads of 128, groups of 4.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Of each process; one runs at a time.")
@click.option("--starts", type=click.IntRange(1), default=5, show_default=True, help="Times that the processes start anew.")
@click.option("--turns", type=click.IntRange(3), default=30, show_default=True, help="Of each process after a start.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(before: Path, cells: tuple[str, ...], as_json: bool, starts: int, turns: int, **shape: int) -> None:
    """Compare the decode step of the checkout BEFORE with that of this one; both use the running environment."""
    builds = {"before": before.resolve(), "after": ROOT, "again": ROOT}
    rows = []
    for cell in cells:
        times = [taken(builds, cell, shape, turns, start) for start in range(starts)]
        rows.append({"cell": cell, **figures(times)})
        click.echo(
            f"{cell}: after / before {rows[-1]['ratio']:.3f} ({min(rows[-1]['ratios']):.3f} to {max(rows[-1]['ratios']):.3f}), "
            f"again / after {rows[-1]['noise']:.3f}; before {rows[-1]['before_ms']:.2f} ms",
            err=as_json,
        )
    if as_json:
        commits = {name: commit(root) for name, root in builds.items() if name != "again"}
        head = {"environment": environment(), **commits, **shape, "starts": starts, "turns": turns}
        click.echo(json.dumps(head | {"cells": rows}, indent=1))


def figures(times: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians over the starts; `again` counts as another `after`."""
    ratios = [quotient(start, name, "before") for start in times for name in ("after", "again")]
    noises = [quotient(start, "again", "after") for start in times]
    return {
        "ratio": round(median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "noise": round(median(noises), 4),
        "noises": [round(noise, 4) for noise in noises],
        "before_ms": round(median(median(start["before"]) for start in times), 4),
    }


def quotient(times: Mapping[str, list[float]], of: str, to: str) -> float:
    """Median over the turns of one start."""
    return median(x / y for x, y in zip(times[of], times[to], strict=True))


def taken(builds: Mapping[str, Path], cell: str, shape: Mapping[str, int], turns: int, start: int) -> dict[str, list[float]]:
    """Milliseconds of a step in every turn of one start; the order of starting, and of a turn, goes round."""
    names = list(builds)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(worker(builds[name], cell, shape)) for name in names[start % 3 :] + names[: start % 3]
        }
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns):
            for name in names[turn % 3 :] + names[: turn % 3]:
                times[name].append(ask(workers[name]))
    return times


@contextmanager
def worker(root: Path, cell: str, shape: Mapping[str, int]) -> Iterator[subprocess.Popen[str]]:
    """A process with a full cache that takes a turn whenever it is asked."""
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'lab'}"}
    words = [sys.executable, str(HERE.with_name("between_worker.py")), *cell.split(":"), json.dumps(dict(shape))]
    with subprocess.Popen(words, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        ask(process, 0)
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], steps: int = STEPS) -> float:
    """Milliseconds of a step, once so many have been taken."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    if not (answer := process.stdout.readline()):
        raise click.ClickException(f"a worker ended with status {process.wait()}; what it said stands above")
    return float(answer)


def commit(root: Path) -> str:
    """What is checked out there."""
    words = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
