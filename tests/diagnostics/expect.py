"""Helpers: analyse a text, and assert what is said about it, where, and what help is given."""

from __future__ import annotations

from kvdsl.compiler import Analysis, analyse
from kvdsl.diagnostics import Diagnostic, listed
from kvdsl.files import resource
from kvdsl.ir.nodes import Policy
from kvdsl.ir.ops import PLAIN_REDUCTIONS
from kvdsl.source import SourceFile
from tests.diagnostics.mistakes import broken_rule

REDUCTIONS = f"the reductions are {listed(PLAIN_REDUCTIONS, 'and')}"
"""A help that names them all."""


def check(text: str, **settings: str) -> Analysis:
    """Analyses a text as if it lay beside the shipped policies."""
    return analyse(SourceFile("example.kv", text, resource("policies") / "example.kv"), settings=settings)


def body(*statements: str) -> str:
    """A file with one policy of these statements."""
    return "\n".join(["kv 1", "policy P {", '  "A test."', *statements, "}", ""])


def policy(*statements: str, **settings: str) -> Policy:
    """The IR of a policy that has no errors and no warnings."""
    analysis = check(body(*statements), **settings)
    assert not analysis.diagnostics, [found.message for found in analysis.diagnostics]
    return analysis.policy


def only(text: str, code: str, **settings: str) -> Diagnostic:
    """The one diagnostic of a text, which has this code; each edit that its help offers mends it."""
    analysis = check(text, **settings)
    found = analysis.diagnostics
    assert [one.code for one in found] == [code], [(one.code, one.message) for one in found]
    broken = broken_rule(found[0], analysis)
    assert not broken, broken
    return found[0]


def expect(text: str, code: str, message: str, at: str, help: str | None = None, **settings: str) -> None:
    """Asserts the one diagnostic of a text: its code, message, underlined text and help."""
    found = only(text, code, **settings)
    assert found.message == message
    assert found.span.text == at
    assert found.help == help


def expect_in(statement: str, code: str, message: str, at: str, help: str | None = None, **settings: str) -> None:
    """The same for a statement in a policy with a budget, and with a score if the statement gives none."""
    lines = ["param budget = 512", statement]
    if not any(line.lstrip().startswith("score") for line in statement.split("\n")):
        lines.append("score position")
    expect(body(*lines), code, message, at, help, **settings)
