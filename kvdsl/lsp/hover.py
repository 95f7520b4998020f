"""Explain the text at a place: a keyword, a name with its value, or an expression with its axes and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lsprotocol import types as lsp

from kvdsl.explain.words import meaning as column_meaning
from kvdsl.ir.ops import INPUTS, NAMED_FUNCTIONS, NAMED_INPUTS, RANGES, REDUCTIONS
from kvdsl.ir.printer import print_number
from kvdsl.lsp import Document
from kvdsl.lsp.expressions import Placed, axes_in_words, expression_at, number, state, value
from kvdsl.lsp.names import Name
from kvdsl.reference import ITEMS, STATEMENTS, STEPS, form, meaning, written
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


def hover(document: Document, position: lsp.Position) -> lsp.Hover | None:
    """Return the explanation as Markdown; None if there is none."""
    offset = document.offset(position)
    token = document.token_at(offset)
    if token is None:
        return None
    name = document.names.at(offset)
    parts = list(_name(document, name) if name is not None else _word(document, str(token), token.start_pos or 0))
    placed = expression_at(document, offset)
    if placed is not None and not isinstance(placed.node, syn.Constant):
        parts += _expression(document, placed)
    if not parts:
        return None
    place = document.positions.range(token.start_pos or 0, token.end_pos or 0)
    return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, "\n\n".join(parts)), place)


# -- words -------------------------------------------------------------------------------------------------------------


def _word(document: Document, word: str, offset: int) -> Iterator[str]:
    """Explain a keyword by its statement."""
    if word in _SINGLE:
        yield _SINGLE[word]
        return
    if f"over {word}" in RANGES.values():
        takers = ", ".join(f"`{name}`" for name, row in REDUCTIONS.items() if word in row.over)
        yield f"`over {word}`: the range of a reduction; with {takers}"
        return
    found = statement_at(document, offset)
    if found is not None:
        rule, doc = found
        yield f"```kv\n{form(rule)}\n```"
        yield doc


_SINGLE = {
    "over": "`over`: the range of a reduction: " + ", ".join(f"`{text}`" for text in RANGES.values()),
    "and": "`and`: both conditions hold",
    "or": "`or`: at least one of the conditions holds",
    "not": "`not`: the condition does not hold",
    "override": "`override`: changes a statement of the extended policy",
    "extends": "`extends`: inherits the statements of another policy, which must be imported",
    "with": "`with`: statements that replace those of the policy before it, which must be imported",
    "nan": "`nan`: not a number",
    "inf": "`inf`: larger than every number",
    "rest": "`rest`: for every other token of the row",
    "nothing": "`nothing`: no position",
}
"""Words that belong to several statements."""


# -- names -------------------------------------------------------------------------------------------------------------


def _name(document: Document, name: Name) -> Iterator[str]:
    if name.statement is not None:
        span = name.statement.span
        yield f"```kv\n{span.quoted(200)}\n```"
        if name.kind in _DEFINED:
            yield from _DEFINED[name.kind](document, name.statement)
        if name.kind in ("tensor", "let", "function") and span.file is not document.source:
            yield f"defined in `{span.file.name}`"
    elif name.kind in ("input", "built-in"):
        yield from _built_in(name.text)
    elif name.kind == "policy":
        yield from _policy(document, name)
    elif name.kind == "argument":
        yield f"`{name.text}`: an argument of the function"


def _param(document: Document, param: syn.Param) -> Iterator[str]:
    known = None if document.facts is None else document.facts.values.get(param.name.text)
    if known is not None and not isinstance(param.value, syn.Constant):
        yield f"default {print_number(known)}"
    if param.name.text == "budget":
        yield "a whole number of tokens, or a ratio of the prompt: `0.25` is a quarter of it"


def _tensor(_: Document, tensor: syn.Tensor) -> Iterator[str]:
    yield "this layer's and KV head's numbers" + (
        ", one for each dim of a key" if any(a.text == "dims" for a in tensor.axes) else ""
    )


def _given(_: Document, given: syn.Given) -> Iterator[str]:
    if given.source is None:
        yield "one number per slot and KV head, which the caller passes with the token"
    else:
        yield "whether a token lies in this span of the text, which the caller marks"


_DEFINED: Mapping[str, Callable[[Document, Any], Iterator[str]]] = {"param": _param, "tensor": _tensor, "given": _given}
"""The text after a name's definition, by its kind."""


