"""`kvdsl reproduce`: a paper's tables and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import FORMAT_VERSION, json_option
from kvdsl.cli.options import BACKENDS, dtype_option, model_option, refuse_triton
from kvdsl_lab.cli.measuring import names, text_option
from kvdsl_lab.reproduce import PAPERS

_LIST = "\n".join(f"  {name:<9}{line}" for name, line in PAPERS.items())

_HELP = f"""Reproduce a paper's tables and figures, on the model that ships with kvdsl-lab or on another.

\b
Papers:
{_LIST}

OUT/PAPER.json has every row and, for each of the paper's claims, whether it holds. OUT/PAPER.md and OUT/PAPER.tex have the tables,
OUT/PAPER/ the figures as PNG and SVG. Every part is saved when it is measured: a stopped run continues where it stopped, and a
complete one only draws its tables again, unless you pass --fresh.

\b
Examples:
  kvdsl reproduce sparcas --quick
  kvdsl reproduce sparcas --model path/to/model --out results/mine
  kvdsl reproduce roco --model smollm2 --only figure5,table2 --out results/smollm2
"""


@click.command(help=_HELP)
@click.argument("paper", type=click.Choice(list(PAPERS)))
@click.option("--quick", is_flag=True, help="Toy sizes: runs in about a minute.")
@model_option
@text_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
              help="Folder for the results.")  # fmt: skip
@click.option("--only", metavar="A,B", help="Experiments to run [default: all; an unknown name lists them].")
@click.option("--fresh", is_flag=True, help="Discard earlier measurements.")
@click.option("--no-plots", is_flag=True, help="Tables only; needs no matplotlib.")
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's].")
@click.option("--repeats", type=click.IntRange(3), help="Repeats of every timing [default: 11, quick: 3].")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
@dtype_option
@json_option
def command(
    paper: str, quick: bool, model: str | None, text: Path | None, out: Path, only: str | None, fresh: bool, no_plots: bool, backend: str,
    threads: int | None, repeats: int | None, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """See `_HELP`, which lists the papers."""
    refuse_triton(backend)
    import torch

    from kvdsl.cli.progress import stages
    from kvdsl.environment import environment
    from kvdsl.files import write_whole
    from kvdsl_lab.reproduce import Setup, plots, tables
    from kvdsl_lab.reproduce.run import count, load_paper, reproduce

    if not no_plots:
        plots.check_installed()
    if threads:
        torch.set_num_threads(threads)
    wanted = load_paper(paper)
    setup = Setup(quick, model, dtype, text, backend, seed, repeats or (3 if quick else 11))
    head = {"format_version": FORMAT_VERSION, "environment": environment(dtype=setup.dtype_name, seed=seed)}
    chosen = names(only or "")
    with stages(paper, count(wanted, setup, chosen)) as tick:
        result = reproduce(wanted, setup, out, head, only=chosen, fresh=fresh, drawn=not no_plots, tick=tick)
    write_whole(out / f"{paper}.md", tables.markdown(wanted, result))
    write_whole(out / f"{paper}.tex", tables.latex(wanted, result))
    if not no_plots:
        plots.draw_all(wanted, result, out)
    if as_json:
        click.echo(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _tell(result, out, paper)


def _tell(result: Mapping[str, Any], out: Path, paper: str) -> None:
    """Print which claims hold, and where the results are."""
    words = {True: "holds", False: "does not hold", None: "open"}
    for experiment in result["experiments"]:
        for one in experiment["findings"]:
            click.echo(f"{experiment['source']}: {words[one['holds']]}: {one['claim']} ({one['measured']})")
    measured = sum(bool(experiment["rows"]) for experiment in result["experiments"])
    click.echo(f"{measured} tables and figures, {result['seconds']:.0f} s: {out / paper}.md, .tex, .json")
