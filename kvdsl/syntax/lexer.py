"""Split text into tokens. The terminals are the grammar's; this adds what Lark's lexer cannot express:

- a line end counts only outside closed parentheses,
- brackets belong to `input` and `tensor` lines and are strays elsewhere,
- text that matches no terminal is reported and skipped.

A word is a NAME here; the parser makes it a keyword where one can stand (`kvdsl.syntax.parser`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from lark import Token
from lark.lexer import TerminalDef

from kvdsl import codes
from kvdsl.diagnostics import Sink, printable
from kvdsl.helps import both, leave_out, offer
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import forms, habits

_LOOKALIKES = {
    "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "≠": "!=", "“": '"', "”": '"',
    "„": '"', "‘": "'", "’": "'", "…": "..", "^": "**", "&": "and", "|": "or", "!": "not", "[": "(", "]": ")", "²": "** 2",
}  # fmt: skip


@dataclass
class Lexed:
    """The tokens of a text.

    Attributes:
        tokens: without comments, spaces, and line ends inside parentheses.
        comments: in order, each up to the end of its line.
        strays: offsets of text that is no token, which has been reported.
        spoiling: the strays that make the rest of their statement meaningless.
    """

    tokens: list[Token]
    comments: list[Token] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    spoiling: list[int] = field(default_factory=list)


class Lexer:
    """Splits texts into tokens of a grammar's terminals."""

    def __init__(self, terminals: list[TerminalDef], ignored: list[str]) -> None:
        self.keywords = {str(t.pattern.value): t.name for t in terminals if str(t.pattern.value).isidentifier()}
        symbols = [t for t in terminals if t.pattern.value not in self.keywords]
        symbols.sort(key=lambda t: (t.pattern.type == "str", -len(t.pattern.value)))
        self._pattern = re.compile("|".join(f"(?P<{t.name}>{t.pattern.to_regexp()})" for t in symbols))
        self._ignored = frozenset(ignored)

    def lex(self, source: SourceFile, sink: Sink, goes_on: frozenset[str] | None = None, begin: int = 0) -> Lexed:
        """Return the tokens of a text from `begin` on, and its comments and strays.

        Args:
            goes_on: for unfinished text, the words that begin statements. An unclosed parenthesis stays open up to the next of these
                at the beginning of a line.
        """
        found = Lexed([])
        for token in self._raw(source, sink, found, begin):
            if token.type not in self._ignored:
                found.tokens.append(token)
            elif token.type == "COMMENT":
                found.comments.append(token)
        if goes_on is not None:
            found.tokens = list(_without_line_ends_in_open_parentheses(found.tokens, goes_on))
        found.tokens = list(_without_line_ends_in_parentheses(found.tokens))
        return found

    def _raw(self, source: SourceFile, sink: Sink, lexed: Lexed, at: int) -> Iterator[Token]:
        text, match = source.text, self._pattern.match
        while at < len(text):
            found = match(text, at)
            if found is None or (found.lastgroup in _BRACKETS and not _in_tensor(text, at)):
                lexed.strays.append(at)
                explained = _explained(source, at, sink)
                if explained or text[at] != ":":
                    lexed.spoiling.append(at)
                at = _stray_end(text, at) if explained else _report_stray(source, at, sink)
                continue
            yield Token(str(found.lastgroup), found.group(), start_pos=at, end_pos=found.end())
            at = found.end()


def _without_line_ends_in_parentheses(tokens: list[Token]) -> Iterator[Token]:
    closed = _closed_parentheses(tokens)
    depth = 0
    for index, token in enumerate(tokens):
        if index in closed:
            depth += 1 if token.type == "LPAR" else -1
        if token.type == "_SEP" and token == "\n" and depth:
            continue
        yield token


def _without_line_ends_in_open_parentheses(tokens: list[Token], begins: frozenset[str]) -> Iterator[Token]:
    depth = 0
    for index, token in enumerate(tokens):
        after = tokens[index + 1] if index + 1 < len(tokens) else None
        if token.type in ("LBRACE", "RBRACE") or (token == "\n" and after in begins):
            depth = 0
        elif token.type in ("LPAR", "RPAR"):
            depth = max(0, depth + (1 if token.type == "LPAR" else -1))
        if token != "\n" or not depth:
            yield token


def _closed_parentheses(tokens: list[Token]) -> set[int]:
    """Return the indices of parentheses that have a partner within the same braces."""
    closed: set[int] = set()
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.type in ("LBRACE", "RBRACE"):
            opened.clear()
        elif token.type == "LPAR":
            opened.append(index)
        elif token.type == "RPAR" and opened:
            closed |= {opened.pop(), index}
    return closed


