"""The README's picture: a policy, its kernel, and which tokens it keeps.

The policy is the README's first, without its docstring; the loops are taken from its generated C++; SmolLM2 reads a page of a book
under it (`kvdsl models get smollm2`). Nothing in the picture is drawn by hand.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Iterator
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
from scripts.pictures.svg import ADVANCE, INK, LINE, drawing, letters

TOKENS, BUDGET, LAYER, HEAD = 220, 64, 28, 0
START = "The ascent of the mountain"

WIDTH, HEIGHT, GAP, PADDING = 1280, 430, 40, 18
PANELS = (270, 450, 480)
COLOURS: dict[_TokenType, str] = {
    Comment: "#6e7781", Keyword: "#8250df", Name.Builtin: "#0550ae", Name.Class: "#953800", Name.Function: "#0550ae",
    Number: "#0550ae", String: "#0a3069",
}  # fmt: skip
FADED, KEPT = "#9aa1a9", "#ffd98a"


def overview(out: Path) -> None:
    """Write the picture."""
    source = policy_of(ROOT / "README.md")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calm.kv"
        path.write_text(source)
        cache_class = kvdsl.load(path)
        loops = loops_of(cache_class.spec.cpu_source.read_text())
        words, held = read(cache_class)
    without_docstring = re.sub(r'^ +".*\n', "", source, flags=re.MULTILINE)
    parts = [
        panel(0, "a policy", "what a person writes", code(without_docstring, KvLexer(), PANELS[0])),
        panel(1, "a kernel", "the heart of its C++; Triton and torch likewise", code(loops, CppLexer(), PANELS[1])),
        panel(
            2,
            "which tokens stay",
            f"SmolLM2 has read {TOKENS}; layer {LAYER}, KV head {HEAD} holds {BUDGET}",
            text(words, held),
        ),
    ]
    title = "A kvdsl policy, the kernel that is compiled from it, and the tokens of a text that it keeps"
    out.write_text(drawing(WIDTH, HEIGHT, title, parts), encoding="utf-8")


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
    cache = cache_class(model, budget=BUDGET)
    with torch.no_grad(), cache.one_by_one():
        model(ids, **with_cache(cache))
    words = [tokenizer.decode([token]).replace("\n", " ") for token in ids[0]]
    return words, set(cache.positions(LAYER)[0, HEAD].tolist())


# -- drawing -----------------------------------------------------------------------------------------------------------


def panel(index: int, title: str, note: str, inside: Iterator[str]) -> str:
    """A card, and an arrow to the next one."""
    left = sum(PANELS[:index]) + index * GAP
    lines = "\n".join(inside)
    card = (
        f'<g transform="translate({left} 0)">\n'
        f'<rect width="{PANELS[index]}" height="{HEIGHT}" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>\n'
        f'<text x="{PADDING}" y="30" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>\n'
        f'<text x="{PADDING}" y="48" font-size="11" fill="#57606a">{escape(note)}</text>\n'
        f'<g transform="translate({PADDING} 78)">\n{lines}\n</g>\n</g>'
    )
    if index == 0:
        return card
    start, middle = left - GAP + 8, HEIGHT / 2
    arrow = f"M{start} {middle}h{GAP - 22}m-6 -6l6 6l-6 6"
    return card + f'\n<path d="{arrow}" fill="none" stroke="#8c959f" stroke-width="2"/>'


def code(source: str, lexer: Lexer, width: int) -> Iterator[str]:
    """Highlighted lines, in letters so small that the longest one fits."""
    longest = max(map(len, source.splitlines())) * ADVANCE
    yield f'<g transform="scale({min(1.0, (width - 2 * PADDING) / longest):.3f})">'
    row, column = 0, 0
    for kind, piece in lexer.get_tokens(source):
        for line, part in enumerate(piece.split("\n")):
            if line:
                row, column = row + 1, 0
            if part.strip():
                yield letters(part, column, row, _colour(kind))
            column += len(part)
    yield "</g>"


def text(words: list[str], held: set[int]) -> Iterator[str]:
    """Words in lines; behind those that are held, a colour."""
    across = int((PANELS[2] - 2 * PADDING) / ADVANCE)
    row, column = 0, 0
    for position, word in enumerate(words):
        following = "".join(words[position + 1 : position + 4])
        rest = len(following.split(" ")[0])  # a word is not broken between its tokens
        if column and column + len(word) + (rest if word.startswith(" ") else 0) > across:
            row, column = row + 1, 0
        shown = word if column else word.lstrip()
        if position in held:
            lead = len(shown) - len(shown.lstrip())
            x, width = (column + lead) * ADVANCE - 1, len(shown.strip()) * ADVANCE + 2
            yield f'<rect x="{x:.1f}" y="{row * LINE - 13:.1f}" width="{width:.1f}" height="17" rx="3" fill="{KEPT}"/>'
        yield letters(shown, column, row, INK if position in held else FADED)
        column += len(shown)


def _colour(kind: _TokenType) -> str:
    while kind not in COLOURS and kind.parent is not None:
        kind = kind.parent
    return COLOURS.get(kind, INK)
