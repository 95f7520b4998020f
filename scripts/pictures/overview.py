"""The README's picture: a policy, its kernel, and which tokens it keeps.

The policy is the README's first, without its docstring; the loops are taken from its generated C++; SmolLM2 reads a page of a book
under it (`kvdsl models get smollm2`). Nothing in the picture is drawn by hand.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from pygments.lexer import Lexer
from pygments.lexers import CppLexer
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType

import kvdsl
from kvdsl.assets import book_text
from kvdsl.highlight import KvLexer
from kvdsl.runtime.hf.versions import with_cache
from scripts.pictures.home import ROOT
from scripts.pictures.svg import ADVANCE, INK, LINE, QUIET, drawing, letters

TOKENS, BUDGET, LAYER, HEAD = 220, 64, 28, 0
START = "The ascent of the mountain"

GAP, PADDING, ABOVE = 28, 18, 76
WIDE, NARROW = (270.0, 462.0, 760.0), 380.0
"""Widths of cards: the policy's and the kernel's beside each other above the text's, and on a phone all of them in a column."""

TITLE = "A kvdsl policy, the kernel that is compiled from it, and the tokens of a text that it keeps"
COLOURS: dict[_TokenType, str] = {
    Comment: "#59636e", Keyword: "#8250df", Name.Builtin: "#0550ae", Name.Class: "#953800", Name.Function: "#0550ae",
    Number: "#0550ae", String: "#0a3069",
}  # fmt: skip
FADED, KEPT = "#666e77", "#ffd98a"


def overview(out: Path) -> None:
    """Write the picture for pages."""
    policy, kernel, page = cards(WIDE)
    left, right, width = WIDE
    above = max(policy.height, kernel.height)
    parts = [
        policy.at(0, 0, left, above),
        arrow(left, above / 2, down=False),
        kernel.at(left + GAP, 0, right, above),
        arrow(left + GAP + right / 2, above, down=True),
        page.at(0, above + GAP, width, page.height),
    ]
    out.write_text(drawing(width, above + GAP + page.height, TITLE, parts, in_both=True), encoding="utf-8")


def overview_narrow(out: Path) -> None:
    """Write the picture for phones."""
    parts: list[str] = []
    y = 0.0
    for card in cards((NARROW, NARROW, NARROW)):
        if y:
            parts.append(arrow(NARROW / 2, y - GAP, down=True))
        parts.append(card.at(0, y, NARROW, card.height))
        y += card.height + GAP
    out.write_text(drawing(NARROW, y - GAP, TITLE, parts, in_both=True), encoding="utf-8")


@cache
def found() -> tuple[str, str, list[str], set[int]]:
    """The policy without its docstring, the loops of its kernel, the words of a text, and which of them a head holds."""
    source = policy_of(ROOT / "README.md")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calm.kv"
        path.write_text(source)
        cache_class = kvdsl.load(path)
        loops = loops_of(cache_class.spec.cpu_source.read_text())
        words, held = read(cache_class)
    return re.sub(r'^ +".*\n', "", source, flags=re.MULTILINE), loops, words, held