_BRACKETS = ("LSQB", "RSQB")
_TENSOR = re.compile(
    r'(?:^|[;{,"\']|\bwith\b)[ \t]*(?:override[ \t]+)?(?:tensor|input)\b[^;{}\n]*\Z', re.MULTILINE
)  # a docstring or a clause may precede it


def _in_tensor(text: str, at: int) -> bool:
    """Return whether a `tensor` or `input` statement begins before an offset on its line."""
    return _TENSOR.search(text, text.rfind("\n", 0, at) + 1, at) is not None


_QUOTED = re.compile(r"[“”„«]([^“”„«»\n]*)[“”»]")
_STRAY = re.compile(r"[^\W\d]\w*|\s+|(.)\1*", re.DOTALL)


def _explained(source: SourceFile, at: int, sink: Sink) -> bool:
    """Report a stray that a known form explains; return whether one does."""
    explained = None if source.text[at] in "\"'" else forms.explain(source.span(*_around(source.text, at)), at)
    if explained is not None:
        sink.report(codes.SYNTAX, *explained)
    return explained is not None


_LONGEST = 64
"""The most letters before a stray one to include in the word."""


def _stray_end(text: str, at: int) -> int:
    stray = _STRAY.match(text, at)
    return at + 1 if stray is None else stray.end()


def _report_stray(source: SourceFile, at: int, sink: Sink) -> int:
    """Report the stray at an offset; return where to go on."""
    text = source.text
    if text[at] in "\"'":
        return _report_open_string(source, at, sink)
    end = _stray_end(text, at)
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        straight = offer(f'write `"{quoted[1]}"`') if not set(quoted[1]) & set('"`') else None
        sink.report(codes.CHARACTER, source.span(at, quoted.end()), "strings need straight quotes", straight)
        return quoted.end()
    char = text[at]
    begins = re.search(r"\w*\Z", text[max(0, at - _LONGEST) : at]) if char.isalpha() else None
    span = source.span(at - (len(begins[0]) if begins else 0), end)
    if char.isalpha():
        rule = "names consist of the ASCII letters, digits and `_`"
        ascii = _ascii(span.text)
        help = rule if ascii is None else both(f"{rule}: ", offer(f"write `{ascii}`", ", say"))
        sink.report(codes.CHARACTER, span, f"`{printable(span.text[:64])}` is not a name", help)
    else:
        what = f"`{printable(char)}`" + ("" if char.isascii() else f" (U+{ord(char):04X})")
        sink.report(codes.CHARACTER, span, f"unexpected character {what}", _stray_help(source, at))
    return end


def _ascii(name: str) -> str | None:
    """Return a name in ASCII: letters without diacritics, and Greek ones spelled out; None if there is none."""
    parts = []
    for char in name:
        plain = unicodedata.normalize("NFKD", char)[0]
        words = unicodedata.name(char, "").split()
        parts.append(plain if plain.isascii() else words[-1].lower() if words[:1] == ["GREEK"] else char)
    made = "".join(parts)
    return made if made.isascii() and made.isidentifier() and made not in ("and", "or", "not") else None


def _around(text: str, at: int) -> tuple[int, int]:
    """Return the ends of the statement around an offset; a statement of several lines counts line by line."""
    begin = max(text.rfind(mark, 0, at) for mark in "\n;{") + 1
    end = text.find("\n", at)
    return begin + len(text[begin:at]) - len(text[begin:at].lstrip()), len(text) if end < 0 else end


def _stray_help(source: SourceFile, at: int) -> str | None:
    """Return a help for a character that the language does not have."""
    char, before = source.text[at], source.text[:at].rpartition("\n")[2]
    if char == "?" or (char == ":" and "?" in before):
        return habits.CHOICE
    if char == ":":
        return leave_out("leave out the `:`", source.span(at, at + 1))
    if char in "[]":
        return f"parentheses are round: write `{_LOOKALIKES[char]}`"
    if char == ".":
        return "names have no `.` in them, and a path stands in quotes"
    return offer(f"write `{_LOOKALIKES[char]}`") if char in _LOOKALIKES else None


def _report_open_string(source: SourceFile, at: int, sink: Sink) -> int:
    quote = source.text[at]
    if source.text.startswith(quote * 3, at):
        end, missing = len(source.text), quote * 3
    else:
        line_end = source.text.find("\n", at)
        end, missing = (len(source.text) if line_end < 0 else line_end), quote
    message = f"the string that starts here has no closing `{missing}`"
    sink.report(codes.STRING_END, source.span(at, min(end, at + 40)), message)
    return end


def span_of(source: SourceFile, token: Token) -> Span:
    """Return a token's span."""
    return source.span(token.start_pos or 0, token.end_pos or 0)
