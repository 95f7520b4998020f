"""Convert between offsets in a text, from 0, and the client's lines and columns."""

from __future__ import annotations

from bisect import bisect_right

from lsprotocol import types as lsp

from kvdsl.source import Span

_CODECS = {"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": None}


class Positions:
    """Conversions for one text with `\\n` line ends.

    Args:
        encoding: the agreed unit of columns: utf-8, utf-16 or utf-32.
    """

    def __init__(self, text: str, encoding: str = "utf-16") -> None:
        self.text, self.encoding = text, encoding
        self.codec = _CODECS[encoding]
        self.starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]

    def position(self, offset: int) -> lsp.Position:
        """Return the position of a character."""
        line = bisect_right(self.starts, offset) - 1
        return lsp.Position(line, self.units(self.text[self.starts[line] : offset]))

    def offset(self, position: lsp.Position) -> int:
        """Return the offset at a position, or the nearest one."""
        if position.line >= len(self.starts):
            return len(self.text)
        start = self.starts[position.line]
        end = self.starts[position.line + 1] - 1 if position.line + 1 < len(self.starts) else len(self.text)
        units = 0
        for at in range(start, end):
            if units >= position.character:
                return at
            units += self.units(self.text[at])
        return end

    def range(self, start: int, end: int) -> lsp.Range:
        """Return the range of characters from `start` to `end`."""
        return lsp.Range(self.position(start), self.position(end))

    def of(self, span: Span) -> lsp.Range:
        """Return the range of a span in this text."""
        return self.range(span.start, span.end)

    def units(self, text: str) -> int:
        """Return a text's length in the client's units."""
        if self.codec is None:
            return len(text)
        return len(text.encode(self.codec, "surrogatepass")) // (2 if self.codec == "utf-16-le" else 1)

    def whole(self) -> lsp.Range:
        """The range of the whole text."""
        return self.range(0, len(self.text))
