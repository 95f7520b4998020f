"""`kvdsl list`: the policies that come with kvdsl."""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import json_option, params_as_data, print_json


@dataclass(frozen=True)
class Entry:
    """One policy. `name` is the published spelling; `paper` is None for policies that no paper describes.

    `gallery` and `found` say on which shelf it lies; `exact` and `how` whether it is the paper's method, or how it differs; `kvpress` which
    of its presses do the same; `checked` how that was checked; `code` how far the authors' code agrees. They are null or empty where the
    policy says nothing of it.
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
        """What commands call it."""
        return Path(self.file).stem


@click.command()
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="The gallery, too: what else was published, exactly or approximately; and what `kvdsl search` found.",
)
@json_option
def command(everything: bool, as_json: bool) -> None:
    """List the policies that come with kvdsl.

    The name in the first column is what other commands take, for example `kvdsl explain h2o`.
    """
    from kvdsl.shipped import all_policies, shipped_policies

    entries = [_entry(path) for path in (all_policies() if everything else shipped_policies())]
    if as_json:
        print_json({"policies": [asdict(entry) for entry in entries]})
        return
    width = max(len(entry.stem) for entry in entries)
    columns = max(60, min(shutil.get_terminal_size().columns, 110))
    for entry in entries:
        lines = textwrap.wrap(entry.summary, columns - width - 4) + _below(entry, everything)
        click.echo(f"{entry.stem:<{width}}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{'':<{width}}  {line}")


def _below(entry: Entry, everything: bool) -> list[str]:
    """The line of its params; where the gallery is listed, with the year, and whether it is exact."""
    params = " ".join(f"{param['name']}={param['default']}".replace(" ", "") for param in entry.params)
    reach = {None: "", True: "exact", False: "approximate"}[entry.exact if everything else None]
    told = ", ".join(str(part) for part in (entry.year, reach) if part and reach)
    return ["; ".join(part for part in (told, params) if part)] if told or params else []


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
    """The docstring's paragraphs, each as one line, without what it says of its source; at least one."""
    from kvdsl.provenance import prose

    return [" ".join(text.split()) for text in re.split(r"\n\s*\n", prose(doc)) if text.strip()] or ["(no docstring)"]


def _cites(paragraph: str) -> bool:
    """Whether a paragraph names a work: titles stand in double quotes."""
    return paragraph.count('"') >= 2
