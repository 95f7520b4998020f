"""The edits that helps offer, as quick fixes; one that would not mend this text (`kvdsl.diagnostics.mends`) is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lsprotocol import types as lsp

from kvdsl.diagnostics import Diagnostic, mends
from kvdsl.lsp.diagnostics import shown
from kvdsl.lsp.document import Document, read_document
from kvdsl.sema.modules import NO_TEXTS


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
