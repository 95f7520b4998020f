"""Compute repeated expressions of printed Python functions once: inlining a `let` repeats it.

All expressions are pure, so the order of evaluation does not matter.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_VIEWS = frozenset({"unsqueeze", "number", "scalar", "exact", "vector", "vectors", "column", "ring", "double", "item"})
"""Calls too cheap for a local."""

_PARSING = threading.Lock()
"""Held for `ast.parse`: some Python 3.11 and 3.12 fail if two threads are in it at once."""

_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "sum", ast.Sub: "difference", ast.Mult: "product", ast.Div: "quotient", ast.Mod: "rest", ast.Pow: "power",
    ast.Compare: "condition", ast.BitAnd: "condition", ast.BitOr: "condition", ast.Invert: "condition", ast.USub: "negative",
}  # fmt: skip


def shared(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a function's body, with locals for expressions that occur more than once."""
    text, names = "\n".join(lines), 0
    mark = "__"
    while re.search(rf"{mark}\d", text):  # a column may have such a name
        mark += "_"
    while (found := _largest(text)) is not None:
        names += 1
        text = _named(text, found, f"{_called(found[0].node)}{mark}{names}")
    return tuple(_numbered(text, mark).split("\n"))


@dataclass(frozen=True)
class _Place:
    """An occurrence of an expression, as offsets into the text; `line` is the offset of its statement."""

    node: ast.expr
    begin: int
    end: int
    line: int


def _largest(text: str) -> list[_Place] | None:
    """Return all occurrences of the longest expression that occurs more than once."""
    found: dict[str, list[_Place]] = {}
    for place in _places(text):
        found.setdefault(ast.dump(place.node), []).append(place)
    several = [places for places in found.values() if len(places) > 1]
    return max(several, key=lambda places: places[0].end - places[0].begin, default=None)


def _places(text: str) -> Iterator[_Place]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    with _PARSING:
        module = ast.parse(_as_function(text))
    for statement in module.body[0].body:  # type: ignore[attr-defined]
        for node in _outside_lambdas(statement):
            if _is_worth(node):
                assert node.end_lineno is not None and node.end_col_offset is not None
                begin = starts[node.lineno - 2] + node.col_offset - 1
                end = starts[node.end_lineno - 2] + node.end_col_offset - 1
                yield _Place(node, begin, end, starts[statement.lineno - 2])


def _as_function(text: str) -> str:
    """Wrap the text in a function, since it may contain `return`. Every line moves one column right and one line down."""
    return "def body():\n" + "\n".join(f" {line}" for line in text.split("\n"))


def _outside_lambdas(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose value does not depend on where in the function they stand."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _outside_lambdas(child)


def _is_worth(node: ast.AST) -> TypeGuard[ast.expr]:
    """Return whether a node is an expression that is worth a local."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            return name not in _VIEWS
        case ast.UnaryOp(operand=ast.Constant() | ast.Name() | ast.Attribute()):
            return False
        case ast.UnaryOp() | ast.BinOp() | ast.Compare():
            return True
    return False


def _called(node: ast.expr) -> str:
    """Return a name for an expression's local."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=first), *_]) if name.startswith("over_"):
            return f"{first!s}_{name}"
        case ast.Call(func=ast.Attribute(attr=name)):
            return name
        case ast.UnaryOp(op=sign) | ast.BinOp(op=sign):
            return _SIGNS[type(sign)]
    return _SIGNS[type(node)]


def _numbered(text: str, mark: str) -> str:
    """Number the new names, which contain the mark, in order, skipping names that already exist."""
    number = 0
    for name in re.findall(rf"^(\w+{mark}\d+) = ", text, re.MULTILINE):
        stem = name.rpartition(mark)[0]
        number += 1
        while re.search(rf"\b{stem}_{number}\b", text):
            number += 1
        text = re.sub(rf"\b{name}\b", f"{stem}_{number}", text)
    return text


def _named(text: str, places: list[_Place], name: str) -> str:
    """Replace all occurrences by a name, and define it before the first."""
    first = places[0]
    value = text[first.begin : first.end]
    for place in sorted(places, key=lambda one: -one.begin):
        begin, end = place.begin, place.end
        around = text[begin - 1 : begin], text[end : end + 1]
        if around == ("(", ")") and not (text[begin - 2 : begin - 1].isalnum() or text[begin - 2 : begin - 1] in "_)]"):
            begin, end = begin - 1, end + 1  # a name needs no parentheses
        text = text[:begin] + name + text[end:]
    line = min(place.line for place in places)
    return f"{text[:line]}{name} = {value}\n{text[line:]}"
