#!/usr/bin/env python
"""Writes what editors know of the language's words, and the texts that their grammars are tested with: see `COMMITTED`.

The words come from the grammar and from the table of operations. The trees of tree-sitter's corpus are the compiler's own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from lark import Token, Tree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab"), str(ROOT / "scripts")]

from make_docs import bring_up_to_date  # noqa: E402

from kvdsl.diagnostics import Sink  # noqa: E402
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS, OPERATORS  # noqa: E402
from kvdsl.source import SourceFile  # noqa: E402
from kvdsl.syntax.nodes import AXES, WORDS  # noqa: E402
from kvdsl.syntax.parser import keywords, parse  # noqa: E402
from tests.syntax.test_grammar import POLICIES, SHAPES  # noqa: E402

DECLARING = ("import", "let", "override", "param", "policy", "extends", "with", "input", "tensor", "given", "test")
"""The keywords that name something, which editors colour unlike those of statements."""
SPELT = ("and", "not", "or")
CONSTANTS = ("nan", "inf", "nothing")


def _any_of(found: Iterable[str]) -> str:
    return "|".join(sorted(found))


# -- tree-sitter -------------------------------------------------------------------------------------------------------

_HIGHLIGHTS = """\
; Made by scripts/make_editors.py; do not edit.

(comment) @comment
(string) @string
(number) @number

[{keywords}] @keyword
[{spelt}] @keyword.operator
[{operators}] @operator
["(" ")" "[" "]" "{{" "}}"] @punctuation.bracket
["," "/"] @punctuation.delimiter
(signed (identifier) @constant.builtin)
(vector . (identifier) @keyword)
(expect . (identifier) @keyword)
(expect_error . (identifier) @keyword)

(policy name: (identifier) @type)
(extended name: (identifier) @type)
(extended extends: (identifier) @type)
(with name: (identifier) @type)
(with with: (identifier) @type)
(import (identifier) @type)
(use (identifier) @type)
(use_at (identifier) @type)
(param name: (identifier) @variable.parameter)
(tensor name: (identifier) @variable.parameter)
(input name: (identifier) @variable.parameter)
(input_file name: (identifier) @variable.parameter)
(input_span name: (identifier) @variable.parameter)
(given name: (identifier) @variable.parameter)
(supplied (identifier) @variable.parameter)
(tensor axis: (identifier) @constant.builtin)
(input_file axis: (identifier) @constant.builtin)
(member slot: (identifier) @variable)
(member value: (identifier) @variable)
(param kind: (identifier) @type.builtin)
(set (identifier) @variable.parameter)
(let name: (identifier) @variable . "=")
(let name: (identifier) @function (names))
(parameter name: (identifier) @variable.parameter)
(argument name: (identifier) @variable.parameter)
(expect_state (identifier) @variable)
(turn (identifier) @keyword)

