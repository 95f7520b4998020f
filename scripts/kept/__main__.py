"""Record what every shipped policy keeps and attends to, and compare a record with what they do now."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # a checkout needs no installation for this

from kvdsl.shipped import all_policies  # noqa: E402
from scripts.kept.machines import BACKENDS  # noqa: E402
from scripts.kept.record import UnstableError, compare, record  # noqa: E402
from scripts.kept.texts import TEXTS  # noqa: E402

CHUNK = 8
"""Policies that a process takes at once; their C++ kernels are built together."""


def _list_of(names: Sequence[str]) -> Callable[[Any, Any, str], list[str]]:
    def read(context: click.Context, param: click.Parameter, text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise click.BadParameter(f"{', '.join(unknown)} is none of {', '.join(names)}")
        return chosen

    return read


backends_option = click.option(
    "--backends", default=",".join(BACKENDS), show_default=True, callback=_list_of(BACKENDS),
    help="Beside the interpreter; Triton's kernels run in Triton's interpreter.",
)  # fmt: skip
jobs_option = click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
stems_argument = click.argument("stems", nargs=-1, metavar="[POLICY]...")


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


@main.command("record")
@stems_argument
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The record.")
@jobs_option
def record_command(stems: tuple[str, ...], out: Path, jobs: int) -> None:
    """Record all policies anew, or these in a record that there is already: what the interpreter does, and torch does likewise.

    `compare` tries the kernels, which take longer.

    \b
    Examples:
      python scripts/kept record --out tests/kept/kept.json --jobs 2
      python scripts/kept record snapkv adakv --out tests/kept/kept.json
    """
    shipped = [path.stem for path in all_policies()]
    unknown = [stem for stem in stems if stem not in shipped]
    if unknown:
        raise click.UsageError(f"there is no shipped policy {', '.join(unknown)}")
    known = json.loads(out.read_text(encoding="utf-8")) if stems and out.exists() else {}
    try:
        made = in_processes(record, list(stems) or shipped, (), jobs)
    except UnstableError as error:
        raise click.ClickException(str(error)) from error
    lines = [f"{json.dumps(stem)}: {json.dumps(one, sort_keys=True)}" for stem, one in sorted((known | made).items())]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    click.echo(f"recorded {len(made)} policies: {out}, {out.stat().st_size / 1000:.0f} kB")


@main.command("compare")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@stems_argument
@backends_option
@click.option(
    "--texts", default=",".join(TEXTS), show_default=True, callback=_list_of(list(TEXTS)), help="Which texts to run."
)
@jobs_option
def compare_command(file: Path, stems: tuple[str, ...], backends: list[str], texts: list[str], jobs: int) -> None:
    """Compare a record with what its policies do now; the exit code is 1 if anything differs.

    \b
    Examples:
      python scripts/kept compare tests/kept/kept.json --jobs 2
      python scripts/kept compare tests/kept/kept.json --backends torch --texts 48,chat roco snapkv
    """
    known = json.loads(file.read_text(encoding="utf-8"))
    missing = [stem for stem in stems if stem not in known]
    if missing:
        raise click.UsageError(f"{file} does not tell of {', '.join(missing)}")
    chosen = list(stems) or list(known)
    found = in_processes(compare, chosen, (backends, texts), jobs, known)
    for stem in sorted(found):
        click.echo(f"{stem}:")
        for line in found[stem]:
            click.echo(f"  {line}")
    unknown = [] if stems else sorted({path.stem for path in all_policies()} - {*known})
    if unknown:
        click.echo(f"not recorded: {', '.join(unknown)}")
    click.echo(f"{len(chosen)} policies, {len(found)} of which differ")
    sys.exit(1 if found or unknown else 0)


def in_processes(
    work: Callable[..., dict[str, Any]],
    stems: Sequence[str],
    more: tuple[Any, ...],
    jobs: int,
    known: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What is found of the policies, chunk by chunk in processes of their own, which says on standard error how far it is."""
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # before Triton and torch are imported there
    parts = [stems[start : start + CHUNK] for start in range(0, len(stems), CHUNK)]
    made: dict[str, Any] = {}
    begun, done = time.perf_counter(), 0
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        sent = {
            pool.submit(work, part if known is None else {stem: known[stem] for stem in part}, *more): part for part in parts
        }
        for future in as_completed(sent):
            made |= future.result()
            done += len(sent[future])
            click.echo(f"{done}/{len(stems)} policies, {time.perf_counter() - begun:.0f} s", err=True)
    return made


if __name__ == "__main__":
    main()