def policy_of(readme: Path) -> str:
    """The first policy of a page."""
    found = re.search(r"^```kv[^\n]*\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].strip()


def loops_of(cpp: str) -> str:
    """The kernel's two functions, from their loops on, under their names."""
    found = re.findall(r"  static void (observe|settle)\(.*?\n(    for .*?)\n  }\n", cpp, re.DOTALL)
    return "\n\n".join(f"// {name}\n{textwrap.dedent(body)}" for name, body in found)


def read(cache_class: type) -> tuple[list[str], set[int]]:
    """The words of a text, and the positions of those that a head holds after the last of them."""
    model, tokenizer = kvdsl.load_model("smollm2")
    book = book_text()
    ids = tokenizer(book[book.index(START) :][: 8 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS]
    kept = cache_class(model, budget=BUDGET)
    with torch.no_grad(), kept.one_by_one():
        model(ids, **with_cache(kept))
    words = [tokenizer.decode([token]).replace("\n", " ") for token in ids[0]]
    return words, set(kept.positions(LAYER)[0, HEAD].tolist())


# -- drawing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """Something in a frame; what is inside begins at its own origin and is so tall."""

    title: str
    note: str
    inside: list[str]
    tall: float

    @property
    def height(self) -> float:
        return ABOVE + self.tall

    def at(self, x: float, y: float, width: float, height: float) -> str:
        lines = "\n".join(self.inside)
        return (
            f'<g transform="translate({x} {y})">\n'
            f'<rect width="{width}" height="{height:.0f}" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>\n'
            f'<text x="{PADDING}" y="28" font-size="15" font-weight="bold" fill="{INK}">{escape(self.title)}</text>\n'
            f'<text x="{PADDING}" y="45" fill="{QUIET}">{escape(self.note)}</text>\n'
            f'<g transform="translate({PADDING} {ABOVE})">\n{lines}\n</g>\n</g>'
        )


def arrow(x: float, y: float, *, down: bool) -> str:
    """From one card to the next, whose gap begins there."""
    turned = " rotate(90)" if down else ""
    return f'<path transform="translate({x} {y:.0f}){turned}" d="M6 0h14m-6 -6l6 6l-6 6" fill="none" stroke="#8c959f" stroke-width="2"/>'


def cards(widths: tuple[float, float, float]) -> tuple[Card, Card, Card]:
    """The three of them, laid out for their widths."""
    source, loops, words, held = found()
    policy, kernel, page = (width - 2 * PADDING for width in widths)
    return (
        Card("a policy", "what a person writes", *code(source, KvLexer(), policy)),
        Card("a kernel", "compiled from it: C++, Triton, torch", *code(loops, CppLexer(), kernel)),
        Card("which tokens stay", f"SmolLM2 read {TOKENS}; a head holds {BUDGET}", *text(words, held, page)),
    )


def code(source: str, lexer: Lexer, width: float) -> tuple[list[str], float]:
    """Highlighted lines, in letters so small that the longest one fits."""
    longest = max(map(len, source.splitlines())) * ADVANCE
    scale = min(1.0, width / longest)
    parts = [f'<g transform="scale({scale:.3f})">']
    row, column = 0, 0
    for kind, piece in lexer.get_tokens(source):
        for line, part in enumerate(piece.split("\n")):
            if line:
                row, column = row + 1, 0
            if part.strip():
                parts.append(letters(part, column, row, _colour(kind)))
            column += len(part)
    return [*parts, "</g>"], len(source.splitlines()) * LINE * scale


def text(words: list[str], held: set[int], width: float) -> tuple[list[str], float]:
    """Words in lines; behind those that are held, a colour."""
    across = int(width / ADVANCE)
    parts: list[str] = []
    row, column = 0, 0
    for position, word in enumerate(words):
        following = "".join(words[position + 1 : position + 4])
        rest = len(following.split(" ")[0])  # a word is not broken between its tokens
        if column and column + len(word) + (rest if word.startswith(" ") else 0) > across:
            row, column = row + 1, 0
        shown = word if column else word.lstrip()
        if position in held:
            lead = len(shown) - len(shown.lstrip())
            x, wide = (column + lead) * ADVANCE - 1, len(shown.strip()) * ADVANCE + 2
            parts.append(
                f'<rect x="{x:.1f}" y="{row * LINE - 13:.1f}" width="{wide:.1f}" height="17" rx="3" fill="{KEPT}"/>'
            )
        parts.append(letters(shown, column, row, INK if position in held else FADED))
        column += len(shown)
    return parts, (row + 1) * LINE


def _colour(kind: _TokenType) -> str:
    while kind not in COLOURS and kind.parent is not None:
        kind = kind.parent
    return COLOURS.get(kind, INK)
