"""Signature help: the parameters of the call at a place."""

from __future__ import annotations

from lark import Token
from lsprotocol import types as lsp

from kvdsl.ir.ops import NAMED_FUNCTIONS
from kvdsl.lsp import Document
from kvdsl.reference import meaning, parameters
from kvdsl.syntax import nodes as syn


def signature(document: Document, position: lsp.Position) -> lsp.SignatureHelp | None:
    """Return the function's signature, and the argument being written."""
    found = _call(document, document.offset(position))
    if found is None:
        return None
    name, argument = found
    known = _known(document, name, argument)
    if known is None:
        return None
    names, doc = known
    label = f"{name}({', '.join(names)})"
    information = lsp.SignatureInformation(
        label, documentation=doc, parameters=[lsp.ParameterInformation(one) for one in names], active_parameter=argument
    )
    return lsp.SignatureHelp([information], active_signature=0, active_parameter=argument)


def _call(document: Document, offset: int) -> tuple[str, int] | None:
    """Return the innermost open call at an offset, and the index of its argument there."""
    open_calls: list[list[int | str]] = []
    before: Token | None = None
    for token in document.tokens:
        if (token.start_pos or 0) >= offset:
            break
        if token.type == "LPAR":
            called = before is not None and before.type == "NAME"
            open_calls.append([str(before) if called else "", 0])
        elif token.type == "RPAR" and open_calls:
            open_calls.pop()
        elif token.type in ("LBRACE", "RBRACE"):
            open_calls.clear()
        elif token.type == "COMMA" and open_calls:
            open_calls[-1][1] = int(open_calls[-1][1]) + 1
        before = token
    if not open_calls or not open_calls[-1][0]:
        return None
    return str(open_calls[-1][0]), int(open_calls[-1][1])


def _known(document: Document, name: str, argument: int) -> tuple[tuple[str, ...], str | None] | None:
    """Return a function's parameters and meaning, if there is one of that name."""
    let = _function(document, name)
    if let is not None:
        shown = tuple(one.span.quoted() for one in let.parameters or ())
        return shown, let.span.quoted(200)
    if name not in NAMED_FUNCTIONS:
        return None
    return parameters(name, extreme=name in ("max", "min") and argument > 0), meaning(name)


def _function(document: Document, name: str) -> syn.Let | None:
    """Return the text's function of that name, if it can be called."""
    found = document.lets.get(name)
    return found if found is not None and found.parameters is not None else None
