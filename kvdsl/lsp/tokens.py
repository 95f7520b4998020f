"""Semantic tokens: the kind of each word, for more exact colours than patterns give."""

from __future__ import annotations

from collections.abc import Iterator

from lark import Token
from lsprotocol import types as lsp

from kvdsl.lsp import Document
from kvdsl.lsp.names import Name
from kvdsl.syntax.parser import keywords

_Type = lsp.SemanticTokenTypes
_TYPES = (_Type.Keyword, _Type.Comment, _Type.String, _Type.Number, _Type.Operator, _Type.Class, _Type.Property, _Type.Variable,
          _Type.Function, _Type.Parameter, _Type.Namespace)  # fmt: skip
_MODIFIERS = (lsp.SemanticTokenModifiers.Declaration, lsp.SemanticTokenModifiers.DefaultLibrary)
LEGEND = lsp.SemanticTokensLegend([str(one.value) for one in _TYPES], [str(one.value) for one in _MODIFIERS])

_KINDS = {
    "param": _Type.Property, "tensor": _Type.Property, "given": _Type.Property, "let": _Type.Variable, "function": _Type.Function,
    "argument": _Type.Parameter, "policy": _Type.Class, "file": _Type.Namespace, "input": _Type.Variable, "built-in": _Type.Function,
}  # fmt: skip
_PUNCTUATION = {"_SEP", "LPAR", "RPAR", "LBRACE", "RBRACE", "LSQB", "RSQB", "COMMA"}
_LITERALS = {"STRING": _Type.String, "NUMBER": _Type.Number}


def semantic_tokens(document: Document) -> lsp.SemanticTokens:
    """Return all tokens as the protocol encodes them: five numbers each, with positions relative to the previous token."""
    data: list[int] = []
    line = column = 0
    for start, end, kind, modifiers in _on_lines(document):
        place = document.positions.position(start)
        if place.line != line:
            column = 0
        length = document.positions.units(document.text[start:end])
        data += [place.line - line, place.character - column, length, _TYPES.index(kind), modifiers]
        line, column = place.line, place.character
    return lsp.SemanticTokens(data)


def _on_lines(document: Document) -> Iterator[tuple[int, int, lsp.SemanticTokenTypes, int]]:
    """Yield each token, split into lines, because many clients support no multi-line tokens."""
    for token in sorted([*document.tokens, *document.comments], key=lambda one: one.start_pos or 0):
        name = document.names.by_start.get(token.start_pos or 0)
        kind = _kind(token, name)
        if kind is None:
            continue
        modifiers = 0
        if name is not None:
            modifiers = int(name.defines) | 2 * (name.kind in ("input", "built-in"))
        at = token.start_pos or 0
        for part in str(token).split("\n"):
            if part:
                yield at, at + len(part), kind, modifiers
            at += len(part) + 1


def _kind(token: Token, name: Name | None) -> lsp.SemanticTokenTypes | None:
    if token.type == "COMMENT":
        return _Type.Comment
    if name is not None:
        return _KINDS[name.kind]
    if token.type in _LITERALS:
        return _LITERALS[token.type]
    if token.type in _PUNCTUATION:
        return None
    if token.type == "NAME":
        return None
    return _Type.Keyword if str(token) in keywords() else _Type.Operator
