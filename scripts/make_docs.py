#!/usr/bin/env python
"""Writes the pages of docs/ that are made from the sources: the diagnostics, the language's reference, a page per policy, the results.

The pages of the policies are for the site only, and are not committed.

What is hand-written of a policy, such as what its authors' code does, lies in `docs/notes/STEM.md` and is put into its page; what is
of a paper's results, such as why something does not hold, in `docs/notes/results/PAPER.md`; and what is said around other tables in
`docs/notes/pages`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "lab")]  # a checkout needs no installation for this

from scripts.pages.choosing import choosing_page  # noqa: E402
from scripts.pages.diagnostics import diagnostics_page  # noqa: E402
from scripts.pages.generation import generation_page  # noqa: E402
from scripts.pages.language import language_reference  # noqa: E402
from scripts.pages.markdown import DOCS, ROOT  # noqa: E402
from scripts.pages.policies import policy_pages  # noqa: E402
from scripts.pages.reach import reach_page  # noqa: E402
from scripts.pages.results import results_page  # noqa: E402
from scripts.pages.search import search_page  # noqa: E402

COMMITTED: dict[str, Callable[[], str]] = {
    "choosing.md": choosing_page,
    "diagnostics.md": diagnostics_page,
    "language.md": language_reference,
    "performance/models.md": generation_page,
    "reach.md": reach_page,
    "results.md": results_page,
    "search.md": search_page,
}
"""Path below docs/ -> what makes the text, of the pages that are committed."""


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
    pages = {name: make() for name, make in COMMITTED.items()} | ({} if check else policy_pages())
    bring_up_to_date({DOCS / name: text for name, text in pages.items()}, check)


if __name__ == "__main__":
    main()
