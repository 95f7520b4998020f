"""What a help offers: the edits that mend a finding, as data.

A help that proposes code is made here, so that an editor, `kvdsl check --format json` and the tests apply what the text says,
and nobody has to guess it from the text. One rule holds (`kvdsl.diagnostics.mends`): with the edit the file checks, or what is
wrong then is something else, which was found later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvdsl.source import Span


@dataclass(frozen=True)
class Fix:
    """One edit that mends a finding: `text` in place of what stands at `span`; `title` says so."""

    span: Span
    text: str
    title: str

    def applied(self) -> str:
        """The file's text with it."""
        before = self.span.file.text
        return before[: self.span.start] + self.text + before[self.span.end :]


Way = Callable[[Span], Fix | None]
"""Makes an edit, once the place of the finding is known; None if there is nothing to edit."""


class Help(str):
    """The text of a help, and the edits that it offers, the surest first."""

    ways: tuple[Way, ...]

    def __new__(cls, text: str, *ways: Way) -> Help:
        """A text with edits."""
        made = super().__new__(cls, text)
        made.ways = ways
        return made


def fixes_of(help: str | None, span: Span) -> tuple[Fix, ...]:
    """The edits that a help offers for a finding at a place."""
    ways = help.ways if isinstance(help, Help) else ()
    made = [fix for way in ways if (fix := way(span)) is not None]
    return tuple(fix for fix in made if fix.span.text != fix.text)


def spoken(help: str | None, span: Span) -> tuple[str | None, tuple[Fix, ...]]:
    """The text of a help and its edits, in the words of the file's edition: from the second on, what is given and tensors are `input`."""
    fixes = fixes_of(help, span)
    if help is None or not _SECOND.match(span.file.text):
        return None if help is None else str(help), fixes
    edits = [Fix(fix.span, _INPUT_LINES.sub(r"\1input", fix.text), _INPUTS.sub("input", fix.title)) for fix in fixes]
    return _INPUTS.sub("input", help), tuple(edits)


_SECOND = re.compile(r"(?:\s|#[^\n]*\n)*kv[ \t]+2\b")
_INPUTS = re.compile(r"(?<=`)(?:given|tensor)(?= )")
_INPUT_LINES = re.compile(r"^([ \t]*)(?:given|tensor)(?= )", re.MULTILINE)


# -- helps -------------------------------------------------------------------------------------------------------------


def offer(text: str, more: str = "", *, at: Span | None = None, around: str = "{}") -> Help:
    """A help each of whose codes in backticks may stand in place of what is wrong.

    Args:
        more: goes on with the text; its codes are no edits.
        at: what the codes replace, if it is not the place of the finding.
        around: what stands around them there.
    """
    codes = [code for code in re.findall(r"`([^`]+)`", text) if "…" not in code]
    ways = [_replacing(code, around.replace("{}", code), at) for code in codes]
    return Help(text + more, *ways)


def instead(text: str, new: str, at: Span | None = None) -> Help:
    """A help in words, whose edit puts `new` in place of what is wrong."""
    return Help(text, _replacing(new, new, at))


def add(text: str, more: str = "", *, at: Span | None = None) -> Help:
    """A help whose codes in backticks are statements that the policy lacks."""
    codes = re.findall(r"`([^`]+)`", text)
    return Help(text + more, lambda span: _added("\n  ".join(codes), at or span))


def operand(text: str) -> str:
    """An expression as a part of another one: in parentheses unless it is a name, a number or a call."""
    return text if re.fullmatch(r"[\w.]+(\((?:[^()]|\([^()]*\))*\))?", text) else f"({text})"


def leave_out(text: str, *places: Span) -> Help:
    """A help whose edit takes a place out, or one of several, a statement with its line."""
    return Help(text, *(_without(place) for place in places))


def prefix(text: str, word: str, at: Span | None = None) -> Help:
    """A help whose edit puts a word before what is wrong."""
    return Help(text, lambda span: _inserted(at or span, f"{word} ", f"write `{word}` before it"))


def begin(text: str, line: str) -> Help:
    """A help whose edit is a line at the head of the file."""
    return Help(text, lambda span: _inserted(_at(span, 0), f"{line}\n\n", f"begin with `{line}`"))


def both(*helps: str) -> Help:
    """Helps that are one sentence: their edits are alternatives."""
    return Help("".join(helps), *(way for help in helps if isinstance(help, Help) for way in help.ways))


# -- edits -------------------------------------------------------------------------------------------------------------


def _replacing(code: str, new: str, at: Span | None) -> Way:
    return lambda span: Fix(at or span, new, f"write `{code}`")


def _at(span: Span, place: int) -> Span:
    return span.file.span(place, place)


def _inserted(span: Span, text: str, title: str) -> Fix:
    return Fix(_at(span, span.start), text, title)


def _added(code: str, span: Span) -> Fix | None:
    """The statement as the last one of the body that is around or behind a place; an import below the edition."""
    text, title = span.file.text, f"add `{' '.join(code.split())}`"
    if code == "}":
        return _inserted(_at(span, len(text)), "}\n" if text.endswith("\n") else "\n}\n", title)
    if code.startswith("import "):
        return _inserted(_at(span, _below_imports(text)), f"{code}\n", title)
    closing = re.compile(r"^[ \t]*\}", re.MULTILINE).search(text, span.start)
    return None if closing is None else _inserted(_at(span, closing.start()), f"  {code}\n", title)


def _below_imports(text: str) -> int:
    """Where another import may stand."""
    head = re.match(r"(?:[ \t]*(?:kv|import)\b[^\n]*\n|[ \t]*(?:#[^\n]*)?\n(?=[ \t]*(?:kv|import)\b))*", text)
    return 0 if head is None else head.end()


def named_and_imported(span: Span, name: str, stem: str) -> Fix:
    """A name in place of what is wrong, and the import that makes it known."""
    at = _below_imports(span.file.text)
    between = span.file.text[at : span.start]
    return Fix(span.file.span(at, span.end), f"import {stem}\n{between}{name}", f"write `{name}` and `import {stem}`")


def named_and_added(span: Span, name: str, statement: str) -> Fix | None:
    """A name in place of what is wrong, and the statement that defines it as the last one of the body."""
    added = _added(statement, span)
    if added is None:
        return None
    between = span.file.text[span.end : added.span.start]
    return Fix(
        span.file.span(span.start, added.span.end), name + between + added.text, f"write `{name}` and add `{statement}`"
    )


def _without(place: Span) -> Way:
    """What stands at a place taken out, with its line if it is alone there, else with the space behind it; with a comma, if it is
    the last of several things, or the first.
    """
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
