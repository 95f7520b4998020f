"""Syntax that newer editions of the language removed, and its replacements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.helps import instead, leave_out
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

GONE = {
    "tensor": "write `input` for `tensor`",
    "given": "write `input` for `given`",
    "pages": "leave it out, and give the page length where pages are read: `mean(k over slots by page(16))`",
    "victims": "leave it out, and reduce the score: `score mean(... over heads)`",
    "layers": "leave it out, and write it in the budget: `budget where(layer >= 2, budget, everything)`",
    "storage": 'leave it out, and pass `storage="blocks:16"` to the cache or to `kvdsl.load`, or `--storage blocks:16` to a command',
    "rope": 'leave it out, and pass `rope="cached"` to the cache or to `kvdsl.load`, or `--rope cached` to a command',
    "cap": "leave it out, and write `budget budget - 1`: then the cache holds at most `budget` tokens even while a query attends",
    "prefill": "leave it out, and write it after `when`: `when prefill every 512`, or `when both every 512`",
}
"""Statements that edition 2 removed, by their first word, and their replacements."""

RANGES = {
    "page": "write `over slots by page(16)`, with the page's length",
    "next page": "compare pages: with `let part = page(16)`, `over slots as j where j.part == part + 1`",
    "others": "write `over slots as j where j.position != position`, and `j.x` for `other(x)`",
}
"""Ranges that edition 2 removed, and their replacements."""

FUNCTIONS = {
    "other": "name the other slot: `over slots as j`, and `j.x`",
    "count": "write `age + 1`, the number of queries that could see a slot, including its own token's",
    "median": "rank the values: `rank(x) == floor(live / 2)` holds for the middle one",
}
"""Functions that edition 2 removed, and their replacements."""

PARTS = {
    "`extends`": "write `policy {name} = {parent} with`: each line replaces what it names, and a `keep` replaces those of its kind",
    "`override`": "leave it out, and write `policy A = B with`, where a line replaces what it names",
    "bare `keep`": "write what the policy keeps; `keep first 0` replaces an inherited `keep first`",
    "`reused above`": "write `from layers ({chosen})`",
    "`after`": "write `where query_position >= {after}`",
    "`at layer`": "write `set layer = {layer}` and `set layers = {layers}`",
    "`given` in tests": "leave it out: the name is enough",
    "`expect state`": "leave `state` out: the column's name is enough",
    "units": "leave it out; write the unit in the docstring or a comment",
    "`at most`": "write `budget min({value}, {most})`",
}
"""Other removed syntax; `{value}` and the like stand for the user's text."""


def check_edition(module: syn.Module, edition: int, sink: Sink) -> None:
    """Report syntax that the file's edition no longer has."""
    if edition == 1:
        return
    for span, what, help in _gone(module):
        sink.report(codes.GONE, span, f"edition {edition} has no {what}", help)


def _gone(module: syn.Module) -> Iterator[tuple[Span, str, str]]:
    for policy in module.policies:
        if policy.parent is not None and not policy.clauses:
            what, help = _part("`extends`", name=policy.name.text, parent=policy.parent.text)
            yield extends_of(policy), what, instead(help, f"= {policy.parent.text} with")
        for statement in policy.statements:
            if statement.override:
                what, help = _part("`override`")
                yield override_of(statement), what, leave_out(help, override_of(statement))
            yield from _of_statement(statement)
    for item in (*module.policies, *module.lets):
        yield from _of_expressions(item)
    for test in module.tests:
        for step in test.steps:
            yield from _of_step(step)


def _of_statement(statement: syn.Statement) -> Iterator[tuple[Span, str, str]]:
    word = statement.span.text.split()[0]
    if word in GONE:
        yield statement.span, f"`{word}`", _without(statement.span, word)
        return
    match statement:
        case syn.Keep(scope="nothing"):
            yield statement.span, *_part("bare `keep`")
        case syn.Select() if (place := reused_of(statement)) is not None:
            layers = ", ".join(layer.span.quoted() for layer in statement.choosing)
            what, help = _part("`reused above`", chosen=layers)
            yield place, what, instead(help, from_layers(statement))
        case syn.Param(unit=syn.Word(span=unit)):
            what, help = _part("units")
            yield unit, what, leave_out(help, unit)
        case syn.Budget(value=value, most=most) if most is not None:
            yield most.span, *_part("`at most`", value=value.span.quoted(), most=most.span.quoted())


