"""Which statement, item or step of a test stands at a place, as the grammar names it."""

from __future__ import annotations

from collections.abc import Iterator

from kvdsl.lsp.document import Document
from kvdsl.reference import ITEMS, STATEMENTS, STEPS
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


def statement_at(document: Document, offset: int) -> tuple[str, str] | None:
    """The rule of the grammar, and what it means; of what lies in each other, the innermost."""
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
            yield statement.span, _rule(statement)
    for test in module.tests:
        yield test.span, "test"
        for step in test.steps:
            yield from _steps(step)


def _rule(statement: syn.Statement) -> str:
    if isinstance(statement, syn.Keep):
        return f"keep_{statement.scope}"
    if isinstance(statement, syn.Named):
        return type(statement).__name__.lower()
    return statement.keyword


def _steps(step: syn.Step) -> Iterator[tuple[Span, str]]:
    if isinstance(step, syn.Prompt):
        yield step.span, "prompt"
        for token in step.tokens:
            yield from _steps(token)
    elif isinstance(step, syn.Incoming):
        attended = any(one.kind == "attend" for one in step.brought)
        yield step.span, "times" if step.times > 1 else "attend" if attended else "token"
    elif isinstance(step, syn.Expect):
        yield step.span, "expect_error" if step.what == "error" else "expect"
    else:
        yield step.span, type(step).__name__.lower()
