#!/usr/bin/env python
"""Prose of Markdown in lines of at most 100 columns; code, tables, headings and HTML stay as they are."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent

WIDTH = 100
_LEFT = re.compile(r"\s*([|#<>]|```|$)")
_ITEM = re.compile(r"(\s*)([-*]|\d+\.)\s+")
_MARK = re.compile(r"\s*([-+*]|\d+\.)(\s|$)")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
_STAYS = "\x00"
"""In the place of a space at which no line ends: what stands in code is copied."""


def wrapped(text: str) -> str:
    """The text with its paragraphs and items wrapped."""
    found: list[str] = []
    waiting: list[str] = []
    code = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if code or fence or _LEFT.match(line):
            found += [*_filled(waiting), line]
            waiting = []
        elif _ITEM.match(line):
            found += _filled(waiting)
            waiting = [line]
        else:
            waiting.append(line)
        code ^= fence
    return "\n".join([*found, *_filled(waiting)])


def _filled(lines: list[str]) -> list[str]:
    """One paragraph or item."""
    if not lines:
        return []
    item = _ITEM.match(lines[0])
    inner = " " * (len(item[0]) if item else len(lines[0]) - len(lines[0].lstrip()))
    text = _CODE.sub(lambda code: code[0].replace(" ", _STAYS), " ".join(line.strip() for line in lines))
    first = item[1] if item else inner
    for width in range(WIDTH, WIDTH // 2, -1):  # a narrower one where a line would begin another item
        filled = textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
        )
        if not any(_MARK.match(line) for line in filled[1:]):
            return [line.replace(_STAYS, " ") for line in filled]
    return lines


def pages() -> Iterator[Path]:
    """The pages that people write: README, CONTRIBUTING, CHANGELOG, docs, benchmarks and the records' own."""
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks", "results/README.md", "docs"]
    told = subprocess.run(["git", "ls-files", "--", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = ("docs/notebooks/",)
    return (ROOT / name for name in told.splitlines() if name.endswith(".md") and not name.startswith(made))


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page has longer lines.")
def main(check: bool) -> None:
    changed = {
        path: text for path in pages() if (text := wrapped(path.read_text(encoding="utf-8"))) != path.read_text("utf-8")
    }
    for path, text in changed.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        click.echo(f"{'has long lines' if check else 'wrapped'}: {path.relative_to(ROOT)}")
    sys.exit(1 if check and changed else 0)


if __name__ == "__main__":
    main()
