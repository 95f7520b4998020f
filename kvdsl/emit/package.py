"""A checked policy → the files of its package: plan, render."""

from __future__ import annotations

from kvdsl.emit.render import render
from kvdsl.ir.nodes import Policy
from kvdsl.lower.plan import make_plan


def package(policy: Policy, source: str) -> dict[str, str]:
    """The text of every file, by name.

    Args:
        source: the text of the .kv file, for its digest.
    """
    return render(make_plan(policy), source)
