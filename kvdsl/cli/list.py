"""`kvdsl list`: the policies that come with kvdsl."""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import json_option, params_as_data, print_json


@dataclass(frozen=True)
class Entry:
    """One policy. `name` is the published spelling; `paper` is None for policies that no paper describes."""

    name: str
    file: str
    summary: str
    paper: str | None
    params: list[dict[str, Any]]


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List the policies that come with kvdsl.

    The name in the first column is what other commands take, for example `kvdsl explain h2o`.
    """
    from kvdsl.shipped import shipped_policies

    entries = [_entry(path) for path in shipped_policies()]
    if as_json:
        print_json({"policies": [asdict(entry) for entry in entries]})
        return
    width = max(len(Path(entry.file).stem) for entry in entries)
    columns = max(60, min(shutil.get_terminal_size().columns, 110))
    for entry in entries:
        params = " ".join(f"{param['name']}={param['default']}".replace(" ", "") for param in entry.params)
        lines = textwrap.wrap(entry.summary, columns - width - 4) + ([params] if params else [])
        click.echo(f"{Path(entry.file).stem:<{width}}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{'':<{width}}  {line}")


def _entry(path: Path) -> Entry:
    from kvdsl.compiler import analyse

    policy = analyse(path).policy
    summary, *rest = paragraphs(policy.doc)
    paper = rest[0] if rest and _cites(rest[0]) else None
    return Entry(policy.name, path.name, summary, paper, params_as_data(policy))


def paragraphs(doc: str) -> list[str]:
    """The docstring's paragraphs, each as one line; at least one."""
    return [" ".join(text.split()) for text in re.split(r"\n\s*\n", doc) if text.strip()] or ["(no docstring)"]


def _cites(paragraph: str) -> bool:
    """Whether a paragraph names a work: titles stand in double quotes."""
    return paragraph.count('"') >= 2
