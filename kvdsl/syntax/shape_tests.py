"""From Lark's tree to dataclasses: the steps of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Union

from lark import Token, Tree

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.lexer import span_of

MANY = 4_096
"""The most often that a token can come in by one step, and the longest range of positions."""

Child = Union["Tree[Token]", Token, None]


class TestShaper:
    """Shapes the steps of a file's tests; `string` reads a STRING."""

    def __init__(self, source: SourceFile, sink: Sink, string: Callable[[Child], syn.Word]) -> None:
        self.source, self.sink, self.string = source, sink, string

    def step(self, tree: Tree[Token]) -> syn.Step:
        """One step."""
        span, kind = self._span(tree), str(tree.data)
        if kind == "use":
            name, *numbers = tree.children
            return syn.Use(span, self._word(name), *(None if n is None else self._constant(n) for n in numbers))
        if kind == "set":
            name, value = tree.children
            return syn.Set(span, self._word(name), self._signed(value))
        if kind == "prompt":
            return syn.Prompt(span, tuple(self._incoming(child) for child in _trees(tree)))
        if kind in ("attend", "token", "times"):
            return self._incoming(tree)
        return self._expect(span, kind.removeprefix("expect_"), tree)

    def _incoming(self, tree: Tree[Token]) -> syn.Incoming:
        if tree.data == "times":
            count, token = tree.children
            assert isinstance(token, Tree)
            return replace(self._incoming(token), span=self._span(tree), times=self._times(self._constant(count)))
        brought = [self._brought(child) for child in _trees(tree) if child.data != "rows"]
        if tree.data == "attend":
            (rows,) = (child for child in _trees(tree) if child.data == "rows")
            brought.insert(0, syn.Brought(self._span(rows), "attend", self._one_each(rows)))
        return syn.Incoming(self._span(tree), tuple(brought))

    def _times(self, count: syn.Constant) -> int:
        if count.value.is_integer() and 1 <= count.value <= MANY:
            return int(count.value)
        message = f"a token comes in 1 to {MANY} times, not {count.span.quoted()}"
        self.sink.report(codes.TEST_SIZE, count.span, message)
        return 1

    def _brought(self, tree: Tree[Token]) -> syn.Brought:
        span, kind = self._span(tree), str(tree.data)
        if kind == "query":
            return syn.Brought(span, kind, tuple(tuple(self._row(row) for row in _trees(heads)) for heads in _trees(tree)))
        if kind == "supplied":
            name, rows = tree.children
            assert isinstance(rows, Tree)
            return syn.Brought(span, "given", self._one_each(rows), self._word(name))
        (rows,) = _trees(tree)
        return syn.Brought(span, kind, self._one_each(rows))

    def _one_each(self, rows: Tree[Token]) -> tuple[tuple[syn.Row, ...], ...]:
        return tuple((self._row(row),) for row in _trees(rows))

    def _expect(self, span: Span, what: str, tree: Tree[Token]) -> syn.Expect:
        if what == "error":
            return syn.Expect(span, what, word=self.string(tree.children[0]))
        *name, rows = tree.children
        assert isinstance(rows, Tree)
        if rows.data == "places":
            return syn.Expect(span, what, tuple(self._places(place) for place in _trees(rows)))
        word = self._word(name[0]) if name else None
        return syn.Expect(span, what, tuple(self._row(row) for row in _trees(rows)), word)

    def _row(self, tree: Tree[Token]) -> syn.Row:
        span, parts = self._span(tree), list(_trees(tree))
        rests = [at for at, part in enumerate(parts) if part.data == "rest"]
        for at in rests[1:]:
            self.sink.report(codes.TEST_SIZE, self._span(parts[at]), "a row has one `rest`")
        values = tuple(self._signed(part).value for part in parts if part.data != "rest")
        if not rests:
            return syn.Row(span, values)
        return syn.Row(span, values, self._signed(parts[rests[0]].children[0]).value, rests[0])

    def _places(self, tree: Tree[Token]) -> syn.Places:
        return syn.Places(self._span(tree), tuple(self._positions(part) for part in _trees(tree)))

    def _positions(self, tree: Tree[Token]) -> tuple[int, int]:
        """`3`, or `3..7`."""
        span = self._span(tree)
        ends = [
            self._constant(child).value for child in tree.children if isinstance(child, Token) and child.type == "NUMBER"
        ]
        if not all(end.is_integer() for end in ends):
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` is no position", "positions are whole numbers")
        elif not 0 <= ends[-1] - ends[0] <= MANY:
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` has no positions in it, or too many")
        else:
            return int(ends[0]), int(ends[-1])
        return 0, 0

    def _signed(self, child: Child) -> syn.Constant:
        assert isinstance(child, Tree)
        minus, number = child.children
        value = self._constant(number).value
        return syn.Constant(self._span(child), value if minus is None else -value)

    def _constant(self, child: Child) -> syn.Constant:
        assert isinstance(child, Token)
        span, value = span_of(self.source, child), float(child)
        if child.type == "NUMBER" and value == float("inf"):
            self.sink.report(codes.NUMBER, span, f"the number `{span.quoted()}` is too large")
        return syn.Constant(span, value)

    def _span(self, tree: Tree[Token]) -> Span:
        return self.source.span(tree.meta.start_pos, tree.meta.end_pos)

    def _word(self, child: Child) -> syn.Word:
        assert isinstance(child, Token)
        return syn.Word(span_of(self.source, child), str(child))


def _trees(tree: Tree[Token]) -> Iterator[Tree[Token]]:
    return (child for child in tree.children if isinstance(child, Tree))