def _of_step(step: syn.Step) -> Iterator[tuple[Span, str, str]]:
    match step:
        case syn.Use(layer=syn.Constant(span=layer), layers=syn.Constant(span=layers)):
            what, help = _part("`at layer`", layer=layer.text, layers=layers.text)
            yield step.span, what, instead(help, by_set(step))
        case syn.Expect(word=syn.Word()) if re.match(r"expect\s+state\s+\w+\s+[^,/]", step.span.text):
            what, help = _part("`expect state`")
            yield step.span, what, instead(help, re.sub(r"state\s+", "", step.span.text, count=1))
    for token in step.tokens:
        for one in token.brought:
            if one.name is not None and one.span.start < one.name.span.start:
                what, help = _part("`given` in tests")
                yield one.span, what, instead(help, without_first_word(one.span))


def reused_of(select: syn.Select) -> Span | None:
    """Return the span of `in layers A, B reused above`, or None if the statement has no such part."""
    if not select.choosing or not select.span.text.endswith("above"):
        return None
    text = select.span.file.text
    return select.span.file.span(text.rindex("in", 0, select.choosing[0].span.start - len("layers")), select.span.end)


def from_layers(select: syn.Select) -> str:
    """Return `from layers (A, B)`."""
    return f"from layers ({', '.join(layer.span.text for layer in select.choosing)})"


def from_place(over: syn.Over, after: syn.Expr) -> str:
    """Return `over text after N` as a filter."""
    return f"over {over.axis.text} where query_position >= {after.span.text}"


def by_set(use: syn.Use) -> str:
    """Return `use POLICY` with the layer as a setting."""
    assert use.layer is not None and use.layers is not None
    return f"use {use.policy.text}; set layer = {use.layer.span.text}; set layers = {use.layers.span.text}"


def without_first_word(span: Span) -> str:
    """Return a span's text after its first word."""
    return span.text.split(maxsplit=1)[1]


def extends_of(policy: syn.Policy) -> Span:
    """Return the span of `extends PARENT`."""
    assert policy.parent is not None
    text, end = policy.span.file.text, policy.parent.span.end
    return policy.span.file.span(text.index("extends", policy.name.span.end), end)


def override_of(statement: syn.Statement) -> Span:
    """Return the span of `override` before a statement, including the space after it."""
    span = statement.span
    return span.file.span(span.file.text.rindex("override", 0, span.start), span.start)


def _part(what: str, **written: str) -> tuple[str, str]:
    return what, PARTS[what].format(**written)


def _without(span: Span, word: str) -> str:
    """Return a help that renames a statement's first word, or removes the statement."""
    if GONE[word].startswith("write "):
        return instead(GONE[word], re.sub(rf"\b{word}\b", "input", span.text, count=1))
    return leave_out(GONE[word], span)


def _of_expressions(item: object) -> Iterator[tuple[Span, str, str]]:
    """Find removed ranges and functions in a tree."""
    for over in syn.parts_of(item, syn.Over):
        if over.axis.text in RANGES:
            help = RANGES[over.axis.text]
            by_page = instead(help, "over slots by page(16)") if over.axis.text == "page" else help
            yield over.span, f"`over {over.axis.text}`", by_page
    for argument in syn.parts_of(item, syn.Argument):
        place = argument.over
        if place is not None and place.after is not None:
            what, help = _part("`after`", after=place.after.span.quoted())
            yield place.span, what, help if argument.only else instead(help, from_place(place, place.after))
    for call in syn.parts_of(item, syn.Call):
        if call.function.text in FUNCTIONS:
            yield call.function.span, f"`{call.function.text}`", FUNCTIONS[call.function.text]
