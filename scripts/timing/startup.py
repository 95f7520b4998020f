#!/usr/bin/env python
"""How long commands take from start to end: interleaved rounds, processor and wall time, as a table for docs/records/commands.md.

scripts/timing/startup.py --python ENVIRONMENT/bin/python

The environment has kvdsl's wheel: a checkout's files may lack bytecode, and are then compiled at every start.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

POLICIES = Path(__file__).resolve().parents[2] / "policies"
COMMANDS = {
    "--help": ["--help"],
    "fmt": ["fmt", "--check", str(POLICIES / "roco.kv")],
    "check": ["check", str(POLICIES / "roco.kv")],
    "explain": ["explain", "roco"],
    "compile": ["compile", "roco"],
    "test": ["test", str(POLICIES / "roco_test.kv")],
    "list": ["list"],
}


@click.command()
@click.option("--python", default=sys.executable, show_default=True, help="The Python of the environment to measure.")
@click.option("--repeats", type=click.IntRange(3), default=15, show_default=True, help="Rounds that are recorded.")
@click.option(
    "--warmup", type=click.IntRange(1), default=1, show_default=True, help="Rounds before that, which fill the caches."
)
def main(python: str, repeats: int, warmup: int) -> None:
    """Print a row for each command: the least and the median of processor time, and of wall time, in seconds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(-warmup, repeats):
            for name, words in COMMANDS.items():
                taken = once([python, "-m", "kvdsl", *words], Path(folder))
                if turn >= 0:
                    times[name].append(taken)
    click.echo("| command | processor, least | median | wall, least | median |\n|---|---|---|---|---|")
    for name, found in times.items():
        cpu, wall = zip(*found, strict=True)
        click.echo(f"| `{name}` | {min(cpu):.2f} | {median(cpu):.2f} | {min(wall):.2f} | {median(wall):.2f} |")


def once(command: list[str], folder: Path) -> tuple[float, float]:
    """Processor and wall seconds of one run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall


if __name__ == "__main__":
    main()
