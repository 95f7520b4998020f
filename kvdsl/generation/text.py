"""The text to continue, or to measure. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input, read_standard_input


def read_text(path: Path | None) -> str:
    """Read a text file, standard input for `-`, or the book of kvdsl-lab.

    Raises:
        KvdslError: if the file is not UTF-8, or is empty.
    """
    if path is None:
        from kvdsl.assets import book_text

        return book_text()
    try:
        text = read_standard_input().decode() if is_standard_input(str(path)) else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvdslError(f"{path} is not UTF-8 text") from error
    if not text.strip():
        raise KvdslError(f"{path} is empty")
    return text


_PAGE_CHARACTERS = 2800
"""The length of about one and a half printed pages."""


def page(number: int = 3) -> str:
    """Return a page of the book of kvdsl-lab, from the start of a sentence to the end of one."""
    text = read_text(None)
    start = _sentence_end(text, number * _PAGE_CHARACTERS)
    return text[start : _sentence_end(text, start + _PAGE_CHARACTERS)].strip()


def _sentence_end(text: str, at: int) -> int:
    end = text.find(". ", at)
    return len(text) if end < 0 else end + 1