((call function: (identifier) @function.builtin) (#match? @function.builtin "^({functions})$"))
((call function: (identifier) @function) (#not-match? @function "^({functions})$"))
((name) @variable.builtin (#match? @variable.builtin "^({inputs})$"))
((name) @variable (#not-match? @variable "^({inputs})$"))

(over (identifier) @constant.builtin)
{options}
"""


_NAMED = {"input_span": "name: (identifier) "}
"""What stands before the word of a rule that has a name as well."""


def highlights() -> str:
    """The query by which editors colour tree-sitter's trees."""

    def strings(found: Iterable[str]) -> str:
        return " ".join(f'"{word}"' for word in sorted(found))

    return _HIGHLIGHTS.format(
        keywords=strings(keywords() - {*SPELT}),
        spelt=strings(SPELT),
        operators=strings({*OPERATORS, "=", ".."} - {*SPELT, "/"}),
        functions=_any_of(NAMED_FUNCTIONS),
        inputs=_any_of(NAMED_INPUTS),
        options="\n".join(
            f"({rule} {_NAMED.get(rule, '')}(identifier) @constant.builtin)" for rule in sorted({*WORDS, *AXES})
        ),
    )


_LEAVES = {"NAME": "identifier", "NUMBER": "number", "STRING": "string"}


def tree(text: str) -> str:
    """The compiler's tree of a text without errors, as tree-sitter writes trees: without keywords, operators and what is empty."""
    sink = Sink()
    parsed = parse(SourceFile("text.kv", text), sink).tree
    assert parsed is not None and not sink.failed(), [found.message for found in sink]
    return "\n".join(_nodes(parsed, 0))


def _nodes(node: Tree[Token] | Token | None, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Tree) and node.data not in ("number", "name"):
        inner = [line for child in node.children for line in _nodes(child, depth + 1)]
        if inner or node.data != "body":
            yield f"{indent}({node.data}" + "".join("\n" + line for line in inner) + ")"
    elif isinstance(node, Tree):
        yield f"{indent}({node.data})"
    elif node is not None and node.type in _LEAVES:
        yield f"{indent}({_LEAVES[node.type]})"


def _without_comments(text: str) -> str:
    comments = parse(SourceFile("text.kv", text), Sink()).comments
    for comment in reversed(comments):
        text = text[: comment.start_pos] + text[comment.end_pos :]
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def corpus(texts: dict[str, str]) -> str:
    """A file of tree-sitter's tests: texts, which lose their comments, with their trees."""
    bar = "=" * 20
    return "\n".join(
        f"{bar}\n{name}\n{bar}\n\n{text.strip()}\n\n---\n\n{tree(text)}\n"
        for name, text in ((name, _without_comments(text)) for name, text in texts.items())
    )


def _files(*, tests: bool) -> dict[str, str]:
    found = sorted(path for path in (ROOT / "policies").glob("*.kv") if path.stem.endswith("_test") is tests)
    return {path.name: path.read_text(encoding="utf-8") for path in found}


def _forms() -> dict[str, str]:
    return {"every form of a policy": "kv 1\n" + POLICIES} | {
        statement: f"kv 1\npolicy P {{ override {statement} }}" for statement, _ in SHAPES
    }


# -- TextMate ----------------------------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_]\w*"


def textmate() -> str:
    """The grammar by which VS Code colours before the language server has answered; the first pattern that fits wins."""
    both = _any_of(NAMED_INPUTS & keywords())
    strings = [_string(quote) for quote in ('"""', "'''", '"', "'")]
    patterns = [
        _match(r"#.*$", "comment.line.number-sign"),
        *strings,
        _match(
            rf"\b(policy)\s+({_NAME})\s*=\s*({_NAME})(?=\s+with\b)",
            "",
            "storage.type",
            "entity.name.type",
            "entity.other.inherited-class",
        ),
        _match(rf"\b(policy)\s+({_NAME})", "", "storage.type", "entity.name.type"),
        _match(rf"\b(extends)\s+({_NAME})", "", "storage.type", "entity.other.inherited-class"),
        _match(rf"\b(param)\s+({_NAME})", "", "storage.type", "variable.parameter"),
        _match(rf"\b(let)\s+({_NAME})(?=\()", "", "storage.type", "entity.name.function"),
        _match(rf"\b(let)\s+({_NAME})", "", "storage.type", "variable.other"),
        # words of both kinds: `budget budget / 2`
        _match(rf"(?:^|(?<=[;{{])|(?<=\bwith))\s*(override\s+)?({both})\b", "", "storage.type", "keyword.control"),
        _match(rf"\b({_any_of(NAMED_FUNCTIONS)})(?=\()", "support.function"),
        _match(rf"\b({_any_of(NAMED_INPUTS)})\b", "variable.language"),
        _match(rf"\b({_any_of(DECLARING)})\b", "storage.type"),
        _match(rf"\b({_any_of(SPELT)})\b", "keyword.operator.logical"),
        _match(rf"\b({_any_of(CONSTANTS)})\b", "constant.language"),
        _match(rf"\b({_any_of(keywords())})\b", "keyword.control"),
        _match(rf"\b{_NAME}(?=\()", "entity.name.function"),
        _match(rf"\b{_NAME}\b", "variable.other"),
        _match(r"\d+\.\d+([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|\d+(\.(?!\.))?([eE][+-]?\d+)?", "constant.numeric"),
        _match("|".join(re.escape(sign) for sign in _signs()), "keyword.operator"),
        _match(r"[,;]", "punctuation.separator"),
        _match(r"[(){}]", "punctuation.section"),
    ]
    grammar = {
        "name": "kvdsl",
        "scopeName": "source.kv",
        "comment": "Made by scripts/make_editors.py; do not edit.",
        "patterns": patterns,
    }
    return json.dumps(grammar, indent=2) + "\n"


def _signs() -> list[str]:
    """What is written with signs, the longest first."""
    return sorted({*OPERATORS, "=", ".."} - {*SPELT}, key=lambda sign: (-len(sign), sign))


def _match(pattern: str, scope: str, *captures: str) -> dict[str, object]:
    named = {"name": f"{scope}.kv"} if scope else {}
    groups = {str(index): {"name": f"{name}.kv"} for index, name in enumerate(captures, 1)}
    return {**named, "match": pattern, **({"captures": groups} if groups else {})}


def _string(quote: str) -> dict[str, object]:
    end = quote if len(quote) == 3 else f"{quote}|(?<!\\\\)$"
    escape = {"name": "constant.character.escape.kv", "match": r"\\."}
    return {"name": "string.quoted.kv", "begin": quote, "end": end, "patterns": [escape]}


COMMITTED: dict[str, Callable[[], str]] = {
    "editors/tree-sitter-kv/queries/highlights.scm": highlights,
    "editors/tree-sitter-kv/test/corpus/forms.txt": lambda: corpus(_forms()),
    "editors/tree-sitter-kv/test/corpus/policies.txt": lambda: corpus(_files(tests=False)),
    "editors/tree-sitter-kv/test/corpus/tests.txt": lambda: corpus(_files(tests=True)),
    "editors/vscode/syntaxes/kv.tmLanguage.json": textmate,
}
"""Path -> what makes the text."""


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not up to date.")
def main(check: bool) -> None:
    bring_up_to_date({ROOT / name: make() for name, make in COMMITTED.items()}, check)


if __name__ == "__main__":
    main()
