"""Helps with their edits as data.

Every help that proposes code is made here, so that editors, `kvdsl check --format json` and the tests can apply it without parsing
the text. `kvdsl.diagnostics.mends` states the rule: after the edit the file checks, or fails with an error found later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvdsl.source import Span


@dataclass(frozen=True)
class Fix:
    """One edit that fixes a finding: `text` replaces `span`; `title` describes it."""

    span: Span
    text: str
    title: str

    def applied(self) -> str:
        """Return the file's text after the edit."""
        before = self.span.file.text
        return before[: self.span.start] + self.text + before[self.span.end :]


Way = Callable[[Span], Fix | None]
"""Makes an edit for the place of a finding; None if there is nothing to edit."""


class Help(str):
    """The text of a help, and its edits, the most certain first."""

    ways: tuple[Way, ...]

    def __new__(cls, text: str, *ways: Way) -> Help:
        """Make a text with edits."""
        made = super().__new__(cls, text)
        made.ways = ways
        return made


def fixes_of(help: str | None, span: Span) -> tuple[Fix, ...]:
    """Return the edits of a help for a finding at a place."""
    made = [fix for way in _ways(help) if (fix := way(span)) is not None]
    return tuple(fix for fix in made if fix.span.text != fix.text)


def _ways(help: str | None) -> tuple[Way, ...]:
    return help.ways if isinstance(help, Help) else ()


def spoken(help: str | None, span: Span) -> tuple[str | None, tuple[Fix, ...]]:
    """Return a help's text and edits in the words of the file's edition: from the second on, `given` and `tensor` are `input`."""
    fixes = fixes_of(help, span)
    if help is None or not _SECOND.match(span.file.text):
        return None if help is None else str(help), fixes
    edits = [Fix(fix.span, _INPUT_LINES.sub(r"\1input", fix.text), _INPUTS.sub("input", fix.title)) for fix in fixes]
    return _INPUTS.sub("input", help), tuple(edits)


_SECOND = re.compile(r"(?:\s|#[^\n]*\n)*kv[ \t]+2\b")
_INPUTS = re.compile(r"(?<=`)(?:given|tensor)(?= )")
_INPUT_LINES = re.compile(r"^([ \t]*)(?:given|tensor)(?= )", re.MULTILINE)


# -- helps -------------------------------------------------------------------------------------------------------------


def offer(text: str, more: str = "", *, at: Span | None = None) -> Help:
    """Make a help whose codes in backticks each replace the wrong text.

    Args:
        more: further text, whose codes are no edits.
        at: what the codes replace, by default the place of the finding.
    """
    codes = [code for code in re.findall(r"`([^`]+)`", text) if "…" not in code]
    return Help(text + more, *(_replacing(code, code, at) for code in codes))


def instead(text: str, new: str, at: Span | None = None) -> Help:
    """Make a help whose edit replaces the wrong text by `new`."""
    return Help(text, _replacing(new, new, at))


def add(text: str, more: str = "", *, at: Span | None = None) -> Help:
    """Make a help whose codes in backticks are statements to add to the policy."""
    codes = re.findall(r"`([^`]+)`", text)
    return Help(text + more, lambda span: _added("\n  ".join(codes), at or span))


def operand(text: str) -> str:
    """Return an expression as an operand: in parentheses unless it is a name, a number or a call."""
    return text if re.fullmatch(r"[\w.]+(\((?:[^()]|\([^()]*\))*\))?", text) else f"({text})"


def leave_out(text: str, *places: Span) -> Help:
    """Make a help whose edit removes a place, or one of several; a statement with its line."""
    return Help(text, *(_without(place) for place in places))


def prefix(text: str, word: str) -> Help:
    """Make a help whose edit inserts a word before the wrong text."""
    return Help(text, lambda span: _inserted(span, f"{word} ", f"write `{word}` before it"))


def begin(text: str, line: str) -> Help:
    """Make a help whose edit inserts a line at the start of the file."""
    return Help(text, lambda span: _inserted(_at(span, 0), f"{line}\n\n", f"begin with `{line}`"))


def both(*helps: str) -> Help:
    """Join helps into one sentence; their edits are alternatives."""
    return Help("".join(helps), *(way for help in helps for way in _ways(help)))


# -- edits -------------------------------------------------------------------------------------------------------------


def _replacing(code: str, new: str, at: Span | None) -> Way:
    return lambda span: Fix(at or span, new, f"write `{code}`")


def _at(span: Span, place: int) -> Span:
    return span.file.span(place, place)


def _inserted(span: Span, text: str, title: str) -> Fix:
    return Fix(_at(span, span.start), text, title)


def _added(code: str, span: Span) -> Fix | None:
    """Insert a statement as the last one of the body around or after a place; an import below the edition."""
    text, title = span.file.text, f"add `{' '.join(code.split())}`"
    if code == "}":
        return _inserted(_at(span, len(text)), "}\n" if text.endswith("\n") else "\n}\n", title)
    if code.startswith("import "):
        return _inserted(_at(span, _below_imports(text)), f"{code}\n", title)
    closing = re.compile(r"^[ \t]*\}", re.MULTILINE).search(text, span.start)
    return None if closing is None else _inserted(_at(span, closing.start()), f"  {code}\n", title)


def _below_imports(text: str) -> int:
    """Return the offset for another import."""
    head = re.match(r"(?:[ \t]*(?:kv|import)\b[^\n]*\n|[ \t]*(?:#[^\n]*)?\n(?=[ \t]*(?:kv|import)\b))*", text)
    return 0 if head is None else head.end()


def named_and_imported(span: Span, name: str, stem: str) -> Fix:
    """Replace a wrong name, and import it."""
    at = _below_imports(span.file.text)
    between = span.file.text[at : span.start]
    return Fix(span.file.span(at, span.end), f"import {stem}\n{between}{name}", f"write `{name}` and `import {stem}`")


def _without(place: Span) -> Way:
    """Remove a place, with its line if it is alone there, else with the space after it; with a comma in a list."""
    text, start, end = place.file.text, place.start, place.end
    title = f"leave out `{place.quoted(40)}`"
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    last = len(text) if last < 0 else last
    if not text[first:start].strip() and not text[end:last].partition("#")[0].strip():
        return lambda span: Fix(place.file.span(first, min(last + 1, len(text))), "", title)
    before, behind = text[first:start].rstrip(), text[end:last].lstrip()
    if before.endswith(",") and behind[:1] in ("", ",", ")", "}", "#"):
        start = first + len(before) - 1
    elif behind.startswith(",") and not before.endswith((",", "(")):
        end = last - len(behind[1:].lstrip())
    elif text[end : end + 1] == " " and not text[start - 1 : start].strip():
        end += 1
    elif text[start - 1 : start] == " " and not text[end : end + 1].isalnum():
        start -= 1
    return lambda span: Fix(place.file.span(start, end), "", title)
