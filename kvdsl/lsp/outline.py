"""The outline of a text, and its foldable ranges."""

from __future__ import annotations

from collections.abc import Iterator

from lsprotocol import types as lsp

from kvdsl.lsp import Document
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

_Kind = lsp.SymbolKind


def symbols(document: Document) -> list[lsp.DocumentSymbol]:
    """Return policies with their statements, lets, and tests."""
    if document.module is None:
        return []
    syntax = document.module.syntax
    found = [(one.span.start, _statement(document, one)) for one in syntax.lets]
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
    match statement:
        case syn.Let():
            kind = _Kind.Variable if statement.parameters is None else _Kind.Function
            return _defined(document, statement, kind, f"= {statement.value.span.quoted()}")
        case syn.Param():
            return _defined(document, statement, _Kind.Property, f"= {statement.value.span.quoted()}")
        case syn.Tensor():
            axes = ", ".join(axis.text for axis in statement.axes)
            return _defined(document, statement, _Kind.Constant, f"[{axes}] from {statement.file.span.quoted()}")
        case syn.Given(source=None, default=None):
            return _defined(document, statement, _Kind.Property, "from the caller")
        case syn.Given(source=None, default=default) if default is not None:
            return _defined(document, statement, _Kind.Property, f"= {default.span.quoted()}")
        case syn.Given():
            return _defined(document, statement, _Kind.Property, "from spans")
    return _symbol(document, statement.span.quoted() or "statement", _Kind.Field, statement.span, statement.span)


def _defined(document: Document, statement: syn.Named, kind: lsp.SymbolKind, detail: str) -> lsp.DocumentSymbol:
    found = _symbol(document, statement.name.text, kind, statement.span, statement.name.span)
    found.detail = detail
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
