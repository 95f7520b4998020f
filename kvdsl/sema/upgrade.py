"""Rewrite a file in the newest edition.

Syntax with a single replacement is rewritten. A file with anything else, or whose policies would keep other tokens, stays as it is;
a report says what to write by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvdsl import codes
from kvdsl.compiler import analyse
from kvdsl.diagnostics import Sink
from kvdsl.ir.nodes import Policy
from kvdsl.passes.fold import fold
from kvdsl.passes.normal import normal
from kvdsl.sema.editions import (
    by_set,
    check_edition,
    extends_of,
    from_layers,
    from_place,
    override_of,
    reused_of,
    without_first_word,
)
from kvdsl.sema.modules import EDITION, Loader, Module
from kvdsl.sema.resolve import resolve
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.formatter import format_source
from kvdsl.syntax.shape import parse_module

Edit = tuple[Span, str]


def upgraded(source: SourceFile, sink: Sink) -> str | None:
    """Return a file's text in the newest edition; None after reports of what to write by hand.

    Args:
        source: a file without errors.
    """
    module = Loader(sink).load(source)
    if sink.failed() or module.edition == EDITION:
        return None if sink.failed() else source.text
    text = source.text
    for policy in module.syntax.policies:
        _check_keeps(policy, module, sink)
    if sink.failed():
        return None
    for span, new in sorted(_edits(module), key=lambda edit: edit[0].start, reverse=True):
        text = text[: span.start] + new + text[span.end :]
    made = replace(source, text=text)
    laid_out = format_source(made, sink)
    if laid_out is None:
        return None
    before, left = Sink(), Sink()
    check_edition(module.syntax, EDITION, before)
    check_edition(parse_module(made, left), EDITION, left)
    if left.failed():
        messages = {one.message for one in left}
        for one in before.sorted():
            if one.message in messages:
                sink.report(codes.GONE, one.span, f"{one.message}: rewrite it by hand", one.help)
        return None
    return laid_out if _means_the_same(source, made, sink) else None


def _edits(module: Module) -> Iterator[Edit]:
    for edition in module.syntax.editions:
        yield _word(edition.span, edition.text), str(EDITION)
    for item in (*module.syntax.policies, *module.syntax.lets):
        yield from _in_expressions(item)
    for test in module.syntax.tests:
        for step in test.steps:
            yield from _of_step(step)
    for policy in module.syntax.policies:
        yield from _of_policy(policy, module)
        yield from _of_parent(policy)


def _of_step(step: syn.Step) -> Iterator[Edit]:
    """Write a layer as a setting, and names without `given` and `state`."""
    match step:
        case syn.Use(layer=syn.Constant()):
            yield step.span, by_set(step).replace("; ", "\n")
        case syn.Expect(what="state", word=syn.Word(span=word)):
            begin = step.span.file.text.index("expect", step.span.start) + len("expect")
            yield step.span.file.span(begin, word.start), " "
    for token in step.tokens:
        for one in token.brought:
            if one.name is not None and one.span.start < one.name.span.start:
                yield one.span, without_first_word(one.span)


def _word(span: Span, word: str) -> Span:
    """Return the span of a word's first occurrence."""
    found = re.search(rf"\b{re.escape(word)}\b", span.text)
    assert found is not None
    return span.file.span(span.start + found.start(), span.start + found.end())


def _line(statement: syn.Statement) -> Span:
    """Return a statement with the end of its line, or the `;` after it."""
    text, end = statement.span.file.text, statement.span.end
    behind = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|;[ \t]*)?").match(text, end)
    assert behind is not None
    return statement.span.file.span(statement.span.start, behind.end())


def _of_policy(policy: syn.Policy, module: Module) -> Iterator[Edit]:
    for statement in policy.statements:
        if (old := re.match(r"(tensor|given)\b", statement.span.text)) is not None:
            yield _word(statement.span, old.group()), "input"
    for pages in policy.of(syn.Pages):
        yield _line(pages), ""
    for budget in policy.of(syn.Budget):
        if budget.most is not None:
            value, most = budget.value.span, budget.most.span
            yield value.to(most), f"min({value.text}, {most.text})"
    for select in policy.of(syn.Select):
        if (place := reused_of(select)) is not None:
            yield place, from_layers(select)
    for param in policy.of(syn.Param):
        if param.unit is not None:
            yield param.unit.span, ""
    yield from _of_words({one.keyword: one for one in policy.of(syn.Setting)})
    yield from _of_keeps(policy, module)


def _of_parent(policy: syn.Policy) -> Iterator[Edit]:
    """Replace `extends B` by `= B with`."""
    if policy.parent is not None and not policy.clauses:
        yield extends_of(policy), f"= {policy.parent.text} with"
    for statement in policy.statements:
        if statement.override:
            yield override_of(statement), ""


