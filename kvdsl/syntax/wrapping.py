"""Print one statement: spaces between its tokens, and line breaks if it is too long.

Only inside parentheses is a line end ignored, so lines break there, the outermost first: after `(` and commas, and before `)`.
An argument that is still too long breaks before its loosest operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvdsl.syntax.comments import Piece

WIDTH = 128
INDENT = 2

_DEEPEST = 20
"""Parentheses nested deeper than this are not broken, which limits the indentation."""

_VALUES = {"NAME", "NUMBER", "RPAR"}
_STEPS = {"ATTEND", "TOKEN", "EXPECT"}
"""The first tokens of a test's steps with numbers, perhaps after `3 times`, in which `-` is a sign, even after a name."""
_LOOSENESS = {
    "OR": 1, "AND": 2, "LT": 3, "LE": 3, "GT": 3, "GE": 3, "EQ": 3, "NE": 3, "PLUS": 4, "MINUS": 4, "STAR": 5, "SLASH": 5, "PERCENT": 5,
}  # fmt: skip


def flat(pieces: Sequence[Piece]) -> str:
    """Return the tokens on one line."""
    return "".join(gap + piece.text for gap, piece in zip(_gaps(pieces), pieces, strict=True))


def has_comments(pieces: Sequence[Piece]) -> bool:
    """Return whether there are comments between the tokens."""
    return any(piece.above or piece.behind for piece in pieces)


def wrapped(pieces: Sequence[Piece], indent: str) -> list[str]:
    """Return the tokens on as few lines as they need."""
    if not has_comments(pieces) and len(indent) + len(flat(pieces)) <= WIDTH:
        return [indent + flat(pieces)]
    return _Wrapper(pieces, indent).run()


def _gaps(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the space before each token."""
    signed = False  # whether the previous token is a sign
    step = any(piece.type in _STEPS for piece in pieces[:1]) or any(piece.type == "TIMES" for piece in pieces[1:2])
    for index, piece in enumerate(pieces):
        before = pieces[index - 1] if index else None
        yield "" if before is None or signed else _gap(before, piece)
        signed = piece.type == "MINUS" and (step or before is None or before.type not in _VALUES)


def _gap(left: Piece, right: Piece) -> str:
    if left.type in ("LPAR", "LSQB") or right.type in ("RPAR", "RSQB", "COMMA"):
        return ""
    if right.type == "LPAR":
        return "" if left.type == "NAME" else " "
    if right.type == "RANGE":
        return "" if left.type in _VALUES and not left.text.endswith(".") else " "
    if left.type == "RANGE":
        return "" if right.type in ("NAME", "NUMBER", "MINUS") and not right.text.startswith(".") else " "
    return " "


class _Wrapper:
    """Goes through a statement's tokens once, with a stack of open parentheses."""

    def __init__(self, pieces: Sequence[Piece], indent: str) -> None:
        self.pieces, self.indent = pieces, indent
        self.texts = [gap + piece.text for gap, piece in zip(_gaps(pieces), pieces, strict=True)]
        self.ends = [0, *accumulate(len(text) for text in self.texts)]
        self.comments = [0, *accumulate(has_comments([piece]) for piece in pieces)]
        self.partner = _partners(pieces)
        self.broken: list[bool] = []  # whether each enclosing parenthesis was broken
        self.before: set[int] = set()  # operators that start a line
        self.lines: list[str] = []
        self.line = indent

    def run(self) -> list[str]:
        """Return the lines."""
        for index, piece in enumerate(self.pieces):
            for comment in piece.above:
                self._new_line()
                self.line += comment
            ends_broken = piece.type == "RPAR" and self.broken.pop()
            if piece.above or ends_broken or index in self.before:
                self._new_line()
            self.line += self.texts[index] if self.line.strip() else self.texts[index].lstrip()
            if piece.type == "LPAR":
                self.broken.append(self._has_to_break(index))
            ends_item = piece.type in ("LPAR", "COMMA") and self.broken and self.broken[-1]
            if ends_item:
                self._break_item(index + 1)
            if piece.behind:
                self.line += f"  {piece.behind}"
            if ends_item or piece.behind:
                self._new_line()
        return [*self.lines, self.line]

    def _level(self) -> int:
        return min(sum(self.broken), _DEEPEST)

    def _new_line(self) -> None:
        if self.line.strip():
            self.lines.append(self.line)
        self.line = self.indent + " " * (INDENT * self._level())

    def _width(self, start: int, end: int) -> int:
        return self.ends[end] - self.ends[start]

    def _has_to_break(self, index: int) -> bool:
        """Return whether the parentheses opened here, with the unbreakable text after them, do not fit the line."""
        last = self.partner[index]
        if last == index + 1 and not self.pieces[last].above and not self.pieces[index].behind:
            return False
        if self.comments[last] > self.comments[index + 1] or self.pieces[index].behind or self.pieces[last].above:
            return True
        if (self.broken and not self.broken[-1]) or self._level() >= _DEEPEST:
            return False
        end = last + 1
        while end < len(self.pieces) and end not in self.before and self.pieces[end].type not in ("LPAR", "RPAR", "COMMA"):
            end += 1
        return len(self.line) + self._width(index + 1, end) + 1 > WIDTH

    def _break_item(self, start: int) -> None:
        """Mark the loosest operators of the argument that begins here, if it is too long for a line."""
        operators: dict[int, int] = {}
        end = start
        while self.pieces[end].type not in ("RPAR", "COMMA"):
            end = self.partner.get(end, end)
            piece, before = self.pieces[end], self.pieces[end - 1]
            if piece.type in _LOOSENESS and (piece.type != "MINUS" or before.type in _VALUES):
                operators[end] = _LOOSENESS[piece.type]
            end += 1
        if len(self.indent) + INDENT * self._level() + self._width(start, end) + 1 > WIDTH:
            loosest = min(operators.values(), default=0)
            self.before |= {index for index, looseness in operators.items() if looseness == loosest}


def _partners(pieces: Sequence[Piece]) -> dict[int, int]:
    """Map each opening parenthesis to its closing one."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for index, piece in enumerate(pieces):
        if piece.type == "LPAR":
            opened.append(index)
        elif piece.type == "RPAR":
            found[opened.pop()] = index
    return found
