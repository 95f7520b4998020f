"""Diagnostics: errors and warnings in a source, with places and fixes.

Messages start in lower case, have no full stop, and quote the user's text in backticks; `help` says how to fix the error. Nothing of
Python (types, reprs, tokens) appears in them.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from kvdsl.codes import Code, Severity
from kvdsl.errors import KvdslError
from kvdsl.helps import Fix, offer, spoken
from kvdsl.source import SourceFile, Span


@dataclass(frozen=True)
class Label:
    """A second place of a diagnostic."""

    span: Span
    text: str


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes:
        span: the place of its caret.
        help: the fix in words.
        labels: other related places.
        fixes: the edits of the help, the most certain first.
    """

    code: str
    severity: Severity
    message: str
    span: Span
    help: str | None = None
    labels: tuple[Label, ...] = ()
    fixes: tuple[Fix, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.span.file.name

    def at_origin(self) -> Diagnostic:
        """Return the diagnostic at the places that produced the text, which are elsewhere if a program made it."""
        inner, *around = self.span.file.origins(self.span)
        labels = [Label(next(label.span.file.origins(label.span)), label.text) for label in self.labels]
        if around and not around[-1].holds(inner):
            labels.append(Label(around[-1], "used here"))
        fixes = self.fixes if inner is self.span else ()  # edits refer to the text
        return replace(self, span=inner, labels=tuple(labels), fixes=fixes)


class DiagnosticError(KvdslError):
    """A policy that is missing or cannot be compiled.

    Attributes:
        diagnostics: the findings; the error's text shows them like `kvdsl check`.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(render_human(self.diagnostics, color=False))

    def __reduce__(self) -> tuple[type[DiagnosticError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)  # another process gets the diagnostics, not only their text


MAX_FINDINGS = 50


@dataclass
class Sink:
    """Collects the findings of a run, each once, and at most `MAX_FINDINGS` errors."""

    _found: dict[tuple[str, Span, str], Diagnostic] = field(default_factory=dict)
    _errors: int = 0

    def report(self, code: Code, span: Span, message: str, help: str | None = None, labels: Iterable[Label] = ()) -> None:
        """Add a finding."""
        key = (code.id, span, message)
        full = self.full if code.severity == "error" else len(self._found) >= MAX_FINDINGS
        if key not in self._found and not full:
            words, fixes = spoken(help, span)
            self._found[key] = Diagnostic(code.id, code.severity, message, span, words, tuple(labels), fixes)
            self._errors += code.severity == "error"

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._found.values())

    @property
    def full(self) -> bool:
        """Whether no more findings will be added, so that further checks are pointless."""
        return self._errors >= MAX_FINDINGS

    def failed(self) -> bool:
        """Return whether there are errors, not counting warnings."""
        return self._errors > 0

    def sorted(self, first: SourceFile | None = None) -> tuple[Diagnostic, ...]:
        """Return the findings by place, those of the file `first` first."""

        def place(found: Diagnostic) -> tuple[bool, str, int, int, str]:
            return found.span.file is not first, found.file, found.span.start, found.span.end, found.code

        return tuple(sorted(self, key=place))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to `word`, if one is similar."""
    from difflib import get_close_matches

    near = (name for name in known if abs(len(name) - len(word)) <= 4)
    by_folded = {name.casefold(): name for name in sorted(near, reverse=True)}
    close = get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a help that offers the known word most similar to `word`, if there is one."""
    near = nearest(word, known)
    return None if near is None else offer(f"did you mean `{near}`?")


def listed(words: Iterable[str], last: str = "or") -> str:
    """Print words as a list: "`a`, `b` or `c`"."""
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def printable(text: str) -> str:
    """Escape everything that a terminal would execute or not show."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# -- renderers -------------------------------------------------------------------------------------------------------

_COLORS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "frame": "\x1b[34m", "help": "\x1b[36m", "bold": "\x1b[1m"}
_WIDTH, _LEAST = 120, 40
"""Characters shown of a line, if the terminal is wide enough, and the least."""


def wants_color(stream: TextIO = sys.stderr) -> bool:
    """Return whether to colour output to a stream: on a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render_human(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """Print messages with their lines and carets; ends with a count."""
    diagnostics = list(diagnostics)
    paint = _paint if color else _plain
    blocks = [_render_one(found, paint) for found in diagnostics]
    if blocks:
        blocks.append(summary(diagnostics) + "\n")
    return "\n".join(blocks)


def excerpt(label: Label, color: bool = False) -> str:
    """Print a place, its line, and a caret with the label's text."""
    paint = _paint if color else _plain
    gutter = len(str(label.span.file.location(label.span.start)[0]))
    return "\n".join(_snippet(label, "-->", gutter, lambda text: paint("error", text), paint))


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """Print the number of errors and warnings."""
    counts = {"error": 0, "warning": 0}
    for found in diagnostics:
        counts[found.severity] += 1
    return ", ".join(f"{n} {kind}{'' if n == 1 else 's'}" for kind, n in counts.items() if n) or "no findings"


