"""Attack kvdsl, and write a report of what was tried and what survived."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvdsl.cli.progress import progress
from scripts.torture.registry import ATTACKS, Attack, carry_out

REPORT = Path("results/torture.json")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this group or attack (or those with this in their name); may be repeated.",
)
@click.option("--quick", is_flag=True, help="A few trials of each, to see that the attacks work.")
@click.option("--count", type=click.IntRange(min=1), help="Trials of each, in place of its own number.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random moments, places and sizes.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=REPORT, show_default=True, help="The report."
)
@click.option("--list", "listing", is_flag=True, help="Name the attacks, and carry out none.")
def main(only: tuple[str, ...], quick: bool, count: int | None, seed: int, out: Path, listing: bool) -> None:
    """Attack kvdsl, and write a report of what was tried and what survived.

    The exit code is 1 if anything did not survive, 2 if the attacks could not begin.

    \b
    Examples:
      python -m scripts.torture --list
      python -m scripts.torture --quick --out /tmp/torture.json
      python -m scripts.torture --only kills --count 20
    """
    chosen = _named(registered(), only) if only else registered()
    if not chosen:
        raise click.UsageError("there is no such attack; `--list` names them")
    if listing:
        for one in chosen:
            click.echo(f"{one.group}: {one.name} ({one.count} times): {one.what}")
        return
    environment = surroundings()
    others, rows = _others(out, chosen, environment) if only else [], []
    for one in chosen:
        number = count or (one.quick if quick else one.count)
        with progress(one.name, number) as advance:
            rows.append(carry_out(one, seed, number, advance))
        _tell(rows[-1])
        write(environment, others + rows, out)  # what is done is not lost if the next one takes the machine down
    show(rows)
    sys.exit(any(row["survived"] < row["tried"] for row in rows))


def registered() -> list[Attack]:
    """Every attack of the modules in this folder, in their order."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        importlib.import_module(f"scripts.torture.{path.stem}")
    return ATTACKS


def _named(attacks: list[Attack], words: tuple[str, ...]) -> list[Attack]:
    """The attacks of which a word is the group, the name, or, where it is neither, a part of the name."""
    chosen = set()
    for word in words:
        exact = {one for one in attacks if word.lower() in (one.group, one.name.lower())}
        chosen |= exact or {one for one in attacks if word.lower() in one.name.lower()}
    return [one for one in attacks if one in chosen]


def _others(out: Path, chosen: list[Attack], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a report that are not made anew; they must be of this machine and these versions."""
    if not out.exists():
        return []
    found = json.loads(out.read_text(encoding="utf-8"))
    if found["environment"] != environment:
        raise click.UsageError(f"{out} is of another machine or other versions; name another file with `--out`")
    anew = {(one.group, one.name) for one in chosen}
    return [row for row in found["attacks"] if (row["group"], row["attack"]) not in anew]


def surroundings() -> dict[str, Any]:
    """Machine and versions."""
    from kvdsl.build.cxx import compiler, compiler_version
    from kvdsl.environment import environment
    from kvdsl.errors import KvdslError

    try:
        built_by = compiler_version(*compiler())
    except KvdslError as error:
        built_by = str(error)
    return environment() | {"compiler": built_by}


def write(environment: dict[str, Any], rows: list[dict[str, Any]], out: Path) -> None:
    """The report, in order."""
    ordered = sorted(rows, key=lambda row: (row["group"], row["attack"]))
    whole = {"format_version": "1.0", "environment": environment, "attacks": ordered}
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    beside.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, out)


def _tell(row: dict[str, Any]) -> None:
    click.echo(f"{row['attack']}: {row['survived']} of {row['tried']} survived in {row['seconds']:.0f} s", err=True)
    for note in row["notes"]:
        click.echo(f"  {note}", err=True)


def show(rows: list[dict[str, Any]]) -> None:
    """A table of the report."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("group", "attack", "tried", "survived", "seconds"):
        table.add_column(name, justify="left" if name in ("group", "attack") else "right")
    for row in rows:
        color = "green" if row["survived"] == row["tried"] else "red"
        survived = f"[{color}]{row['survived']:,}[/]" if row["tried"] else "not run"
        table.add_row(row["group"], escape(row["attack"]), f"{row['tried']:,}", survived, f"{row['seconds']:,.0f}")
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
