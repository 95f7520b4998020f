"""Draws sentences that people read from a revision of the repository: `python -m scripts.sentences c3e44e49`.

The same revision, seed and count give the same sentences. `docs/records/sentences.md` shows fifty with what became of each.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
from collections.abc import Iterator

import click

from scripts.style import ROOT

ROOMS = (
    "README.md",
    "docs",
    "kvdsl/cli",
    "kvdsl/codes.py",
    "kvdsl/explain",
    "kvdsl/lsp",
    "kvdsl/build",
    "kvdsl/models",
    "kvdsl/scenarios",
)
SHARES = {"page": 0.4, "docstring": 0.4, "message": 0.2}

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LEFT = re.compile(r"^(#|\||<|!\[| *\$)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])|\n\s*(?:-|\d+\.)\s+")


def sentences(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Each kind and sentence of a file: of a page's paragraphs, of docstrings, and of strings that are raised or explain a code."""
    if name.endswith(".md"):
        for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", text)):
            if not _LEFT.match(paragraph):
                yield from (("page", one) for one in _split(paragraph))
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield from (("docstring", one) for one in _split(doc.split("\n\n")[0]))
        raised = isinstance(node, ast.Raise) or (name.endswith("codes.py") and isinstance(node, ast.Call))
        if raised:
            strings = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from (
                ("message", one)
                for string in strings
                if "\n" not in string
                for one in _split(string)
                if len(one.split()) >= 9
            )


def _split(text: str) -> list[str]:
    found = (" ".join(one.split()) for one in _SENTENCE.split(text))
    return [one for one in found if len(one.split()) >= 6]


def draw(revision: str, seed: int, count: int) -> list[tuple[str, str, str]]:
    """The kinds, files and sentences that the seed draws."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = [
        name
        for name in git("ls-tree", "-r", "--name-only", revision, "--", *ROOMS).splitlines()
        if name.endswith((".md", ".py"))
    ]
    found = [(kind, name, one) for name in names for kind, one in sentences(name, git("show", f"{revision}:{name}"))]
    chance = random.Random(seed)
    drawn = []
    for kind, share in SHARES.items():
        drawn += chance.sample(sorted({one for one in found if one[0] == kind}), round(share * count))
    return drawn


@click.command(help=__doc__)
@click.argument("revision")
@click.option("--seed", default=57, show_default=True)
@click.option("--count", default=50, show_default=True)
def main(revision: str, seed: int, count: int) -> None:
    for number, (kind, name, sentence) in enumerate(draw(revision, seed, count), 1):
        click.echo(f"{number}. {kind}, {name}: {sentence}")


if __name__ == "__main__":
    main()
