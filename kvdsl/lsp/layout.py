"""The canonical layout of a text, as edits of the lines that are not in it: the cursor stays where it is elsewhere."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import accumulate

from lsprotocol import types as lsp

from kvdsl.diagnostics import Sink
from kvdsl.lsp.document import Document
from kvdsl.syntax.formatter import format_source


def formatting(document: Document) -> list[lsp.TextEdit]:
    """What `kvdsl fmt` would change; nothing where there are syntax errors."""
    after = format_source(document.source, Sink())
    if after is None:
        return []
    old, new = _lines(document.text), _lines(after)
    starts = [0, *accumulate(map(len, old))]
    edits = []
    for kind, i, j, *added in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            edits.append(lsp.TextEdit(document.positions.range(starts[i], starts[j]), "".join(new[slice(*added)])))
    return edits


def _lines(text: str) -> list[str]:
    """With their ends; `str.splitlines` knows other ends than the language does."""
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]
