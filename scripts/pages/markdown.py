"""What the pages share: where they lie, and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from scripts.prose import wrapped

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"


_MADE_PART = re.compile(r"(?<=<!-- made: )(.+)( -->\n)(?:.*\n)*?(?=<!-- end -->\n)")


def with_parts(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A written page with its made parts, which stand between `<!-- made: NAME -->` and `<!-- end -->`, made anew."""
    text = (DOCS / page).read_text(encoding="utf-8")
    named = [part[1] for part in _MADE_PART.finditer(text)]
    if sorted(named) != sorted(parts):
        raise ValueError(f"{page} has the made parts {sorted(named)}, and should have {sorted(parts)}")
    return wrapped(_MADE_PART.sub(lambda part: f"{part[1]}{part[2]}{parts[part[1]]().rstrip()}\n", text))


def table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in rows)


def escaped(text: str) -> str:
    """Text in a Markdown table."""
    return re.sub(r"([*_<>])", r"\\\1", text)