def _check_keeps(policy: syn.Policy, module: Module, sink: Sink) -> None:
    """Report `keep` lines that add to inherited ones or drop them; a clause would replace those of its kind."""
    if policy.parent is None or policy.clauses:
        return
    (base, where), *_ = (one for one in module.policies() if one[0].name.text == policy.parent.text)
    kept = [keep.statement for keep in resolve(base, where, Sink()).keeps]
    inherited = {one.scope: one for one in syn.of_kind(kept, syn.Keep)}
    own = policy.of(syn.Keep)
    dropped = any(one.override for one in own)
    for keep in own:
        if keep.scope in inherited and not dropped:
            line = inherited[keep.scope].span.quoted()
            message = f"`{keep.span.quoted()}` adds to the inherited `{line}`, but would replace it after `with`"
            sink.report(codes.GONE, keep.span, message, f"write `{line}` next to it, in a policy of edition {EDITION}")
    for scope in inherited.keys() - {one.scope for one in own} if dropped else ():
        first = next(one for one in own if one.override)
        message = f"`override keep` drops the inherited `{inherited[scope].span.quoted()}`, which `with` would keep"
        sink.report(codes.GONE, first.span, message, f"write `keep {scope} ...`, which replaces it")


def _of_words(words: dict[str, syn.Setting]) -> Iterator[Edit]:
    """Write `prefill blocks of N` as `when ... every N`, and victims shared by heads as the score's mean."""
    blocks, when = words.get("prefill"), words.get("when")
    if blocks is not None and blocks.word is not None and blocks.value is not None:
        said = f" every {blocks.value.span.text}"
        yield (_line(blocks), "") if when is not None else (blocks.span, f"when both{said}")
        if when is not None:
            yield when.span, when.span.text + said
    victims, score = words.get("victims"), words.get("score")
    by_heads = victims is not None and victims.word is not None and victims.word.text == "heads"
    if victims is not None and by_heads and score is not None and score.value is not None:
        span = score.value.span
        yield _line(victims), ""
        yield span.file.span(span.start, span.start), "mean("
        yield span.file.span(span.end, span.end), " over heads)"


def _of_keeps(policy: syn.Policy, module: Module) -> Iterator[Edit]:
    """Write the newest token, which edition 1 keeps without a `keep last`, as `keep last 1`."""
    before = analyse(module.file)
    keeps = policy.of(syn.Keep)
    for one in keeps:
        match one:
            case syn.Keep(scope="last", count=syn.Constant(value=0)) if policy.parent is None:
                yield _line(one), ""
    said = any(one.scope == "last" for one in keeps)
    bounds = [*policy.of(syn.Budget), *policy.of(syn.Select)]
    own = bounds or any(one.name.text == "budget" and not one.override for one in policy.of(syn.Param))
    kept = any(one.scope == "last" for policy in before.policies for one in policy.keeps)
    if own and kept and not said and policy.parent is None:
        scores = [one for one in policy.of(syn.Setting) if one.keyword == "score"]
        after = (keeps[-1:] or scores or policy.statements[-1:])[0].span
        yield after.file.span(after.end, after.end), "\nkeep last 1"


def _in_expressions(item: object) -> Iterator[Edit]:
    """Write `over page` with the key that counts pages."""
    pages = next(syn.parts_of(item, syn.Pages), None)
    for call in syn.parts_of(item, syn.Call):
        for argument in call.arguments:
            over = argument.over
            if over is not None and over.after is not None and argument.only is None:
                yield over.span, from_place(over, over.after)
            if over is not None and over.axis.text == "page" and pages is not None:
                after = "" if pages.after is None else f", after = {pages.after.span.text}"
                key = f"by page({pages.value.span.text}{after})"
                yield over.span, key if call.function.text == "rank" else f"over slots {key}"


def _means_the_same(before: SourceFile, after: SourceFile, sink: Sink) -> bool:
    """Return whether a file's policy stays the same; report it otherwise."""
    old, new = analyse(before), analyse(after)
    if not new.ok:
        for one in new.diagnostics:
            sink.report(codes.CODES[one.code], one.span, f"as edition {EDITION}: {one.message}", one.help)
        return False
    if [_meaning(policy) for policy in old.policies] == [_meaning(policy) for policy in new.policies]:
        return True
    message = f"in edition {EDITION} this would be another policy, so it must be rewritten by hand"
    sink.report(codes.GONE, before.span(0, 0), message, "`kvdsl diff` compares two files")
    return False


def _meaning(policy: Policy) -> Policy:
    """Return the policy without the order in which protected tokens yield to the budget, which is the edition's."""
    return fold(normal(policy)).model_copy(update={"ends_last": False})
