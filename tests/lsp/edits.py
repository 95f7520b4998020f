"""Random edits of policies, as a hand that types, slips, pastes and deletes makes them; and every question that an editor asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from lsprotocol import types as lsp

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.lsp import Document
from kvdsl.lsp.completion import completion
from kvdsl.lsp.diagnostics import diagnostics, fixes, formatting
from kvdsl.lsp.hints import inlay_hints, lenses
from kvdsl.lsp.hover import hover
from kvdsl.lsp.navigation import RenameError, definition, highlights, references, rename
from kvdsl.lsp.outline import foldings, symbols
from kvdsl.lsp.signature import signature
from kvdsl.lsp.tokens import semantic_tokens
from kvdsl.shipped import shipped_policies
from kvdsl.syntax.parser import keywords

CHARACTERS = " \t\n\r(){};,=.\"'#0123456789abxyz_+-*/%<>!é中😀\u2028\0"
EDITS_A_TEXT = 20
"""After so many edits another policy is begun with."""


def texts() -> list[str]:
    """The shipped policies and their tests."""
    folder = shipped_policies()[0].parent
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.kv"))]


def edited(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """So many texts, each an edit away from the one before, and where the edit ends."""
    chance, originals = random.Random(seed), texts()
    words = sorted({*keywords(), *NAMED_FUNCTIONS, *NAMED_INPUTS})
    text = ""
    for number in range(count):
        if number % EDITS_A_TEXT == 0:
            text = chance.choice(originals)
        text, place = _edit(text, chance, originals, words)
        yield text, place


def _edit(text: str, chance: random.Random, originals: list[str], words: list[str]) -> tuple[str, int]:
    at = chance.randrange(len(text) + 1)
    kind = chance.randrange(7)
    end, new = at, ""
    if kind == 0:  # a slip
        new = chance.choice(CHARACTERS)
    elif kind == 1:  # a word
        new = chance.choice(words) + chance.choice(["", " ", "(", "\n"])
    elif kind == 2:  # backspace, a few times
        end = min(len(text), at + chance.randrange(1, 8))
    elif kind == 3:  # a line goes
        end = text.find("\n", at) + 1 or len(text)
    elif kind == 4:  # a part of another policy comes
        other = chance.choice(originals)
        start = chance.randrange(len(other))
        new = other[start : start + chance.randrange(80)]
    elif kind == 5:  # a character is another one
        end, new = min(len(text), at + 1), chance.choice(CHARACTERS)
    else:  # what comes is not written yet
        end = len(text) if chance.random() < 0.2 else min(len(text), at + 1)
    return text[:at] + new + text[end:], at + len(new)


def _try_rename(document: Document, position: lsp.Position) -> object:
    try:
        return rename(document, position, "other", [])
    except RenameError as refused:
        return str(refused)


QUESTIONS: dict[str, Callable[[Document, lsp.Position], object]] = {
    "hover": hover,
    "completion": completion,
    "signature": signature,
    "definition": definition,
    "references": lambda document, position: references(document, position, []),
    "highlights": highlights,
    "rename": _try_rename,
    "diagnostics": lambda document, _: diagnostics(document),
    "symbols": lambda document, _: symbols(document),
    "foldings": lambda document, _: foldings(document),
    "formatting": lambda document, _: formatting(document),
    "tokens": lambda document, _: semantic_tokens(document),
    "hints": lambda document, _: inlay_hints(document, document.positions.whole()),
    "lenses": lambda document, _: lenses(document),
    "fixes": lambda document, position: fixes(document, lsp.Range(position, position)),
}
"""Everything that can be asked of a text and a place in it."""
