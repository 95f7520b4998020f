"""Mends what `help` says how to mend. What stands there in backticks is tried at the place, and offered only if then nothing is wrong
that was not before, and what was is no longer: so no fix makes a text worse, and a help that is no recipe offers nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lsprotocol import types as lsp

from kvdsl.diagnostics import Diagnostic
from kvdsl.lsp.diagnostics import shown
from kvdsl.lsp.document import Document, read_document
from kvdsl.sema.modules import NO_TEXTS

_CHAPTER = len("KV01")
_MOST = 8
"""Of each finding so many edits are tried."""


@dataclass(frozen=True)
class Edit:
    """A replacement of the characters from `start` up to `end`."""

    start: int
    end: int
    text: str

    def applied(self, text: str) -> str:
        """The text with it."""
        return text[: self.start] + self.text + text[self.end :]


def fixes(document: Document, range: lsp.Range, texts: Mapping[Path, str] = NO_TEXTS) -> list[lsp.CodeAction]:
    """What mends the findings in a range, the surest first."""
    start, end = document.offset(range.start), document.offset(range.end)
    found = [one for one in document.diagnostics if one.span.file is document.source]
    return [
        action
        for one in found
        if one.span.start <= end and start <= one.span.end
        for action in _actions(document, one, texts)
    ]


def _actions(document: Document, found: Diagnostic, texts: Mapping[Path, str]) -> Iterator[lsp.CodeAction]:
    seen: set[str] = set()
    offered: set[str] = set()
    for title, edit in list(_edits(document.text, found))[:_MOST]:
        after = edit.applied(document.text)
        if after in seen or after == document.text or title in offered:
            continue
        seen.add(after)
        if _mends(document, after, found, texts):
            offered.add(title)
            change = lsp.TextEdit(document.positions.range(edit.start, edit.end), edit.text)
            yield lsp.CodeAction(
                title,
                kind=lsp.CodeActionKind.QuickFix,
                diagnostics=[shown(document, found)],
                edit=lsp.WorkspaceEdit(changes={document.uri: [change]}),
                is_preferred=len(seen) == 1,
            )


def _mends(document: Document, after: str, found: Diagnostic, texts: Mapping[Path, str]) -> bool:
    """Whether a text has one finding of that kind less, and no error that there was not, of the same chapter or of one before it: where the
    syntax is wrong, nothing is said of names, and where a name is wrong, nothing of axes.
    """
    changed = read_document(document.uri, after, document.positions.encoding, texts)
    chapter = found.code[:_CHAPTER]

    def errors(one: Document) -> list[tuple[str, str]]:
        return [(e.code, e.message) for e in one.diagnostics if e.severity == "error" and e.code[:_CHAPTER] <= chapter]

    before, now = errors(document), errors(changed)
    same = [one.code for one in document.diagnostics].count(found.code) - 1
    return [one.code for one in changed.diagnostics].count(found.code) == same and all(
        now.count(one) <= before.count(one) for one in now
    )


# -- what may be meant -------------------------------------------------------------------------------------------------


def _edits(text: str, found: Diagnostic) -> Iterator[tuple[str, Edit]]:
    """Edits with their titles, that a help may mean."""
    help, start, end = found.help or "", found.span.start, found.span.end
    line = text.rfind("\n", 0, start) + 1
    indent = line + len(text[line:]) - len(text[line:].lstrip(" \t"))
    for code in re.findall(r"`([^`]+)`", help):
        if code.startswith("import "):
            yield f"add `{code}`", _below_edition(text, code)
        if re.fullmatch(r"kv \d+", code):
            yield f"begin with `{code}`", Edit(0, 0, f"{code}\n\n")
        if code == "}":
            yield "add `}`", Edit(len(text), len(text), "}\n" if text.endswith("\n") else "\n}\n")
        if help.startswith("leave out") or help.startswith("the parentheses"):
            yield f"leave out `{code}`", _without(text, code, line)
            if code != "override":
                yield f"leave out the line `{code} …`", _line_of(text, code, start, "")
        if help.startswith("add "):
            yield f"add `{code}`", _last_in_body(text, code, start)
        if code.startswith("override "):
            yield "override it", Edit(indent, indent, "override ")
            continue
        yield f"write `{code}`", Edit(start, end, code)
        if help.startswith("write ") and " " in code:
            indented = code if code.startswith("import ") else f"  {code}"
            yield f"write `{code}`", _line_of(text, code.split()[0], start, f"{indented}\n")
        if code.startswith("over "):
            yield f"write `{code}`", _another_axis(text, code, start, end)
        if code.endswith("(x)"):
            yield f"write `{code[:-3]}`", Edit(start, end, code[:-3])
        for first, last in _calls_around(text, start, end):
            yield f"write `{code}`", Edit(first, last, code)
    if help == "leave out the parentheses":
        after = re.compile(r"\s*\([^()\n]*\)").match(text, end)
        if after is not None:
            yield help, Edit(end, after.end(), "")


def _calls_around(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The calls on the line that hold a place, the innermost first."""
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    calls = []
    opened: list[int] = []
    for at in range(first, len(text) if last < 0 else last):
        if text[at] == "(":
            opened.append(at)
        elif text[at] == ")" and opened:
            name = re.search(r"\w*$", text[first : (paren := opened.pop())])
            calls.append((paren - len(name[0]) if name else paren, at + 1))
    return ((one, other) for one, other in calls if one <= start and end <= other)


def _last_in_body(text: str, statement: str, start: int) -> Edit:
    """A statement of its own before the `}` of the body that is around or behind a place."""
    closing = re.compile(r"^[ \t]*\}", re.MULTILINE).search(text, start)
    at = len(text) if closing is None else closing.start()
    return Edit(at, at, f"  {statement}\n")


def _another_axis(text: str, axis: str, start: int, end: int) -> Edit:
    """The first `over ...` in a place, with another axis."""
    at = re.compile(r"\bover \w+").search(text, start, end)
    return Edit(start, start, "") if at is None else Edit(*at.span(), axis)


def _line_of(text: str, word: str, start: int, new: str) -> Edit:
    """Another line in place of the one in the body around a place (or above all bodies) that begins with a word."""
    head = text.rfind("{", 0, start) + 1
    at = re.compile(rf"^[ \t]*{re.escape(word)}\b[^\n]*\n", re.MULTILINE).search(text, head)
    return Edit(start, start, "") if at is None else Edit(*at.span(), new)


def _below_edition(text: str, line: str) -> Edit:
    """A line below `kv 1` and the imports that are there."""
    head = re.match(r"(?:[ \t]*(?:kv|import)\b[^\n]*\n|[ \t]*(?:#[^\n]*)?\n(?=[ \t]*(?:kv|import)\b))*", text)
    at = 0 if head is None else head.end()
    return Edit(at, at, f"{line}\n")


def _without(text: str, code: str, start: int) -> Edit:
    """The next place of a word taken out, with the space behind it."""
    at = text.find(code, start)
    if at < 0:
        return Edit(start, start, "")
    end = at + len(code)
    return Edit(at, end + (text[end : end + 1] == " "), "")
