#!/usr/bin/env python
"""Runs the notebooks of docs/notebooks and writes each, with what it shows, as a page of the site; the pages are not committed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import click
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
MADE = "<!-- Made by scripts/make_notebooks.py; do not edit. -->\n\n"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of kernels: tiny models' threads spin more than they work

SECONDS = 300
"""A cell may take; the first one imports torch and transformers, another builds kernels."""


def notebooks() -> list[Path]:
    """Their files."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def run(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in a folder; a cell that fails and is not tagged `raises-exception` ends it."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, coalesce_streams=True, resources=where).execute()
    return notebook


def page(notebook: Any, name: str) -> str:
    """A notebook that was run, as Markdown."""
    parts = [_cell(cell) for cell in notebook.cells]
    parts.insert(1, f"[This notebook]({name}.ipynb), run by `make docs`.")
    return MADE + "\n\n".join(part for part in parts if part) + "\n"


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return str(cell.source)
    language = "kv" if cell.source.startswith("%%kv") else "python"
    return "\n\n".join([f"``` {{.{language} .cell}}\n{cell.source}\n```", *_outputs(cell)])


def _outputs(cell: Any) -> Iterator[str]:
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            png = "".join(data["image/png"].split())
            yield f'<img alt="what the cell above draws" src="data:image/png;base64,{png}">'
        elif "text/html" in data:
            yield f'<div class="output">{_without_blank_lines(data["text/html"])}</div>'
        elif output.get("name") != "stderr" and (text := output.get("text") or data.get("text/plain")):
            yield f'<pre class="output">{_without_blank_lines(escape(text.rstrip(), quote=False))}</pre>'


def _without_blank_lines(html: str) -> str:
    """HTML that Markdown takes as one block."""
    return re.sub(r"\n(?=\s*\n)", "&#10;", html.rstrip())


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    for path in notebooks():
        path.with_suffix(".md").write_text(page(run(path, path.parent), path.stem), encoding="utf-8")
        click.echo(f"written: docs/notebooks/{path.stem}.md", file=sys.stderr)


if __name__ == "__main__":
    main()
