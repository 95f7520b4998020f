"""Prose of Markdown in lines of at most 100 columns; code, tables, headings and HTML stay as they are."""

from __future__ import annotations

import re
import textwrap

WIDTH = 100
_LEFT = re.compile(r"\s*([|#<>]|```|$)")
_ITEM = re.compile(r"(\s*)([-*]|\d+\.)\s+")
_MARK = re.compile(r"\s*([-+*]|\d+\.)(\s|$)")


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
    text = " ".join(line.strip() for line in lines)
    first = item[1] if item else inner
    filled = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
    )
    if any(_MARK.match(line) for line in filled[1:]):  # a line that would begin another item
        return lines
    return filled
