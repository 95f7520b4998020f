"""The text that a model goes on from, or is measured on. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input, read_standard_input


def read_text(path: Path | None) -> str:
    """A text file, in a command `-` for standard input, or the book that comes with kvdsl-lab.

    Raises:
        KvdslError: if the file is not UTF-8, or holds nothing.
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
"""About a printed page and a half."""


def page(number: int = 3) -> str:
    """A page of the book that comes with kvdsl-lab, from the beginning of a sentence to the end of one."""
    text = read_text(None)
    start = _sentence_end(text, number * _PAGE_CHARACTERS)
    return text[start : _sentence_end(text, start + _PAGE_CHARACTERS)].strip()


def _sentence_end(text: str, at: int) -> int:
    end = text.find(". ", at)
    return len(text) if end < 0 else end + 1
