"""Policies of a few statements."""

from __future__ import annotations

from kvdsl.compiler import analyse
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from kvdsl.source import SourceFile


def checked(body: str) -> Policy:
    """The policy with these statements, one a line."""
    analysis = analyse(SourceFile("p.kv", f'kv 1\npolicy P {{\n"a test"\n{body}\n}}\n'))
    assert analysis.ok, analysis.diagnostics
    return analysis.policy


def evicting(body: str) -> Policy:
    """The policy with a budget of 8, a param `a` and these statements."""
    return checked(f"param budget = 8\nparam a = 2\n{body}")


def lowered(body: str) -> Policy:
    """`evicting`, on state columns."""
    return add_columns(evicting(body))
