"""Turn Lark's tree into dataclasses: words and strings, and the steps of a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar, Union

from lark import Token, Tree

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean, printable
from kvdsl.helps import offer
from kvdsl.reference import NO_NUMBERS, PLACES, STEPS, VALUES, VECTORS
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.lexer import span_of

MANY = 4_096
"""The most repetitions of a token in one step, and the longest range of positions."""

Child = Union["Tree[Token]", Token, None]
Shaped = TypeVar("Shaped")

_ESCAPE = re.compile(r"\\(?:u\{(?P<point>[0-9A-Fa-f]{1,6})\}|(?P<simple>.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_CONTROL = re.compile(r"[^\S \n\t]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Shaper:
    """Shapes words and strings, and finds the span of a tree."""

    def __init__(self, source: SourceFile, sink: Sink) -> None:
        self.source, self.sink = source, sink

    def _span(self, tree: Tree[Token]) -> Span:
        return self.source.span(tree.meta.start_pos, tree.meta.end_pos)

    def _word(self, child: Child) -> syn.Word:
        token = token_of(child)
        return syn.Word(span_of(self.source, token), str(token))

    def _string(self, child: Child) -> syn.Word:
        word = self._word(child)
        quotes = 3 if word.text[:3] in ('"""', "'''") else 1
        return syn.Word(word.span, self._unescaped(word.text[quotes:-quotes], word.span, quotes))

    def _unescaped(self, text: str, span: Span, quotes: int) -> str:
        def value(match: re.Match[str]) -> str:
            place = self.source.span(span.start + quotes + match.start(), span.start + quotes + match.end())
            return self._escape(match, place)

        for match in _CONTROL.finditer(text):
            at = span.start + quotes + match.start()
            message = f"a string cannot contain the character `{printable(match.group())}` directly"
            help = offer(f"write `\\u{{{ord(match.group()):x}}}`")
            self.sink.report(codes.ENCODING, self.source.span(at, at + 1), message, help)
        return _ESCAPE.sub(value, text)

    def _escape(self, match: re.Match[str], place: Span) -> str:
        if match["simple"] in _SIMPLE:
            return _SIMPLE[match["simple"]]
        point = int(match["point"], 16) if match["point"] else 0x110000
        if 0 < point < 0xD800 or 0xDFFF < point < 0x110000:
            return chr(point)
        help = r"the escapes are \n, \t, \\, \", \' and \u{...} with a code point"
        self.sink.report(codes.ESCAPE, place, f"unknown escape `{printable(match.group())}`", help)
        return ""


