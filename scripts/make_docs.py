#!/usr/bin/env python
"""Writes what is made in docs/: the made parts of pages that people write, and the pages that are made whole, for the site alone.

The first are committed, and `--check` compares them; the others are not. What is hand-written of a policy, such as what its authors'
code does, lies in `docs/notes/STEM.md` and is put into its page; what is of a paper's results, such as why something does not hold, in
`docs/notes/results/PAPER.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "lab")]  # a checkout needs no installation for this

from scripts.pages import choosing, generation, language, search  # noqa: E402
from scripts.pages.diagnostics import diagnostics_page  # noqa: E402
from scripts.pages.markdown import DOCS, ROOT, with_parts  # noqa: E402
from scripts.pages.policies import policy_pages  # noqa: E402
from scripts.pages.reach import reach_page  # noqa: E402
from scripts.pages.results import results_page  # noqa: E402

WRITTEN: dict[str, dict[str, Callable[[], str]]] = {
    "choosing.md": choosing.CHOOSING,
    "language.md": language.PARTS,
    "records/models.md": generation.PARTS,
    "records/quality.md": choosing.QUALITY_RECORD,
    "search.md": search.PARTS,
}
"""Path below docs/ of a page that is written by hand -> what makes its parts, by their names."""

MADE: dict[str, Callable[[], str]] = {"diagnostics.md": diagnostics_page, "reach.md": reach_page, "results.md": results_page}
"""Path below docs/ -> what makes the whole page, of those that are not committed, beside the policies'."""


def bring_up_to_date(files: dict[Path, str], check: bool) -> NoReturn:
    """Writes what has changed, or only says it; the process ends with 1 if that is not yet written."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        click.echo(f"{'not up to date' if check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(1 if check and stale else 0)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a committed page is not up to date.")
def main(check: bool) -> None:
    pages = {name: with_parts(name, parts) for name, parts in WRITTEN.items()}
    if not check:
        pages |= {name: make() for name, make in MADE.items()} | policy_pages()
    bring_up_to_date({DOCS / name: text for name, text in pages.items()}, check)


if __name__ == "__main__":
    main()
