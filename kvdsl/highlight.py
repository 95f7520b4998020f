"""A Pygments lexer, for documents and terminals. Its words and patterns are those of the grammar and of the checker."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.syntax.parser import keywords, patterns

_PATTERNS = patterns()
_NAME = _PATTERNS["NAME"]
_OPERATORS = ("POWER", "STAR", "SLASH", "PERCENT", "PLUS", "MINUS", "LE", "GE", "EQ", "NE", "LT", "GT", "RANGE", "EQUAL")
_PUNCTUATION = ("LPAR", "RPAR", "LBRACE", "RBRACE", "COMMA", "_SEP")


class KvLexer(RegexLexer):  # type: ignore[misc]
    """Highlights .kv files, and statements taken out of them."""

    name = "kvdsl"
    aliases: ClassVar[list[str]] = ["kv", "kvdsl"]
    filenames: ClassVar[list[str]] = ["*.kv"]

    tokens: ClassVar[dict[str, list[Any]]] = {
        "root": [
            (_PATTERNS["COMMENT"], Comment.Single),
            (_PATTERNS["STRING"], String.Double),
            (r"[ \t]+", Whitespace),
            (rf"(policy|extends)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Class)),
            (rf"(param)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Variable)),
            (rf"(let)([ \t]+)({_NAME})(?=\()", bygroups(Keyword.Declaration, Whitespace, Name.Function)),
            (rf"(let)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Variable)),
            (words(NAMED_FUNCTIONS, prefix=r"\b", suffix=r"(?=\()"), Name.Builtin),
            (words(NAMED_INPUTS - {"budget", "layers"}, prefix=r"\b", suffix=r"\b"), Name.Builtin.Pseudo),
            (words(keywords(), prefix=r"\b", suffix=r"\b"), Keyword),
            (_NAME, Name),
            (_PATTERNS["NUMBER"], Number),
            ("|".join(_PATTERNS[name] for name in _OPERATORS), Operator),
            ("|".join(_PATTERNS[name] for name in _PUNCTUATION), Punctuation),
        ],
    }
