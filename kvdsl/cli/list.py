"""`kvdsl list`: list the shipped policies."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import json_option, params_as_data, print_json, terminal_width

WIDTH, LEAST, MOST = 110, 24, 20
"""The largest width of a line; the smallest of the description's column; the largest of other columns except the name."""


@dataclass(frozen=True)
class Entry:
    """One policy. `name` is the published spelling; `paper` is None for policies without a paper.

    `gallery` and `found` are its shelf; `exact` and `how` whether it is the paper's method, or how it differs; `kvpress` the equivalent
    presses; `checked` how that was checked; `code` how it compares with the authors' code. They are null or empty if the policy does not
    state them.
    """

    name: str
    file: str
    summary: str
    paper: str | None
    params: list[dict[str, Any]]
    gallery: bool
    found: bool
    year: int | None = None
    arxiv: str | None = None
    exact: bool | None = None
    how: str | None = None
    kvpress: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    code: str | None = None

    @property
    def stem(self) -> str:
        """Its name in commands."""
        return Path(self.file).stem


@click.command()
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Include the gallery of further published methods, exact or approximate, and policies found by `kvdsl search`.",
)
@json_option
def command(everything: bool, as_json: bool) -> None:
    """List the shipped policies.

    Other commands take the name in the first column, for example `kvdsl explain h2o`.
    """
    from kvdsl.diagnostics import wants_color
    from kvdsl.shipped import all_policies, shipped_policies

    entries = [_entry(path) for path in (all_policies() if everything else shipped_policies())]
    if as_json:
        print_json({"policies": [asdict(entry) for entry in entries]})
        return
    columns = {"name": [entry.stem for entry in entries]}
    if everything:
        columns["year"] = [str(entry.year or "") for entry in entries]
    columns["what it does"] = [entry.summary for entry in entries]
    columns["params"] = [
        " ".join(f"{param['name']}={param['default']}".replace(" ", "") for param in entry.params) for entry in entries
    ]
    for line in _table(columns, wide="what it does"):
        click.echo(line, color=wants_color(sys.stdout))


def _table(columns: dict[str, list[str]], wide: str) -> Iterator[str]:
    """Yield a table with headings, as wide as the terminal; cells wrap.

    Args:
        wide: the column that gets the remaining width; the others are as wide as their longest word, up to `MOST`.
    """
    longest = {head: max(len(word) for text in (head, *own) for word in text.split()) for head, own in columns.items()}
    widths = {head: longest[head] if head == "name" else min(longest[head], MOST) for head in columns}
    taken = sum(width for head, width in widths.items() if head != wide) + 2 * (len(columns) - 1)
    widths[wide] = max(LEAST, terminal_width(WIDTH) - taken)
    for number, row in enumerate(zip(*([head, *own] for head, own in columns.items()), strict=True)):
        cells = [textwrap.wrap(text, width) for text, width in zip(row, widths.values(), strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths.values(), strict=True)).rstrip()
            yield click.style(line, bold=True) if number == 0 else line


def _entry(path: Path) -> Entry:
    from kvdsl.compiler import analyse
    from kvdsl.provenance import provenance

    policy = analyse(path).policy
    summary, *rest = paragraphs(policy.doc)
    paper = rest[0] if rest and _cites(rest[0]) else None
    shelf = path.parent.name
    entry = Entry(policy.name, path.name, summary, paper, params_as_data(policy), shelf == "gallery", shelf == "found")
    found = provenance(policy.name, policy.doc)
    if found is None:
        return entry
    return replace(
        entry, paper=found.paper, year=found.year, arxiv=found.arxiv, exact=found.exact, how=found.how, kvpress=found.presses,
        checked=found.checks, code=found.code,
    )  # fmt: skip


def paragraphs(doc: str) -> list[str]:
    """Return the docstring's paragraphs, each as one line, without its sources; at least one."""
    from kvdsl.provenance import prose

    return [" ".join(text.split()) for text in re.split(r"\n\s*\n", prose(doc)) if text.strip()] or ["(no docstring)"]


def _cites(paragraph: str) -> bool:
    """Return whether a paragraph cites a work: titles are in double quotes."""
    return paragraph.count('"') >= 2
