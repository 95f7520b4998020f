"""Where something was written in Python, and a text of the language that knows it of each of its parts."""

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
    """Lines of a Python file, from 1, and columns in bytes where Python knows them (from 3.11 on)."""

    file: str
    line: int
    last_line: int | None = None
    column: int | None = None
    last_column: int | None = None

    def span(self) -> Span:
        """The same as a span of the file as it is now; all of a line where no columns are known."""
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
    """A file's text, with empty lines up to this one where it cannot be read."""
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name))
    return _kept(name, text + "\n" * max(0, line - 1 - text.count("\n")))


def here() -> Place:
    """Where the caller's caller stands: the innermost frame that is none of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(Path(frame.f_code.co_filename).parent) == _OWN:
        frame = frame.f_back
    assert frame is not None, "somebody called"
    return place_in(frame.f_code, frame.f_lasti, frame.f_lineno)


def place_in(code: CodeType, at: int, line: int) -> Place:
    """Where an instruction of some code was written."""
    if sys.version_info >= (3, 11):
        found = next(islice(code.co_positions(), at // 2, None), None)
        if found is not None and found[0] is not None and found[2] is not None:
            first, last, column, last_column = found
            return Place(code.co_filename, first, last, column, last_column)
    return Place(code.co_filename, line)


def definition(function: FunctionType, name: str | None = None) -> Place:
    """Where a function is defined: its name there, or that of one of its parameters."""
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
    """The part of a text that was made at a place."""

    start: int
    end: int
    place: Place


@dataclass(frozen=True, eq=False)
class Text:
    """A part of a policy in the language: the parts in it, with their offsets, and the place where it was made."""

    text: str
    parts: tuple[tuple[int, Text], ...] = ()
    place: Place | None = None

    def made(self, place: Place) -> Text:
        """The same, made as a whole at a place."""
        return Text(self.text, ((0, self),), place)

    def marks(self) -> Iterator[Mark]:
        """Where all that is in it was made."""
        waiting = [(0, self)]
        while waiting:
            start, one = waiting.pop()
            if one.place is not None:
                yield Mark(start, start + len(one.text), one.place)
            waiting += [(start + offset, part) for offset, part in one.parts]


def joined(*parts: str | Text) -> Text:
    """The parts one after the other."""
    inner, at = list[tuple[int, Text]](), 0
    for part in parts:
        if isinstance(part, Text):
            inner.append((at, part))
        at += len(part if isinstance(part, str) else part.text)
    return Text("".join(part if isinstance(part, str) else part.text for part in parts), tuple(inner))


@dataclass(frozen=True, eq=False)
class MadeFile(SourceFile):
    """A text of the language that Python made; its places are reported as places in Python."""

    marks: tuple[Mark, ...] = ()
    place: Place = field(kw_only=True)

    def origins(self, span: Span) -> Iterator[Span]:
        """Where it was made, the innermost first; what no part of it was made for, where the whole was."""
        around = [mark for mark in self.marks if mark.start <= span.start and span.end <= mark.end]
        places = [mark.place for mark in sorted(around, key=lambda mark: mark.end - mark.start)]
        yield from (place.span() for place in places or [self.place])


def laid_out(written: Text, text: str) -> tuple[Mark, ...]:
    """The marks of a text in another one that differs by spaces and line ends alone."""
    before, after = ([at for at, char in enumerate(one) if not char.isspace()] for one in (written.text, text))
    assert len(before) == len(after), "nothing but spaces differs"
    where = dict(zip(before, after, strict=True))
    return tuple(
        Mark(where[_next(written.text, one.start)], where[_next(written.text, one.end - 1, -1)] + 1, one.place)
        for one in written.marks()
    )


def _next(text: str, at: int, step: int = 1) -> int:
    """The first offset from here on at which there is no space."""
    while text[at].isspace():
        at += step
    return at
