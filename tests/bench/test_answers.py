"""The scores that are compared on equal ground."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvdsl.compiler import analyse, find_policy

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "answers.py"
NAMES = re.findall(r"^@scored\ndef (\w+)", FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_policies_differ_in_their_score_alone(name: str) -> None:
    one, chance = (analyse(find_policy(f"{FILE}:{which}")) for which in (name, "chance"))
    assert one.ok and not one.diagnostics
    same = {"name": "", "stem": "", "doc": "", "score": None}
    assert one.policy.model_copy(update=same) == chance.policy.model_copy(update=same)


def test_the_page_has_the_command_for_all() -> None:
    page = (FILE.parents[1] / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert NAMES and re.findall(r"benchmarks/answers\.py:(\w+)", page) == NAMES