class TestShaper(Shaper):
    """Shapes the steps of a file's tests."""

    def step(self, tree: Tree[Token]) -> syn.Step:
        """Return a step of a test."""
        span, kind = self._span(tree), str(tree.data)
        if kind in ("use", "use_at"):
            name, *numbers = tree.children
            return syn.Use(span, self._word(name), *(optional(self._constant, number) for number in numbers))
        if kind == "set":
            name, value = tree.children
            return syn.Set(span, self._word(name), self._signed(value))
        if kind == "prompt":
            return syn.Prompt(span, tuple(self._incoming(child) for child in trees(tree.children)))
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
            return replace(self._incoming(tree_of(token)), span=self._span(tree), times=self._times(self._constant(count)))
        brought = [self._brought(child) for child in trees(tree.children) if child.data != "rows"]
        if tree.data == "attend":
            (rows,) = (child for child in trees(tree.children) if child.data == "rows")
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
            return syn.Brought(span, "given", self._one_each(tree_of(rows[0])), word)
        heads = tuple(tuple(self._row(row) for row in trees(tree_of(one).children)) for one in rows)
        if word.text == "query":
            return syn.Brought(span, "query", heads)
        for one, of_head in zip(rows, heads, strict=True):
            if len(of_head) > 1:
                message = f"`and` separates query heads, which `{word.text}` does not have"
                self.sink.report(codes.TEST_SIZE, self._span(tree_of(one)), message, "`/` separates KV heads")
        heads = tuple(of_head[:1] for of_head in heads)
        return syn.Brought(span, word.text, heads) if word.text in VECTORS else syn.Brought(span, "given", heads, word)

    def _one_each(self, rows: Tree[Token]) -> tuple[tuple[syn.Row, ...], ...]:
        return tuple((self._row(row),) for row in trees(rows.children))

    def _expect(self, span: Span, kind: str, tree: Tree[Token]) -> syn.Expect:
        name, found = self._word(tree.children[0]), tree.children[1]
        if kind == "expect_error" or name.text == "error":
            if name.text != "error":
                self._unexpected(name.span, f"expected `error` before a string, not `{name.text}`", ("error",))
            elif isinstance(found, Tree):
                self._unexpected(self._span(found), "expected a string after `error`")
            else:
                return syn.Expect(span, "error", word=self._string(found))
            return syn.Expect(span, "error")
        rows = trees(tree_of(found).children)
        if name.text in PLACES and kind == "expect":
            return syn.Expect(span, name.text, tuple(map(self._places, rows)))
        numbers = tuple(map(self._row, rows))
        if name.text in VALUES and kind == "expect":
            return syn.Expect(span, name.text, numbers)
        return syn.Expect(span, "state", numbers, name)

    def _unexpected(self, span: Span, message: str, known: Iterable[str] = ()) -> None:
        self.sink.report(codes.SYNTAX, span, message, did_you_mean(span.text, known))

    def _row(self, tree: Tree[Token]) -> syn.Row:
        span, parts = self._span(tree), trees(tree.children)
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
        span, parts = self._span(tree), trees(tree.children)
        return syn.Places(span, () if span.text == "nothing" else tuple(self._positions(part) for part in parts))

    def _positions(self, tree: Tree[Token]) -> tuple[int, int]:
        span = self._span(tree)
        words = [child for child in tree.children if isinstance(child, Token)]
        ends = [self._constant(word).value for word in words if word.type == "NUMBER"]
        if tree.data == "rest" or any(word.type == "NAME" for word in words):
            self._unexpected(span, f"expected a number or `nothing`, not `{span.quoted()}`", ("nothing",))
        elif not all(end.is_integer() for end in ends) or span.text.startswith("-"):
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` is not a position", "positions are whole numbers")
        elif not 0 <= ends[-1] - ends[0] <= MANY:
            self.sink.report(codes.TEST_SIZE, span, f"`{span.quoted()}` has no positions, or too many")
        else:
            return int(ends[0]), int(ends[-1])
        return 0, 0

    def _signed(self, child: Child) -> syn.Constant:
        minus, number = tree_of(child).children[0], token_of(tree_of(child).children[1])
        if number.type == "NAME" and number not in NO_NUMBERS:
            span = span_of(self.source, number)
            self._unexpected(span, f"expected a number, `inf` or `nan`, not `{number}`", NO_NUMBERS)
            return syn.Constant(span, 0.0)
        value = self._constant(number).value
        return syn.Constant(self._span(tree_of(child)), value if minus is None else -value)

    def _constant(self, child: Child) -> syn.Constant:
        token = token_of(child)
        span, value = span_of(self.source, token), float(token)
        if token.type == "NUMBER" and value == float("inf"):
            self.sink.report(codes.NUMBER, span, f"the number `{span.quoted()}` is too large")
        return syn.Constant(span, value)


def trees(children: Iterable[Child]) -> list[Tree[Token]]:
    """Return the parts that are present, without words."""
    return [child for child in children if isinstance(child, Tree)]


def tree_of(child: Child) -> Tree[Token]:
    """Return a part that is a tree by the grammar."""
    assert isinstance(child, Tree)
    return child


def token_of(child: Child) -> Token:
    """Return a part that is a word by the grammar."""
    assert isinstance(child, Token)
    return child


def optional(shape: Callable[[Child], Shaped], child: Child) -> Shaped | None:
    """Return the shape of a part that may be missing."""
    return None if child is None else shape(child)
