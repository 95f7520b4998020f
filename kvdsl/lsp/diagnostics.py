"""What is wrong with a text, as editors show it."""

from __future__ import annotations

from lsprotocol import types as lsp

from kvdsl.codes import CODES
from kvdsl.diagnostics import Diagnostic
from kvdsl.lsp.document import Document

_SEVERITIES = {"error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning}


def diagnostics(document: Document) -> list[lsp.Diagnostic]:
    """All of them. What is wrong in another file is shown where the text imports it."""
    return [shown(document, found) for found in document.diagnostics]


def shown(document: Document, found: Diagnostic) -> lsp.Diagnostic:
    """One, with how to mend it in a line of its own."""
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
