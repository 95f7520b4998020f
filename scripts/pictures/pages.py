"""Pages as Debian's Chromium shows them: the playground, and those that kvdsl's commands and notebooks make."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from scripts import make_notebooks, make_playground

SCRIPT = Path(__file__).with_name("pages.mjs")
COLOURS = 128
"""Of a picture; a page has few, and a file with a table of them is a third as large."""

SHOWN = re.compile(r"policy (Calm|Hasty)|^cache$|Calm\(model")
"""Cells of the notebook that its picture has room for: a policy, one with an error, a cache at work, and what that shows of itself."""


def explain(out: Path) -> None:
    """What `kvdsl explain` says of a policy, as a page."""

    def make(folder: Path) -> None:
        (folder / "index.html").write_bytes(_kvdsl("explain", "h2o", "--format", "html"))

    _picture("explain", make, out)


def trace(out: Path) -> None:
    """What `kvdsl trace` says of the reference model reading a page of a book."""

    def make(folder: Path) -> None:
        _kvdsl("trace", "roco", "--set", "budget=64", "--max-new-tokens", "24", "--out", str(folder / "index.html"))

    _picture("trace", make, out)


def notebook(out: Path) -> None:
    """The first of the notebooks, run: a policy in a cell, and what a cache shows of itself."""
    from nbconvert import HTMLExporter

    def make(folder: Path) -> None:
        ran = make_notebooks.run(make_notebooks.NOTEBOOKS / "first_policy.ipynb", folder)
        ran.cells = [cell for cell in ran.cells if SHOWN.search(cell.source)]
        for cell in ran.cells:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        html, _ = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True).from_notebook_node(ran)
        (folder / "index.html").write_text(html, encoding="utf-8")

    _picture("notebook", make, out)


def playground(out: Path) -> None:
    """The playground, as it shows which tokens stay."""
    _picture("playground", make_playground.make, out)


def _picture(name: str, make: Callable[[Path], None], out: Path) -> None:
    """Have a page made in a folder, and write what pages.mjs shows of it, in few colours."""
    make_playground.install()
    with tempfile.TemporaryDirectory() as parent:
        folder, whole = Path(parent) / "page", Path(parent) / "whole.png"
        folder.mkdir()
        make(folder)
        playwright = make_playground.BUILD / "node_modules" / "playwright-core"
        make_playground.visit(folder, str(SCRIPT), str(playwright), name, str(whole))
        with Image.open(whole) as taken:
            few = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            few.save(out, optimize=True)


def _kvdsl(*words: str) -> bytes:
    return subprocess.run([sys.executable, "-m", "kvdsl", *words], check=True, stdout=subprocess.PIPE).stdout
