"""Parse tokens into a tree, and report as many syntax errors as possible.

The tables are Lark's; the loop is our own for two reasons. A word becomes a keyword only where the grammar accepts one, so
keywords are never reserved. And after an error the parser returns to the last place where a statement could begin, skips to the
next one, and goes on: an error costs a statement, not the file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path

import lark
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from kvdsl.build import cache_folder
from kvdsl.build.store import entry
from kvdsl.diagnostics import Sink
from kvdsl.errors import KvdslError
from kvdsl.files import read_resource
from kvdsl.ir.ops import NAMED_INPUTS
from kvdsl.source import Combined, SourceFile, Span
from kvdsl.syntax.forms import DEFINERS, STATEMENTS
from kvdsl.syntax.lexer import Lexer, span_of
from kvdsl.syntax.messages import Stuck, ends_in_operator, explain

MAX_ERRORS = 20

ANYTHING = "*"
"""In the names that an error may have hidden: any name or statement."""
A_STATEMENT = "?"
"""In the names that an error may have hidden: some statement that defines no name."""


_State = tuple[list[object], list[object]]


class Place(Enum):
    """The parser's place: among the items of the file, before a `{`, or inside braces."""

    FILE = 0
    HEADER = 1
    POLICY = 2
    TEST = 3
    PROMPT = 4


_OPENS = {"POLICY": Place.POLICY, "TEST": Place.TEST, "PROMPT": Place.PROMPT}
_AROUND = {Place.POLICY: Place.FILE, Place.TEST: Place.FILE, Place.PROMPT: Place.TEST}
_BEGINS = {Place.FILE: {"POLICY"}, Place.POLICY: {"OVERRIDE"}, Place.TEST: {"EXPECT"}, Place.PROMPT: {"ATTEND", "NUMBER"}}
_ITEMS = ("policy", "test")


@dataclass(frozen=True)
class BrokenStatement:
    """A statement with a syntax error, and the names or settings that it may have defined."""

    span: Span
    defines: frozenset[str]


@dataclass
class Parsed:
    """A tree, or None for an unreadable file, and what is missing from it.

    Attributes:
        tokens: the tokens read, including line ends; keywords have their own types.
        comments: the comments, which the tree lacks.
    """

    tree: Tree[Token] | None
    broken: list[BrokenStatement] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    comments: list[Token] = field(default_factory=list)


@dataclass(frozen=True)
class Prefix:
    """The state of the parser after an unfinished text.

    Attributes:
        accepts: the terminals that could come next.
        keywords: the spelling of those that are keywords.
        statement: the tokens of the unfinished statement.
        stuck: whether the statement has an error, so that `accepts` is unknown.
        hidden: whether the text ends inside a comment or string.
    """

    place: Place
    accepts: frozenset[str]
    keywords: Mapping[str, str]
    statement: tuple[str, ...]
    stuck: bool
    hidden: bool


