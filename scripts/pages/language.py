"""docs/language.md: statements, inputs, functions, and the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvdsl.ir import ops
from kvdsl.reference import STATEMENTS, form, written
from kvdsl.resources import read_resource
from kvdsl.syntax.nodes import WORDS
from scripts.pages.markdown import MADE, note, table
from scripts.prose import wrapped

OPERATORS = {
    "`+` `-` `*` `/` `%` `**`": "arithmetic; `/` is real division, `**` binds to the right",
    "`<` `<=` `>` `>=` `==` `!=` `and` `or` `not`": "conditions; in arithmetic they count as 0 or 1",
}


def _said(part: str) -> str:
    """What is hand-written of a part of the language."""
    return note("language", f"{part}.md")


def grammar_sections() -> dict[str, str]:
    """The grammar's text by the titles of its sections."""
    _, *parts = re.split(r"^// -- (.*?) -+\n", read_resource("grammar", "kv.lark"), flags=re.MULTILINE)
    return dict(zip(parts[::2], (text.strip("\n") for text in parts[1::2]), strict=True))


def language_reference() -> str:
    """Statements, inputs, functions, the prelude, and the grammar itself."""
    parts = [
        MADE + "# The language, edition 1\n",
        "One KV head of one layer sees a matrix of queries × slots; a slot holds one cached token, and is *live* while it does. A policy "
        "*settles* when it decides which tokens leave, and frees their slots. Every expression varies over some of "
        "the axes query, slot and dim, and every statement says which it needs. `#` begins a comment; a line ends a statement, except "
        "inside parentheses, and so does `;`. Words are reserved only where the grammar has them.\n",
        "## Statements\n",
        table(("statement", "meaning", "default"), (_statement(rule) for rule in STATEMENTS)),
        "## A policy made of another\n",
        _said("with"),
        "## Inputs\n",
        table(("name", "axes", "meaning"), (_input(ops.INPUTS[name]) for name in ops.INPUTS if name in ops.NAMED_INPUTS)),
        "## Reductions\n",
        "`mean(x)` reduces over queries, `mean(x over slots)` over the slots that a query sees, or that are cached. `over page` gives "
        "every slot the value of its page, `over next page` that of the page behind it, `over sketch` reads the sketch's dims only. "
        "`over others` compares a slot with each of the others. Pages are cut by places in the text, from its beginning or (`pages 128 "
        "after 4`) from behind its first tokens on; of a page counts what is there. Behind the last one there is none: a sum over it "
        "is 0, a maximum minus infinity, a minimum infinity, and "
        "anything else NaN.\n",
        table(("", "meaning", "ranges over"), map(_reduction, ops.REDUCTIONS.values())),
        "## Functions and operators\n",
        table(("", "meaning"), _functions()),
        "## Prompts and rates\n",
        _said("prompts"),
        "## Tensors of files\n",
        _said("tensors"),
        "## Values from the caller\n",
        _said("given"),
        "## Counts that read the data\n",
        _said("counts"),
        "## Budgets that are shared, and heads that vote\n",
        _said("shared_budgets"),
        "## Query heads that select for themselves\n",
        _said("each"),
        "## Conditions and weights on what is attended to\n",
        _said("weights"),
        "## Ranks\n",
        _said("ranks"),
        "## Slots against each other\n",
        _said("others"),
        "## Folds\n",
        _said("folds"),
        "## The prompt's queries, and rotated vectors\n",
        _said("prompt_queries"),
        "## What is equal on every backend\n",
        _said("equality"),
        "## The prelude\n",
        "What every policy knows without an import; a policy may define these names anew.\n",
        f"```kv\n{read_resource('grammar', 'prelude.kv')}```\n",
        "## The grammar\n",
        "The file that the parser is made from, for [Lark](https://lark-parser.readthedocs.io).\n",
    ]
    for title, text in grammar_sections().items():
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n```text\n{text}\n```\n")
    return wrapped("\n".join(parts))


def _input(row: ops.InputRow) -> tuple[str, str, str]:
    return f"`{row.name}`", ", ".join(sorted(axis.value for axis in row.axes)) or "–", row.doc


def _reduction(row: ops.ReductionRow) -> tuple[str, str, str]:
    ranges = {"history": "last N queries", "next": "next page"}
    return f"`{written(row.name)}`", row.doc, ", ".join(ranges.get(over, over) for over in row.over)


def _functions() -> Iterator[tuple[str, str]]:
    """Functions that mean the same stand in one line."""
    lines: dict[str, list[str]] = {}
    for name in (*ops.FORMS, *ops.POOLS, *ops.ELEMENTWISE):
        doc = {**ops.FUNCTIONS, **ops.POOLS, **ops.FORMS}[name].doc
        lines.setdefault(doc, []).append(f"`{written(name, extreme=name in ops.REDUCTIONS)}`")
    yield from ((" ".join(texts), doc) for doc, texts in lines.items())
    yield from OPERATORS.items()


def _statement(rule: str) -> tuple[str, str, str]:
    meaning, default = STATEMENTS[rule]
    return f"`{form(rule)}`", meaning, f"`{WORDS[rule][0]}`" if rule in WORDS else default
