"""What the pages share: where they lie, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"


def note(*where: str) -> str:
    """What is hand-written, in a file below docs/notes."""
    return DOCS.joinpath("notes", *where).read_text(encoding="utf-8")


def table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in rows)


def escaped(text: str) -> str:
    """Text in a Markdown table."""
    return re.sub(r"([*_<>])", r"\\\1", text)