def render_json(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    """Return the diagnostics as data for `kvdsl check --format json`."""
    return [
        {
            "code": found.code,
            "severity": found.severity,
            "message": found.message,
            "help": found.help,
            "file": found.file,
            "range": _range(found.span),
            "labels": [
                {"message": label.text, "file": label.span.file.name, "range": _range(label.span)} for label in found.labels
            ],
            "fixes": [
                {"message": fix.title, "file": fix.span.file.name, "range": _range(fix.span), "text": fix.text}
                for fix in found.fixes
            ],
        }
        for found in diagnostics
    ]


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Print workflow commands, which GitHub shows next to the lines of a pull request."""
    lines = []
    for found in diagnostics:
        (line, column), (end_line, end_column) = _ends(found.span)
        text = found.message if found.help is None else f"{found.message}\nhelp: {found.help}"
        places = f"line={line},col={column},endLine={end_line},endColumn={end_column}"
        file = _github_property(found.file)
        lines.append(f"::{found.severity} file={file},{places},title={found.code}::{_github_data(text)}\n")
    return "".join(lines)


def _github_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")


def _ends(span: Span) -> tuple[tuple[int, int], tuple[int, int]]:
    return span.file.location(span.start), span.file.location(max(span.start, span.end))


def _range(span: Span) -> dict[str, dict[str, int]]:
    start, end = _ends(span)
    return {"start": {"line": start[0], "column": start[1]}, "end": {"line": end[0], "column": end[1]}}


def _plain(style: str, text: str) -> str:
    return text


def _paint(style: str, text: str) -> str:
    return f"{_COLORS[style]}{text}\x1b[0m"


def _render_one(found: Diagnostic, paint: Any) -> str:
    lines = [paint(found.severity, f"{found.severity}[{found.code}]") + paint("bold", f": {printable(found.message)}")]
    marks = [Label(found.span, ""), *found.labels]
    gutter = max(len(str(mark.span.file.location(mark.span.start)[0])) for mark in marks)
    lines += _snippet(marks[0], "-->", gutter, lambda text: paint(found.severity, text), paint)
    for label in marks[1:]:
        lines += _snippet(label, ":::", gutter, lambda text: paint("frame", text), paint)
    if found.help:
        lines.append(f"{' ' * gutter} {paint('frame', '=')} {paint('help', 'help:')} {printable(found.help)}")
    return "\n".join(lines) + "\n"


def _snippet(mark: Label, arrow: str, gutter: int, highlight: Any, paint: Any) -> list[str]:
    """Return the place, the line and the caret. A place of several lines is marked to the end of its first."""
    file, (line, column) = mark.span.file, mark.span.file.location(mark.span.start)
    head = f"{' ' * gutter}{paint('frame', arrow)} {printable(file.name)}:{line}:{column}"
    source = file.line(line)
    if not source.strip():
        return [head + (f": {mark.text}" if mark.text else "")]
    start = column - 1
    end = max(start + 1, min(len(source), start + mark.span.end - mark.span.start))
    width = min(_WIDTH, max(_LEAST, shutil.get_terminal_size((_WIDTH + gutter + 3, 24)).columns - gutter - 3))
    source, start, end = _cut(source, start, end, width)
    before, marked = _shown(source[:start]), _shown(source[start:end])
    bar = paint("frame", "|")
    carets = ("^" if arrow == "-->" else "-") * max(1, _columns(marked))
    under = highlight(f"{carets} {mark.text}".rstrip())
    number = paint("frame", f"{line:>{gutter}} |")
    shown = before + marked + _shown(source[end:])
    return [head, f"{' ' * gutter} {bar}", f"{number} {shown}", f"{' ' * gutter} {bar} {' ' * _columns(before)}{under}"]


def _cut(source: str, start: int, end: int, width: int) -> tuple[str, int, int]:
    """Return the part of a long line around the marked text."""
    left = max(0, min(start - 20, len(source) - width))
    window = source[left : left + width]
    return window, start - left, min(end - left, max(len(window), start - left + 1))


def _shown(text: str) -> str:
    return printable(text.replace("\t", "    "))


def _columns(text: str) -> int:
    """Return the width of a printable text in terminal columns."""
    wide = {"W": 2, "F": 2}
    return sum(0 if unicodedata.combining(char) else wide.get(unicodedata.east_asian_width(char), 1) for char in text)


# -- the rule ----------------------------------------------------------------------------------------------------------


_IMPORTS = ("KV0204", "KV0217")
"""Codes of broken imports, which suppress errors about the imported names."""


def mends(found: Diagnostic, fix: Fix, before: Iterable[Diagnostic], after: Iterable[Diagnostic]) -> bool:
    """Return whether an edit fixes a finding: it is gone, and new findings come from later stages.

    A syntax error hides errors of names, and these hide errors of axes. A new finding may also be another one of the expression around
    the edit, hidden by the error inside it. Only the first syntax error of a line is reported, so the same one after the edit is a
    later one.
    """

    def tally(all: Iterable[Diagnostic]) -> Counter[tuple[str, str]]:
        return Counter((one.code, one.message) for one in all)

    earlier, now, key = tally(before), tally(after), (found.code, found.message)
    stage, size = "KV01" if found.code in _IMPORTS else found.code[:4], len(fix.text)
    counted = [
        sum((one.code, one.message) == key and (stage != "KV01" or one == found or one.span.start < end) for one in all)
        for all, end in ((before, fix.span.end), (after, fix.span.start + size))
    ]
    if counted[1] >= counted[0]:
        return False
    for one in after:
        same = (one.code, one.message)
        if one.severity != "error" or same == key or now[same] <= earlier[same]:
            continue
        start, end = one.span.start, one.span.end
        around = start <= fix.span.start and fix.span.start + size <= end
        if one.code[:4] < stage or (one.code[:4] == stage and not around):
            return False
    return True
