"""The outline of a text, and its foldable ranges."""

from __future__ import annotations

from collections.abc import Iterator

from lsprotocol import types as lsp

from kvdsl.lsp.document import Document
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

_Kind = lsp.SymbolKind


def symbols(document: Document) -> list[lsp.DocumentSymbol]:
    """Return policies with their statements, lets, and tests."""
    if document.module is None:
        return []
    syntax = document.module.syntax
    found = [(one.span.start, _let(document, one)) for one in syntax.lets]
    found += [(one.span.start, _policy(document, one)) for one in syntax.policies]
    found += [
        (one.span.start, _symbol(document, one.title.text or "test", _Kind.Method, one.span, one.title.span))
        for one in syntax.tests
    ]
    return [symbol for _, symbol in sorted(found, key=lambda pair: pair[0])]


def _policy(document: Document, policy: syn.Policy) -> lsp.DocumentSymbol:
    inner = [_statement(document, one) for one in policy.statements]
    found = _symbol(document, policy.name.text, _Kind.Class, policy.span, policy.name.span)
    found.children = inner
    found.detail = policy.heading.partition(f"policy {policy.name.text} ")[2] or None
    return found


def _statement(document: Document, statement: syn.Statement) -> lsp.DocumentSymbol:
    if isinstance(statement, syn.Let):
        return _let(document, statement)
    if isinstance(statement, syn.Param):
        found = _symbol(document, statement.name.text, _Kind.Property, statement.span, statement.name.span)
        found.detail = f"= {statement.value.span.quoted()}"
        return found
    if isinstance(statement, syn.Tensor):
        found = _symbol(document, statement.name.text, _Kind.Constant, statement.span, statement.name.span)
        found.detail = f"[{', '.join(axis.text for axis in statement.axes)}] from {statement.file.span.quoted()}"
        return found
    if isinstance(statement, syn.Given):
        found = _symbol(document, statement.name.text, _Kind.Property, statement.span, statement.name.span)
        found.detail = (
            "from spans"
            if statement.source is not None
            else "from the caller"
            if statement.default is None
            else f"= {statement.default.span.quoted()}"
        )
        return found
    return _symbol(document, statement.span.quoted() or "statement", _Kind.Field, statement.span, statement.span)


def _let(document: Document, let: syn.Let) -> lsp.DocumentSymbol:
    kind = _Kind.Variable if let.parameters is None else _Kind.Function
    found = _symbol(document, let.name.text, kind, let.span, let.name.span)
    found.detail = f"= {let.value.span.quoted()}"
    return found


def _symbol(document: Document, name: str, kind: lsp.SymbolKind, whole: Span, name_span: Span) -> lsp.DocumentSymbol:
    return lsp.DocumentSymbol(name, kind, document.positions.of(whole), document.positions.of(name_span))


def foldings(document: Document) -> list[lsp.FoldingRange]:
    """Return blocks, docstrings, and comments of several lines."""
    return [*_blocks(document), *_comments(document)]


def _blocks(document: Document) -> Iterator[lsp.FoldingRange]:
    opened: list[int] = []
    for token in document.tokens:
        start, end = token.start_pos or 0, token.end_pos or 0
        line = document.positions.position(start).line
        if token.type == "LBRACE":
            opened.append(line)
        elif token.type == "RBRACE" and opened:
            begin = opened.pop()
            if line - 1 > begin:
                yield lsp.FoldingRange(begin, line - 1)
        elif token.type == "STRING" and "\n" in token:
            yield lsp.FoldingRange(line, document.positions.position(end).line)


def _comments(document: Document) -> Iterator[lsp.FoldingRange]:
    lines = sorted({document.positions.position(one.start_pos or 0).line for one in document.comments})
    begin = 0
    for index, line in enumerate(lines):
        if index == 0 or lines[index - 1] != line - 1:
            begin = line
        if (index + 1 == len(lines) or lines[index + 1] != line + 1) and line > begin:
            yield lsp.FoldingRange(begin, line, kind=lsp.FoldingRangeKind.Comment)
