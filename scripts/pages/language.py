"""The made parts of docs/language.md: tables of statements, inputs and functions, and of what went."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from kvdsl.files import read_resource
from kvdsl.ir import ops
from kvdsl.reference import STATEMENTS, first_word, form, written
from kvdsl.sema import editions
from kvdsl.syntax.nodes import WORDS
from scripts.pages.markdown import table

OPERATORS = {
    "`+` `-` `*` `/` `%` `**`": "arithmetic; `/` is real division, `**` binds to the right",
    "`<` `<=` `>` `>=` `==` `!=` `and` `or` `not`": "conditions; in arithmetic they count as 0 or 1",
}


def _statements() -> str:
    rules = [rule for rule in STATEMENTS if first_word(rule) not in editions.GONE and rule != "keep_nothing"]
    return table(("statement", "meaning", "default"), map(_statement, rules))


def _statement(rule: str) -> tuple[str, str, str]:
    meaning, default = STATEMENTS[rule]
    return f"`{form(rule)}`", meaning, f"`{WORDS[rule][0]}`" if rule in WORDS else default


def _inputs() -> str:
    """Inputs that vary over the same stand in one line."""
    rows = [row for row in ops.INPUTS.values() if row.name in ops.NAMED_INPUTS]
    lines = _together(
        (", ".join(sorted(axis.value for axis in row.axes)) or "nothing", f"`{row.name}`: {row.doc}") for row in rows
    )
    return table(("varies over", ""), ((axes, "; ".join(docs)) for axes, docs in lines))


def _reductions() -> str:
    """Reductions with the same ranges stand in one line."""
    rows = [row for row in ops.REDUCTIONS.values() if row.name not in {*editions.FUNCTIONS, *ops.PRELUDE}]
    lines = _together((_ranges(row), f"`{written(row.name)}`: {row.doc}") for row in rows)
    return table(("ranges over", ""), ((ranges, "; ".join(docs)) for ranges, docs in lines))


def _ranges(row: ops.ReductionRow) -> str:
    found = [ops.RANGES[over].removeprefix("over ") for over in row.over]
    return ", ".join(one for one in found if one not in editions.RANGES)


def _functions() -> str:
    """Functions that mean the same stand in one line."""
    docs = {**ops.FORMS, **{name: ops.FUNCTIONS[name] for name in ops.ELEMENTWISE}}
    names = [name for name in docs if name not in {*editions.FUNCTIONS, *ops.PRELUDE}]
    lines = _together((docs[name].doc, f"`{written(name, extreme=name in ops.REDUCTIONS)}`") for name in names)
    return table(("", "meaning"), [*((" ".join(texts), doc) for doc, texts in lines), *OPERATORS.items()])


def _prelude() -> str:
    lets = re.findall(r"^let .*?(?=\s*(?:#.*)?$)", read_resource("grammar", "prelude.kv"), re.MULTILINE)
    return "```kv\n" + "\n".join(lets) + "\n```\n"


def gone() -> str:
    """What edition 2 has no more, with what is written instead."""
    rows = [(f"`{word}`", instead) for word, instead in editions.GONE.items()]
    rows += [(f"`over {word}`", instead) for word, instead in editions.RANGES.items()]
    rows += [(f"`{name}(...)`", instead) for name, instead in editions.FUNCTIONS.items()]
    rows += [
        (what, instead.format(value="x", most="n", name="A", parent="B", layer="2", layers="8", after="4", chosen="2, 13"))
        for what, instead in editions.PARTS.items()
    ]
    return table(
        ("edition 1", "edition 2"), [(" ".join(words), instead) for instead, words in _together((b, a) for a, b in rows)]
    )


def _together(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """What stands behind the same key."""
    found: dict[str, list[str]] = {}
    for key, value in rows:
        found.setdefault(key, []).append(value)
    yield from found.items()


PARTS: dict[str, Callable[[], str]] = {
    "statements": _statements,
    "inputs": _inputs,
    "reductions": _reductions,
    "functions": _functions,
    "prelude": _prelude,
}
