"""Diagnostics for editors, the edits that fix them, and formatting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path

from lsprotocol import types as lsp

from kvdsl.codes import CODES
from kvdsl.diagnostics import Diagnostic, Sink, mends
from kvdsl.lsp import Document, read_document
from kvdsl.sema.modules import NO_TEXTS
from kvdsl.syntax.formatter import format_source

_SEVERITIES = {"error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning}


def diagnostics(document: Document) -> list[lsp.Diagnostic]:
    """Return all diagnostics. Those of other files are shown at the import."""
    return [shown(document, found) for found in document.diagnostics]


def shown(document: Document, found: Diagnostic) -> lsp.Diagnostic:
    """Return a diagnostic with its help on a separate line."""
    here = found.span.file is document.source
    message = found.message if here else f"{found.file}: {found.message}"
    if found.help:
        message += f"\nhelp: {found.help}"
    labels = [(label.text, document.location(label.span.file, label.span.start, label.span.end)) for label in found.labels]
    if not here:
        labels.append(("here", document.location(found.span.file, found.span.start, found.span.end)))
    related = [lsp.DiagnosticRelatedInformation(place, text) for text, place in labels if place is not None]
    unused = [lsp.DiagnosticTag.Unnecessary] if CODES[found.code].title.startswith("unused") else None
    return lsp.Diagnostic(
        range=_range(document, found, here),
        severity=_SEVERITIES[found.severity],
        code=found.code,
        source="kvdsl",
        message=message,
        related_information=related or None,
        tags=unused,
    )


def _range(document: Document, found: Diagnostic, here: bool) -> lsp.Range:
    if here:
        return document.positions.of(found.span)
    if document.module is None:
        return document.positions.range(0, 0)
    for statement, module in document.module.imported:
        if any(one.file is found.span.file for one in module.all()):
            return document.positions.of(statement.span)
    imports = document.module.syntax.imports
    return document.positions.of(imports[0].span) if imports else document.positions.range(0, 0)


def fixes(document: Document, range: lsp.Range, texts: Mapping[Path, str] = NO_TEXTS) -> list[lsp.CodeAction]:
    """Return the edits that fix findings in a range, the most certain first."""
    start, end = document.offset(range.start), document.offset(range.end)
    found = [one for one in document.diagnostics if one.span.file is document.source]
    return [
        action
        for one in found
        if one.span.start <= end and start <= one.span.end
        for action in _actions(document, one, texts)
    ]


def _actions(document: Document, found: Diagnostic, texts: Mapping[Path, str]) -> Iterator[lsp.CodeAction]:
    for fix in found.fixes:
        if fix.span.file is not document.source:
            continue
        after = read_document(document.uri, fix.applied(), document.positions.encoding, texts)
        if mends(found, fix, document.diagnostics, after.diagnostics):
            change = lsp.TextEdit(document.positions.of(fix.span), fix.text)
            yield lsp.CodeAction(
                fix.title,
                kind=lsp.CodeActionKind.QuickFix,
                diagnostics=[shown(document, found)],
                edit=lsp.WorkspaceEdit(changes={document.uri: [change]}),
                is_preferred=fix is found.fixes[0],
            )


def formatting(document: Document) -> list[lsp.TextEdit]:
    """Return the edits of `kvdsl fmt`; none after syntax errors."""
    after = format_source(document.source, Sink())
    if after is None:
        return []
    old, new = _lines(document.text), _lines(after)
    starts = [0, *accumulate(map(len, old))]
    edits = []
    for kind, i, j, *added in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            edits.append(lsp.TextEdit(document.positions.range(starts[i], starts[j]), "".join(new[slice(*added)])))
    return edits


def _lines(text: str) -> list[str]:
    """Split into lines with their ends; `str.splitlines` knows more line ends than the language."""
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]