@lru_cache(maxsize=1)
def _grammar() -> tuple[Lark, Lexer]:
    """Return the tables and the lexer. Tables are cached on disk, because making them takes longer than checking a policy."""
    text = read_resource("grammar", "kv.lark")
    digest = hashlib.sha256("\0".join((text, lark.__version__, sys.version)).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        with open(folder / "tables", "wb") as file:
            _tables(text).save(file)

    try:
        folder = entry(cache_folder() / "grammar" / digest, "grammar", make, patience=1)
        with open(folder / "tables", "rb") as file:
            tables = Lark.load(file)
    except (KvdslError, OSError):  # the cache folder is read-only or locked
        tables = _tables(text)
    return tables, Lexer(list(tables.terminals), list(tables.lexer_conf.ignore))


def keywords() -> frozenset[str]:
    """Return every keyword of the grammar."""
    return frozenset(_grammar()[1].keywords)


@lru_cache(maxsize=1)
def _begins() -> frozenset[str]:
    """Return the words that only begin statements."""
    return frozenset({*STATEMENTS, "override"}) - NAMED_INPUTS


def patterns() -> dict[str, str]:
    """Return the terminals other than keywords, as regular expressions by name."""
    tables, lexer = _grammar()
    return {t.name: t.pattern.to_regexp() for t in tables.terminals if t.name not in lexer.keywords.values()}


def _tables(text: str) -> Lark:
    return Lark(text, parser="lalr", propagate_positions=True, maybe_placeholders=True)


def parse(source: SourceFile, sink: Sink) -> Parsed:
    """Parse a text. Errors go to the sink; statements with errors are missing from the tree."""
    return _Parser(source, sink).run()


def all_tokens(source: SourceFile) -> tuple[list[Token], list[Token]]:
    """Return all tokens and comments of a text, even after errors; keywords have their own types where the parser read them."""
    parser = _Parser(source, Sink())
    parser.run()
    typed = {token.start_pos: token for token in parser.read}
    return [typed.get(token.start_pos, token) for token in parser.tokens[:-1]], parser.comments


def read_prefix(source: SourceFile) -> Prefix:
    """Return the state of the parser after an unfinished text."""
    return _Parser(source, Sink(), goes_on=True).prefix()


def _head(source: Combined) -> list[Token]:
    """Return the tokens that precede the clauses in an equivalent file."""
    words = (
        ("NAME", "policy", 0, 0),
        ("NAME", source.policy, 0, 0),
        ("EQUAL", "=", 0, 0),
        ("NAME", source.of, 0, source.named),
    )
    found = [Token(kind, word, start_pos=start, end_pos=end) for kind, word, start, end in words]
    return [*found, Token("NAME", "with", start_pos=source.clauses, end_pos=source.clauses)]


class _Parser:
    def __init__(self, source: SourceFile, sink: Sink, *, goes_on: bool = False) -> None:
        lark, lexer = _grammar()
        self.source, self.sink = source, sink
        self.keywords = lexer.keywords
        self.machine: InteractiveParser = lark.parse_interactive("")
        self.states = self.machine.parser_state.parse_conf.states
        head, begin = (_head(source), source.clauses) if isinstance(source, Combined) else ([], 0)
        lexed = lexer.lex(source, sink, goes_on=_begins() if goes_on else None, begin=begin)
        self.tokens, self.comments, self.strays = [*head, *lexed.tokens], lexed.comments, lexed.strays
        self.spoiling = lexed.spoiling
        end = len(source.text)
        self.tokens.append(Token("$END", "", start_pos=end, end_pos=end))
        self.at = 0
        self.statement = 0
        self.errors = 0
        self.read: list[Token] = []
        self.broken: list[BrokenStatement] = []
        self.place = self.opening = Place.FILE
        self.saved: tuple[Place, list[object], list[object]] = (Place.FILE, [], [])
        self.clause: tuple[int, _State] | None = (
            None  # in a one-line policy: the index before its last clause, and the state there
        )
        self.failed = (Place.FILE, 0, 0)  # at the last error: the place, the index to go on at, and that of its statement

    def run(self) -> Parsed:
        while self._advance():
            try:
                tree = self.machine.feed_token(self.tokens[self.at])
            except UnexpectedToken:
                if not self._mended(self.tokens[self.at]):
                    break
                continue
            return Parsed(tree, self.broken, self.read, self.comments)
        return Parsed(None, self.broken)

    def prefix(self) -> Prefix:
        """Parse the text as unfinished."""
        going = self._advance()
        names = {name: word for word, name in self.keywords.items()}
        hidden = any(comment.end_pos == len(self.source.text) for comment in self.comments) or self._in_string()
        if not going or (self.broken and self.failed[1] == len(self.tokens) - 1):
            place, _, begin = self.failed
            return Prefix(place, frozenset(), names, tuple(map(str, self.tokens[begin:-1])), True, hidden)
        accepts = self.machine.accepts()  # type: ignore[no-untyped-call]
        statement = tuple(map(str, self.tokens[self.statement : -1]))
        return Prefix(self.place, frozenset(accepts), names, statement, False, hidden)

    def _in_string(self) -> bool:
        """Return whether the text ends in an unclosed string."""
        return any(self.source.text[stray] in "\"'" and "\n" not in self.source.text[stray:] for stray in self.strays)

    def _advance(self) -> bool:
        """Feed all tokens; return False if the file is unreadable."""
        while self.tokens[self.at].type != "$END":
            self._mark()
            token = self._typed(self.tokens[self.at])
            if self._strayed(token):
                if not self._mended(token):
                    return False
                continue
            before = self._state() if self.place is Place.HEADER else None
            try:
                self.machine.feed_token(token)
            except UnexpectedToken:
                if not self._mended(token):
                    return False
                continue
            self.read.append(token)
            if before is not None and (token.type == "WITH" or (token.type == "COMMA" and "KEEP" in self._allowed())):
                self.clause = (self.at, self._state() if token.type == "WITH" else before)
            self._enter(token)
            self.at += 1
        self._mark()
        return True

    def _strayed(self, token: Token) -> bool:
        """Return whether a stray before a token makes its statement meaningless."""
        end = self.tokens[self.at - 1].end_pos or 0 if self.at else 0
        return self.at > self.statement and any(end <= stray < (token.start_pos or 0) for stray in self.spoiling)

    def _mended(self, token: Token) -> bool:
        """Report an unexpected token and go on after its statement; return False if that is impossible."""
        self.errors += 1
        self._report(token)
        place, begin = self.saved[0], self.statement
        goes_on = self.errors <= MAX_ERRORS and self._recover()
        self.failed = (place, self.at, begin)
        return goes_on

    def _enter(self, token: Token) -> None:
        """Track the parser's place."""
        if token.type in _OPENS:
            self.place, self.opening, self.clause = Place.HEADER, _OPENS[token.type], None
        elif token.type == "LBRACE":
            self.place = self.opening
        elif token.type == "RBRACE":
            self.place = _AROUND[self.place]

    def _allowed(self) -> Mapping[str, object]:
        """Return the table's actions in the present state."""
        return self.states[self.machine.parser_state.position]

    def _typed(self, token: Token) -> Token:
        keyword = self.keywords.get(token) if token.type == "NAME" else None
        if keyword is None or keyword not in self._allowed():
            return token
        return Token(keyword, str(token), start_pos=token.start_pos, end_pos=token.end_pos)

    def _mark(self) -> None:
        """Save the state where a statement or an item of the file can begin, to return to after an error."""
        if self.place is Place.HEADER and self.clause is not None and "POLICY" in self.machine.accepts():  # type: ignore[no-untyped-call]
            self.place, self.clause = Place.FILE, None  # `A = B with ...` without braces ends with its line
        if self.place is not Place.HEADER and _BEGINS[self.place] <= self._allowed().keys():
            self.saved = (self.place, *self._state())
            self.statement = self.at

    def _state(self) -> _State:
        state = self.machine.parser_state
        return list(state.state_stack), list(state.value_stack)

    def _go_back(self, to: _State) -> None:
        state = self.machine.parser_state
        state.state_stack, state.value_stack = list(to[0]), list(to[1])

    def _report(self, token: Token) -> None:
        begin = self.tokens[self.statement - 1].end_pos or 0 if self.statement else 0
        if any(begin <= stray <= (token.end_pos or 0) for stray in self.strays):
            return
        state = self.machine.parser_state
        choices: set[str] = set(self._allowed())
        if len(state.state_stack) < 2_000:
            choices = self.machine.accepts()  # type: ignore[no-untyped-call]
        clause = None
        if self.place is Place.HEADER and self.clause is not None:
            clause = (self.clause[0] + 1, self._end_of_clause(self.clause[0], self.at))
        words = {name: word for word, name in self.keywords.items()}
        stuck = Stuck(self.source, self.tokens, self.statement, self.at, token, frozenset(choices), words, clause)
        code, span, message, help, labels = explain(stuck)
        self.sink.report(code, span, message, help, labels)

    def _recover(self) -> bool:
        """Return to the beginning of the broken statement and skip to the next; return False if that is impossible."""
        if self.place is Place.HEADER and self.clause is not None:
            return self._recover_clause(*self.clause)
        self.place = self.saved[0]
        self._go_back(self.saved[1:])
        inside = self.place is not Place.FILE
        begin, stuck = self.statement, self.at
        self.at = self._skip(begin, stuck, inside)
        if inside:
            self._forget(begin, max(stuck, self.at))
            ends = self.tokens[self.at].type == "$END" or self.tokens[self.at] in _ITEMS
            return not ends or self._close()
        self.broken.append(BrokenStatement(self.source.span(0, 0), frozenset({ANYTHING})))
        return self.at > begin or self.tokens[self.at].type == "$END"

    def _recover_clause(self, begin: int, before: _State) -> bool:
        """Skip a broken clause of `A = B with ...`, after a `,` or `with`; without any clause it becomes `A = B with {}`."""
        self._go_back(before)
        self.at = self._end_of_clause(begin, self.at)
        self.spoiling = [stray for stray in self.spoiling if stray >= (self.tokens[self.at].start_pos or 0)]
        self._forget(begin + 1, self.at, starts=begin)
        if self.tokens[begin].type == "COMMA":
            return True
        if self.tokens[self.at].type == "COMMA":
            self.at += 1
            return True
        end = self.tokens[begin].end_pos
        for kind, brace in (("LBRACE", "{"), ("RBRACE", "}")):
            self.machine.feed_token(Token(kind, brace, start_pos=end, end_pos=end))
        return True

    def _end_of_clause(self, begin: int, stuck: int) -> int:
        """Return the index of the first comma outside parentheses, or end of the line, from `stuck` on."""
        depth = 0
        for index in range(begin + 1, len(self.tokens)):
            kind = self.tokens[index].type
            depth += (kind == "LPAR") - (kind == "RPAR")
            if index >= stuck and (kind in ("_SEP", "$END") or (kind == "COMMA" and depth <= 0)):
                return index
        return len(self.tokens) - 1

    def _close(self) -> bool:
        """Close the open policy or test so that the file goes on; return False if it cannot end here, like an empty prompt."""
        end = self.tokens[self.at - 1].end_pos or 0 if self.at else 0
        try:
            while self.place is not Place.FILE:
                self.machine.feed_token(Token("RBRACE", "}", start_pos=end, end_pos=end))
                self.place = _AROUND[self.place]
            self.machine.feed_token(Token("_SEP", "\n", start_pos=end, end_pos=end))
        except UnexpectedToken:
            return False
        return True

    def _skip(self, begin: int, stuck: int, inside: bool) -> int:
        """Return the index after a broken statement: a separator, the `}` around it, or another policy or test."""
        depth = 0
        headless = self.tokens[begin] in _ITEMS and not any(token.type == "LBRACE" for token in self.tokens[begin:stuck])
        for index in range(begin, len(self.tokens)):
            token = self.tokens[index]
            starts_line = index > 0 and self.tokens[index - 1].type == "_SEP"
            if token.type == "$END" or (token in _ITEMS and starts_line and index >= stuck):
                return index
            if token.type == "LBRACE":
                depth += 1
            elif token.type == "RBRACE":
                if inside and depth == 0 and index >= stuck:
                    return index
                depth = max(0, depth - 1)
            elif token.type == "_SEP" and depth == 0 and index >= stuck and index > begin and not self._goes_on(index):
                if headless and self.tokens[index - 1].type != "RBRACE":
                    continue
                return index
        return len(self.tokens) - 1

    def _goes_on(self, index: int) -> bool:
        """Return whether the broken statement continues after a line end: an operator before it and no statement after it."""
        after = self.tokens[index + 1]
        begins = after.type == "NAME" and after not in self.keywords
        return ends_in_operator(self.tokens[index - 1]) and (begins or after.type in ("NUMBER", "LPAR"))

    def _forget(self, begin: int, end: int, starts: int | None = None) -> None:
        words = [str(token) for token in self.tokens[begin:end] if token.type == "NAME"][:3]
        words = words[1:] if words[:1] == ["override"] else words
        defines = {words[0] if words and words[0] in self.keywords else A_STATEMENT}
        if words[:1] in (["param"], ["let"], ["tensor"], ["given"]) or (words and words[0] in DEFINERS):
            defines = set(words[1:2])
        elif words and words[0] not in self.keywords and self.tokens[begin + 1] == "=":
            defines = set(words[:1])
        stop = min(end, len(self.tokens) - 1)
        span = span_of(self.source, self.tokens[begin if starts is None else starts]).to(
            span_of(self.source, self.tokens[stop])
        )
        self.broken.append(BrokenStatement(span, frozenset(defines)))
