"""Turn Lark's tree into dataclasses: the steps of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Union

from lark import Token, Tree

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean
from kvdsl.reference import NO_NUMBERS, PLACES, STEPS, VALUES, VECTORS
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.lexer import span_of

MANY = 4_096
"""The most repetitions of a token in one step, and the longest range of positions."""

Child = Union["Tree[Token]", Token, None]


class TestShaper:
    """Shapes the steps of a file's tests; `string` reads a STRING."""

    def __init__(self, source: SourceFile, sink: Sink, string: Callable[[Child], syn.Word]) -> None:
        self.source, self.sink, self.string = source, sink, string

    def step(self, tree: Tree[Token]) -> syn.Step:
        """Return a step of a test."""
        span, kind = self._span(tree), str(tree.data)
        if kind in ("use", "use_at"):
            name, *numbers = tree.children
            return syn.Use(span, self._word(name), *(None if n is None else self._constant(n) for n in numbers))
        if kind == "set":
            name, value = tree.children
            return syn.Set(span, self._word(name), self._signed(value))
        if kind == "prompt":
            return syn.Prompt(span, tuple(self._incoming(child) for child in _trees(tree)))
        if kind in ("attend", "token", "times"):
            return self._incoming(tree)
        if kind == "turn":
            return self._turn(span)
        return self._expect(span, kind, tree)

    def _turn(self, span: Span) -> syn.Turn:
        if span.text != "turn":
            self.sink.report(codes.STATEMENT, span, f"unknown statement `{span.quoted()}`", did_you_mean(span.text, STEPS))
        return syn.Turn(span)

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
        message = f"a token can be repeated 1 to {MANY} times, not {count.span.quoted()}"
        self.sink.report(codes.TEST_SIZE, count.span, message)
        return 1

    def _brought(self, tree: Tree[Token]) -> syn.Brought:
        span, (name, *rows) = self._span(tree), tree.children
        word = self._word(name)
        if tree.data == "supplied":
            return syn.Brought(span, "given", self._one_each(_tree(rows[0])), word)
        heads = tuple(tuple(self._row(row) for row in _trees(_tree(one))) for one in rows)
        if word.text == "query":
            return syn.Brought(span, "query", heads)
        for one, of_head in zip(rows, heads, strict=True):
            if len(of_head) > 1:
                message = f"`and` separates query heads, which `{word.text}` does not have"
                self.sink.report(codes.TEST_SIZE, self._span(_tree(one)), message, "`/` separates KV heads")
        heads = tuple(of_head[:1] for of_head in heads)
        return syn.Brought(span, word.text, heads) if word.text in VECTORS else syn.Brought(span, "given", heads, word)

    def _one_each(self, rows: Tree[Token]) -> tuple[tuple[syn.Row, ...], ...]:
        return tuple((self._row(row),) for row in _trees(rows))

    def _expect(self, span: Span, kind: str, tree: Tree[Token]) -> syn.Expect:
        name, found = self._word(tree.children[0]), tree.children[1]
        if kind == "expect_error" or name.text == "error":
            if name.text != "error":
                self._unexpected(name.span, f"expected `error` before a string, not `{name.text}`", ("error",))
            elif isinstance(found, Tree):
                self._unexpected(self._span(found), "expected a string after `error`")
            else:
                return syn.Expect(span, "error", word=self.string(found))
            return syn.Expect(span, "error")
        rows = list(_trees(_tree(found)))
        if name.text in PLACES and kind == "expect":
            return syn.Expect(span, name.text, tuple(map(self._places, rows)))
        numbers = tuple(map(self._row, rows))
        if name.text in VALUES and kind == "expect":
            return syn.Expect(span, name.text, numbers)
        return syn.Expect(span, "state", numbers, name)

    def _unexpected(self, span: Span, message: str, known: Iterable[str] = ()) -> None:
        self.sink.report(codes.SYNTAX, span, message, did_you_mean(span.text, known))

    def _row(self, tree: Tree[Token]) -> syn.Row:
        span, parts = self._span(tree), list(_trees(tree))
        for part in parts:
            if part.data == "span":
                self._unexpected(self._span(part), f"expected a number, not `{self._span(part).quoted()}`")
        parts = [part for part in parts if part.data != "span"]
        rests = [at for at, part in enumerate(parts) if part.data == "rest"]
        for at in rests[1:]:
            self.sink.report(codes.TEST_SIZE, self._span(parts[at]), "a row has one `rest`")
        values = tuple(self._signed(part).value for part in parts if part.data != "rest")
        if not rests:
            return syn.Row(span, values)
        return syn.Row(span, values, self._signed(parts[rests[0]].children[0]).value, rests[0])

    def _places(self, tree: Tree[Token]) -> syn.Places:
        span, parts = self._span(tree), list(_trees(tree))
        return syn.Places(span, () if span.text == "nothing" else tuple(self._positions(part) for part in parts))

    def _positions(self, tree: Tree[Token]) -> tuple[int, int]:
        span = self._span(tree)
        numbers = [child for child in tree.children if isinstance(child, Token) and child.type == "NUMBER"]
        ends = [self._constant(child).value for child in numbers]
        if tree.data == "rest" or any(isinstance(child, Token) and child.type == "NAME" for child in tree.children):
            self._unexpected(span, f"expected a number or `nothing`, not `{span.quoted()}`", ("nothing",))
        elif not all(end.is_integer() for end in ends) or span.text.startswith("-"):
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` is not a position", "positions are whole numbers")
        elif not 0 <= ends[-1] - ends[0] <= MANY:
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` has no positions, or too many")
        else:
            return int(ends[0]), int(ends[-1])
        return 0, 0

    def _signed(self, child: Child) -> syn.Constant:
        minus, number = _tree(child).children
        assert isinstance(number, Token)
        if number.type == "NAME" and number not in NO_NUMBERS:
            span = span_of(self.source, number)
            self._unexpected(span, f"expected a number, `inf` or `nan`, not `{number}`", NO_NUMBERS)
            return syn.Constant(span, 0.0)
        value = self._constant(number).value
        return syn.Constant(self._span(_tree(child)), value if minus is None else -value)

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


def _tree(child: Child) -> Tree[Token]:
    assert isinstance(child, Tree)
    return child
