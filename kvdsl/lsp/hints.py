"""Inlay hints and code lenses: axes of lets, bytes per token, and commands for a policy."""

from __future__ import annotations

from collections.abc import Iterator

from lsprotocol import types as lsp

from kvdsl.lsp import Document
from kvdsl.lsp.expressions import Placed, axes_in_words, statements, value
from kvdsl.syntax import nodes as syn

COMMANDS = {"explain": "kvdsl.explain", "test": "kvdsl.test", "compile": "kvdsl.compile"}
"""The commands offered on a policy: title and name; they take the document's URI."""


def inlay_hints(document: Document, range: lsp.Range) -> list[lsp.InlayHint]:
    """Return the axes after each let, and the bytes per token after a policy's name."""
    found = [*_axes(document), *_bytes(document)]
    return [hint for hint in found if range.start.line <= hint.position.line <= range.end.line]


def _axes(document: Document) -> Iterator[lsp.InlayHint]:
    for let in statements(document):
        if isinstance(let, syn.Let) and let.parameters is None:
            known = value(document, Placed(let.value))
            if known is not None:
                yield _hint(document, let.name.span.end, f": {axes_in_words(known.axes)}")


def _bytes(document: Document) -> Iterator[lsp.InlayHint]:
    if document.module is None or document.facts is None:
        return
    facts = document.facts
    for policy in document.module.syntax.policies[:1]:
        hint = _hint(document, policy.name.span.end, f" · {facts.bytes_per_token} bytes a token")
        hint.tooltip = (
            f"of each KV head at head size {facts.head_dim} in {facts.dtype}: {facts.key_and_value} for key and value, "
            f"{facts.state_bytes} of state"
        )
        yield hint


def _hint(document: Document, offset: int, label: str) -> lsp.InlayHint:
    return lsp.InlayHint(document.positions.position(offset), label, kind=lsp.InlayHintKind.Type)


def lenses(document: Document) -> list[lsp.CodeLens]:
    """Return lenses over a policy to explain, test and compile it, and over tests to run them."""
    if document.module is None:
        return []
    syntax = document.module.syntax
    if syntax.tests:
        return [_lens(document, test, "test") for test in syntax.tests[:1]]
    return [_lens(document, policy, title) for policy in syntax.policies[:1] for title in COMMANDS]


def _lens(document: Document, item: syn.Policy | syn.Test, title: str) -> lsp.CodeLens:
    line = document.positions.position(item.span.start).line
    place = lsp.Range(lsp.Position(line, 0), lsp.Position(line, 0))
    return lsp.CodeLens(place, lsp.Command(title, COMMANDS[title], arguments=[document.uri]))
