#!/usr/bin/env python
"""Every acceptance criterion of the finished issues: its measured value, its bound and the verdict; writes accept.json.

A criterion is a function in `scripts/acceptance/issue_N.py`, or a line of `held.py` that names the tests which hold it: those are
not run here, but by `make test`, `make test-nightly` and CI. The exit code is 1 if one fails.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from acceptance.registry import CRITERIA, FAIL, HELD, OPEN, PASS, REPO, Result, judge
from rich import box
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(REPO), str(REPO / "lab")]  # a checkout needs no installation for this

COLORS = {PASS: "green", HELD: "green", FAIL: "red", OPEN: "yellow"}


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--issue", type=int, help="Of one issue only.")
@click.option("--only", default="", help="Only criteria whose name holds this.")
@click.option("--list", "listing", is_flag=True, help="Name the criteria, and measure nothing.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=REPO / "accept.json", show_default="accept.json"
)
def main(issue: int | None, only: str, listing: bool, out: Path) -> None:
    for path in sorted(Path(__file__).with_name("acceptance").glob("*.py")):
        importlib.import_module(f"acceptance.{path.stem}")
    CRITERIA.sort(key=lambda one: one.issue)
    chosen = [one for one in CRITERIA if issue in (None, one.issue) and only.lower() in one.name.lower()]
    if not chosen:
        raise click.ClickException("there is no such criterion; `--list` names them")
    if listing:
        for one in chosen:
            click.echo(f"{one.issue}  {one.name}")
        return
    console = Console(stderr=True)
    results = []
    for number, one in enumerate(chosen, 1):
        with console.status(f"{number} of {len(chosen)}: {one.name}"):
            results.append(judge(one))
        if not console.is_terminal:
            console.print(f"{results[-1].verdict:<5} {one.name}", highlight=False, markup=False)
    show(results)
    write(results, out)
    sys.exit(any(one.verdict == FAIL for one in results))


def show(results: list[Result]) -> None:
    """A table of the results, and how many there are of each verdict."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("issue", "criterion", "measured", "bound", "verdict"):
        table.add_column(name, overflow="fold")
    for one in results:
        verdict = f"[{COLORS[one.verdict]}]{one.verdict}[/]"
        table.add_row(str(one.issue), _plain(one.name), _plain(one.value), _plain(one.bound), verdict)
    console.print(table)
    counts = (f"{sum(one.verdict == verdict for one in results)} {verdict}" for verdict in COLORS)
    console.print(", ".join(counts))


def _plain(value: object) -> str:
    from rich.markup import escape

    return escape(f"{value:g}" if isinstance(value, float) else str(value))


def write(results: list[Result], out: Path) -> None:
    """accept.json."""
    from kvdsl.environment import environment

    whole = {"format_version": "1.0", "environment": environment(), "criteria": [asdict(one) for one in results]}
    out.write_text(json.dumps(whole, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
