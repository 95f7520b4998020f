"""What the grammar accepts at a place in unfinished text, read from the parser's tables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvdsl.source import SourceFile
from kvdsl.syntax.parser import Place, read_prefix

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Ahead:
    """What can stand at a place.

    Attributes:
        place: the file, a header before `{`, a policy, a test or a prompt.
        words: the keywords; none if the statement has an earlier error.
        statement: the tokens of the unfinished statement before the place.
        word: the beginning of a word right before the place; it is ignored.
        expression: whether an expression can begin.
        name: whether a name can stand here.
        string: whether a string can stand here.
    """

    place: Place
    words: frozenset[str]
    statement: tuple[str, ...]
    word: str
    expression: bool
    name: bool
    string: bool


def ahead(source: SourceFile, offset: int) -> Ahead | None:
    """Return what can stand at an offset; None inside a comment or string."""
    text = source.text[:offset]
    found = _WORD.search(text)
    word = "" if found is None else found[0]
    prefix = read_prefix(SourceFile(source.name, text[: len(text) - len(word)], source.path))
    if prefix.hidden:
        return None
    place, statement = prefix.place, prefix.statement
    if "with" in statement[4:5] and "=" in statement[2:3]:
        place, statement = Place.POLICY, _last_clause(statement[5:])
    return Ahead(
        place=place,
        words=frozenset(prefix.keywords[name] for name in prefix.accepts if name in prefix.keywords),
        statement=statement,
        word=word,
        expression=prefix.stuck or prefix.accepts >= {"NAME", "NUMBER", "LPAR", "MINUS"},
        name="NAME" in prefix.accepts,
        string="STRING" in prefix.accepts,
    )


def _last_clause(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens after the last comma outside parentheses."""
    depth, begin = 0, 0
    for index, token in enumerate(tokens):
        depth += (token in "([") - (token in ")]")
        begin = index + 1 if token == "," and not depth else begin
    return tokens[begin:]
