"""Places in Python files, and text of the language that knows the place of each of its parts."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType

from kvdsl.source import SourceFile, Span

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """Lines of a Python file, from 1, and columns in bytes where Python provides them (from 3.11 on)."""

    file: str
    line: int
    last_line: int | None = None
    column: int | None = None
    last_column: int | None = None

    def span(self) -> Span:
        """Return the place as a span of the file's present text; the whole line without columns."""
        source = _source(self.file, self.line)
        start = self._offset(source, self.line, self.column)
        line = source.line(self.line)
        if self.column is None or self.last_line is None:
            start += len(line) - len(line.lstrip())
            return source.span(start, start + len(line.strip()))
        return source.span(start, max(start, self._offset(source, self.last_line, self.last_column)))

    @staticmethod
    def _offset(source: SourceFile, number: int, column: int | None) -> int:
        before, line = source.text.split("\n")[: number - 1], source.line(number)
        within = len(line.encode()[: column or 0].decode(errors="ignore"))
        return sum(len(one) + 1 for one in before) + within


@lru_cache(maxsize=64)
def _kept(name: str, text: str) -> SourceFile:
    return SourceFile(name, text)


def _source(name: str, line: int) -> SourceFile:
    """Return a file's text, padded with empty lines up to this one if it cannot be read."""
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name))
    return _kept(name, text + "\n" * max(0, line - 1 - text.count("\n")))


def here() -> Place:
    """Return the place of the innermost frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(Path(frame.f_code.co_filename).parent) == _OWN:
        frame = frame.f_back
    assert frame is not None, "somebody called"
    return place_in(frame.f_code, frame.f_lasti, frame.f_lineno)


def place_in(code: CodeType, at: int, line: int) -> Place:
    """Return the place of an instruction."""
    if sys.version_info >= (3, 11):
        found = next(islice(code.co_positions(), at // 2, None), None)
        if found is not None and found[0] is not None and found[2] is not None:
            first, last, column, last_column = found
            return Place(code.co_filename, first, last, column, last_column)
    return Place(code.co_filename, line)


def definition(function: FunctionType, name: str | None = None) -> Place:
    """Return the place of a function's name in its definition, or of one of its parameters."""
    code, own = function.__code__, function.__name__
    source = _source(code.co_filename, code.co_firstlineno)
    begin = Place(code.co_filename, code.co_firstlineno).span().start
    found = re.compile(rf"\bdef\s+({own})\b").search(source.text, begin)
    if found is not None and name is not None:
        found = re.compile(rf"\b({name})\b").search(source.text, found.end())
    if found is None:
        return Place(code.co_filename, code.co_firstlineno)
    line, column = source.location(found.start(1))
    before = len(source.line(line)[: column - 1].encode())
    return Place(code.co_filename, line, line, before, before + len(found[1].encode()))


# -- texts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A part of a text, and the place that made it."""

    start: int
    end: int
    place: Place


@dataclass(frozen=True, eq=False)
class Text:
    """Text of the language, with the offsets of its parts and the place that made it."""

    text: str
    parts: tuple[tuple[int, Text], ...] = ()
    place: Place | None = None

    def made(self, place: Place) -> Text:
        """Return the text with a place for the whole."""
        return Text(self.text, ((0, self),), place)

    def marks(self) -> Iterator[Mark]:
        """Yield a mark for everything inside."""
        waiting = [(0, self)]
        while waiting:
            start, one = waiting.pop()
            if one.place is not None:
                yield Mark(start, start + len(one.text), one.place)
            waiting += [(start + offset, part) for offset, part in one.parts]


def joined(*parts: str | Text) -> Text:
    """Concatenate parts."""
    inner, text = list[tuple[int, Text]](), ""
    for part in parts:
        match part:
            case Text():
                inner.append((len(text), part))
                text += part.text
            case str():
                text += part
    return Text(text, tuple(inner))


@dataclass(frozen=True, eq=False)
class MadeFile(SourceFile):
    """Text of the language made by Python code. Diagnostics point at that code."""

    marks: tuple[Mark, ...] = ()
    place: Place = field(kw_only=True)

    def origins(self, span: Span) -> Iterator[Span]:
        """Yield the places that made a span, the innermost first; the place of the whole if no part covers it."""
        around = [mark for mark in self.marks if mark.start <= span.start and span.end <= mark.end]
        places = [mark.place for mark in sorted(around, key=lambda mark: mark.end - mark.start)]
        yield from (place.span() for place in places or [self.place])


def laid_out(written: Text, text: str) -> tuple[Mark, ...]:
    """Return a text's marks in another text that differs only in whitespace."""
    before, after = ([at for at, char in enumerate(one) if not char.isspace()] for one in (written.text, text))
    assert len(before) == len(after), "nothing but spaces differs"
    where = dict(zip(before, after, strict=True))
    return tuple(
        Mark(where[_next(written.text, one.start)], where[_next(written.text, one.end - 1, -1)] + 1, one.place)
        for one in written.marks()
    )


def _next(text: str, at: int, step: int = 1) -> int:
    """Return the first offset from here on without whitespace."""
    while text[at].isspace():
        at += step
    return at
