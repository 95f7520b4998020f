"""A Pygments lexer for documents and terminals, with the words and patterns of the grammar and the checker."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.syntax.parser import keywords, patterns

_PATTERNS = patterns()
_NAME = _PATTERNS["NAME"]
_BOTH = "|".join(sorted(NAMED_INPUTS & keywords()))
"""Inputs that also begin a statement: `budget budget / 2`."""
_OPERATORS = ("POWER", "STAR", "SLASH", "PERCENT", "PLUS", "MINUS", "LE", "GE", "EQ", "NE", "LT", "GT", "RANGE", "EQUAL")
_PUNCTUATION = ("LPAR", "RPAR", "LBRACE", "RBRACE", "LSQB", "RSQB", "COMMA", "DOT", "_SEP")


class KvLexer(RegexLexer):  # type: ignore[misc]
    """Highlights .kv files, and single statements."""

    name = "kvdsl"
    aliases: ClassVar[list[str]] = ["kv", "kvdsl"]
    filenames: ClassVar[list[str]] = ["*.kv"]

    tokens: ClassVar[dict[str, list[Any]]] = {
        "root": [
            (_PATTERNS["COMMENT"], Comment.Single),
            (_PATTERNS["STRING"], String.Double),
            (rf"^([ \t]*)({_BOTH})\b", bygroups(Whitespace, Keyword)),
            (rf"(override)([ \t]+)({_BOTH})\b", bygroups(Keyword, Whitespace, Keyword)),
            (r"[ \t]+", Whitespace),
            (
                rf"(policy)([ \t]+)({_NAME})([ \t]*)(=)([ \t]*)({_NAME})(?=[ \t]+with\b)",
                bygroups(Keyword.Declaration, Whitespace, Name.Class, Whitespace, Operator, Whitespace, Name.Class),
            ),
            (rf"(with)([ \t]+)({_BOTH})\b", bygroups(Keyword.Declaration, Whitespace, Keyword)),
            (rf"(policy|extends)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Class)),
            (rf"(param|tensor|given)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Variable)),
            (rf"(let)([ \t]+)({_NAME})(?=\()", bygroups(Keyword.Declaration, Whitespace, Name.Function)),
            (rf"(let)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Variable)),
            (words(NAMED_FUNCTIONS, prefix=r"\b", suffix=r"(?=\()"), Name.Builtin),
            (words(NAMED_INPUTS, prefix=r"\b", suffix=r"\b"), Name.Builtin.Pseudo),
            (words(keywords(), prefix=r"\b", suffix=r"\b"), Keyword),
            (rf"{_NAME}(?=\()", Name.Function),
            (_NAME, Name),
            (_PATTERNS["NUMBER"], Number),
            ("|".join(_PATTERNS[name] for name in _OPERATORS), Operator),
            ("|".join(_PATTERNS[name] for name in _PUNCTUATION), Punctuation),
        ],
    }
