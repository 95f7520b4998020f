"""Source text and places in it."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A text that diagnostics can point into.

    Attributes:
        name: its name in messages: the path as the user wrote it, `-` for standard input, `<NAME>` for a string.
        text: the text, with `\\n` line ends and without a byte order mark.
        path: its file, if any; imports are relative to it.
    """

    name: str
    text: str = field(repr=False)
    path: Path | None = None

    @property
    def stem(self) -> str:
        """The name of the generated package and on the command line."""
        return self.path.stem if self.path is not None else Path(self.name).stem.strip("-<>") or "policy"

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0] + [offset + 1 for offset, char in enumerate(self.text) if char == "\n"]

    def location(self, offset: int) -> tuple[int, int]:
        """Return line and column, both from 1, columns in characters."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Return the text of a line, counted from 1, without its end."""
        start = self._line_starts[number - 1]
        end = self._line_starts[number] - 1 if number < len(self._line_starts) else len(self.text)
        return self.text[start:end]

    def span(self, start: int, end: int) -> Span:
        """Return a span of this file."""
        return Span(self, start, end)

    @property
    def as_file(self) -> str:
        """The text as a file would contain it."""
        return self.text

    def origins(self, span: Span) -> Iterator[Span]:
        """Yield the places that wrote a span, the innermost first: for a text made by a program, places in that program."""
        yield span


@dataclass(frozen=True, eq=False, kw_only=True)
class Combined(SourceFile):
    """A policy with clauses that is in no file, such as `h2o with when prefill`, which is the text.

    Attributes:
        base: the part before `with`: a file, a text, or another of these.
        imports: the import of the base, for a file of the base's edition.
        of: the name of the base's policy.
        named, clauses: the offsets of the base's end and of the clauses' start in the text.
    """

    base: Path | SourceFile
    imports: str
    of: str
    named: int
    clauses: int

    @property
    def policy(self) -> str:
        """The policy's name: the base's, and the words of the clauses, or a digest if there are many or other characters."""
        return f"{self.of}_{self._suffix}"

    @property
    def stem(self) -> str:
        """The base's stem with the same suffix."""
        base = self.base if isinstance(self.base, SourceFile) else SourceFile("", "", self.base)
        return f"{base.stem}_{self._suffix}"

    @cached_property
    def _suffix(self) -> str:
        words = re.findall(r"\w+|[^\w\s]", self.text[self.clauses :])
        plain = "_".join(word for word in words if word not in ",;{}")
        if len(plain) <= _MAX_SUFFIX and re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", plain):
            return plain
        return f"with_{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"

    @property
    def as_file(self) -> str:
        """The text as a file would contain it; repeated clauses become several policies."""
        before = self.base.as_file if isinstance(self.base, SourceFile) else self.imports
        return f"{before}\npolicy {self.policy} = {self.of} with {self.text[self.clauses :]}\n"


_MAX_SUFFIX = 32


@dataclass(frozen=True)
class Span:
    """The characters from `start` up to `end` of a file."""

    file: SourceFile
    start: int
    end: int

    @property
    def text(self) -> str:
        """The text at the span."""
        return self.file.text[self.start : self.end]

    def holds(self, other: Span) -> bool:
        """Return whether another span lies inside this one."""
        return self.file is other.file and self.start <= other.start and other.end <= self.end

    def to(self, other: Span) -> Span:
        """Return the span from the start of this one to the end of another."""
        return Span(self.file, self.start, other.end)

    def quoted(self, limit: int = 60) -> str:
        """Return the text on one line, shortened, for a message."""
        words = " ".join(self.text.split())
        return words if len(words) <= limit else words[: limit - 1] + "…"
