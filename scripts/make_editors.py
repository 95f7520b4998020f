#!/usr/bin/env python
"""Writes what editors know of the language's words, and the texts that their grammars are tested with: see `COMMITTED`.

The words come from the grammar and from the table of operations. The trees of tree-sitter's corpus are the compiler's own.
"""

from __future__ import annotations

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
from kvdsl.sema.statements import WORDS  # noqa: E402
from kvdsl.source import SourceFile  # noqa: E402
from kvdsl.syntax.parser import keywords, parse  # noqa: E402
from tests.syntax.test_grammar import POLICIES, SHAPES  # noqa: E402

DECLARING = ("import", "let", "override", "param", "policy", "extends", "test")
"""The keywords that name something, which editors colour unlike those of statements."""
SPELT = ("and", "not", "or")


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
["(" ")" "{{" "}}"] @punctuation.bracket
["," "/"] @punctuation.delimiter
["nan" "inf" "nothing"] @constant.builtin

(policy name: (identifier) @type)
(policy extends: (identifier) @type)
(import (identifier) @type)
(use (identifier) @type)
(param name: (identifier) @variable.parameter)
(param kind: (identifier) @type.builtin)
(set (identifier) @variable.parameter)
(let name: (identifier) @variable . "=")
(let name: (identifier) @function (names))
(parameter name: (identifier) @variable.parameter)
(argument name: (identifier) @variable.parameter)
(expect_state (identifier) @variable)

((call function: (identifier) @function.builtin) (#match? @function.builtin "^({functions})$"))
((call function: (identifier) @function) (#not-match? @function "^({functions})$"))
((name) @variable.builtin (#match? @variable.builtin "^({inputs})$"))
((name) @variable (#not-match? @variable "^({inputs})$"))

(over (identifier) @constant.builtin)
{options}
"""


def highlights() -> str:
    """The query by which editors colour tree-sitter's trees."""

    def strings(found: Iterable[str]) -> str:
        return " ".join(f'"{word}"' for word in sorted(found))

    return _HIGHLIGHTS.format(
        keywords=strings(keywords() - {*SPELT, "nan", "inf", "nothing"}),
        spelt=strings(SPELT),
        operators=strings({*OPERATORS, "=", ".."} - {*SPELT, "/"}),
        functions=_any_of(NAMED_FUNCTIONS),
        inputs=_any_of(NAMED_INPUTS),
        options="\n".join(f"({rule} (identifier) @constant.builtin)" for rule in sorted(WORDS)),
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


COMMITTED: dict[str, Callable[[], str]] = {
    "editors/tree-sitter-kv/queries/highlights.scm": highlights,
    "editors/tree-sitter-kv/test/corpus/forms.txt": lambda: corpus(_forms()),
    "editors/tree-sitter-kv/test/corpus/policies.txt": lambda: corpus(_files(tests=False)),
    "editors/tree-sitter-kv/test/corpus/tests.txt": lambda: corpus(_files(tests=True)),
}
"""Path -> what makes the text."""


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not up to date.")
def main(check: bool) -> None:
    bring_up_to_date({ROOT / name: make() for name, make in COMMITTED.items()}, check)


if __name__ == "__main__":
    main()