def _built_in(name: str) -> Iterator[str]:
    doc = meaning(name)
    if doc is None:
        return
    if name in NAMED_INPUTS and name not in NAMED_FUNCTIONS:
        yield f"`{name}` · {axes_in_words(INPUTS[name].axes)}"
        yield doc
        return
    yield f"```kv\n{written(name)}\n```"
    ranges = REDUCTIONS[name].over if name in REDUCTIONS else ()
    yield doc + (f"; ranges {', '.join(RANGES[one] for one in ranges)}" if ranges else "")


def _policy(document: Document, name: Name) -> Iterator[str]:
    if document.module is None:
        return
    found = next((policy for policy, _ in document.module.policies() if policy.name.span == name.target), None)
    if found is not None:
        yield f"```kv\n{found.heading}\n```"
        if found.doc is not None:
            yield "\n".join(line.strip() for line in found.doc.text.strip().splitlines())
    if document.facts is not None and name.defines:
        facts = document.facts
        yield f"{facts.bytes_per_token} bytes a token and KV head at head size {facts.head_dim} in {facts.dtype}"


# -- expressions -------------------------------------------------------------------------------------------------------


def _expression(document: Document, placed: Placed) -> Iterator[str]:
    found = value(document, placed)
    if found is None:
        return
    text = axes_in_words(found.axes) + (", a condition" if found.condition else "")
    known = number(document, found) if not isinstance(placed.node, syn.Name) else None
    if known is not None:
        text = print_number(known)
    yield f"`{placed.node.span.quoted()}` · {text}"
    columns = state(document, found)
    for column in columns:
        size = "" if column.bytes_per_slot is None else f", {column.bytes_per_slot} bytes a slot"
        yield f"remembers `{column.name}`: {column_meaning(column)}{size}"


def statement_at(document: Document, offset: int) -> tuple[str, str] | None:
    """Return the innermost rule of the grammar at an offset, and its meaning."""
    if document.module is None:
        return None
    found = [(span, rule) for span, rule in _all(document.module.syntax) if span.start <= offset <= span.end]
    if not found:
        return None
    _, rule = min(found, key=lambda one: one[0].end - one[0].start)
    doc = STATEMENTS[rule][0] if rule in STATEMENTS else ITEMS.get(rule) or STEPS[rule]
    return rule, doc


def _all(module: syn.Module) -> Iterator[tuple[Span, str]]:
    yield from ((one.span, "edition") for one in module.editions)
    yield from ((one.span, "import") for one in module.imports)
    yield from ((one.span, "let") for one in module.lets)
    for policy in module.policies:
        yield policy.span, "with" if policy.clauses else "policy"
        for statement in policy.statements:
            yield statement.span, f"keep_{statement.scope}" if isinstance(statement, syn.Keep) else statement.keyword
    for test in module.tests:
        yield test.span, "test"
        for step in test.steps:
            yield from _steps(step)


def _steps(step: syn.Step) -> Iterator[tuple[Span, str]]:
    match step:
        case syn.Prompt(tokens=tokens):
            yield step.span, "prompt"
            for token in tokens:
                yield from _steps(token)
        case syn.Incoming(brought=brought):
            attended = any(one.kind == "attend" for one in brought)
            yield step.span, "times" if step.times > 1 else "attend" if attended else "token"
        case syn.Expect(what=what):
            yield step.span, "expect_error" if what == "error" else "expect"
        case _:
            yield step.span, type(step).__name__.lower()
