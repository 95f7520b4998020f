"""What the shelf `policies/found` promises: its policies come of a committed search, and are like the others."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean

import pytest

from kvdsl.compiler import analyse
from kvdsl.explain.facts import facts
from kvdsl.shipped import found_policies
from kvdsl.source import SourceFile
from kvdsl_lab.search.space import at_budget, key, seed_of

SEARCH = Path(__file__).resolve().parents[2] / "results" / "search" / "smollm2_128"
FOUND = json.loads((SEARCH / "search.json").read_text(encoding="utf-8"))
CHOSEN = json.loads((SEARCH / "chosen.json").read_text(encoding="utf-8"))
BUDGET = FOUND["budgets"][0]


def same(path: Path) -> str:
    """The key of what a policy is at the budget of the search: a share of the budget is a number there."""
    return _same(path.read_text(encoding="utf-8"))


def _same(text: str) -> str:
    policy = seed_of(analyse(SourceFile("<found>", text)).policy)
    assert policy is not None, "it lies in the space"
    return key(at_budget(policy, BUDGET))


@lru_cache(1)
def chosen_by() -> dict[str, tuple[float, int]]:
    """By `same`, of what was judged on the text that chooses: the error, and bytes of state."""
    return {_same(one["text"]): (geometric_mean(one["errors"].values()), one["state_bytes"]) for one in CHOSEN}


def test_the_finalists_were_chosen_among_the_best() -> None:
    assert {one["key"] for one in FOUND["finalists"]} <= {one["key"] for one in CHOSEN}


@pytest.mark.parametrize("path", found_policies(), ids=lambda path: path.stem)
def test_is_as_good_as_a_finalist_and_says_what_was_found(path: Path) -> None:
    """By the text that chooses the finalists: none of as many bytes of state is better than it in what it says."""
    analysis = analyse(path)
    assert not analysis.diagnostics
    error, state_bytes = chosen_by()[same(path)]
    others = [one["error"] for one in FOUND["finalists"] if one["state_bytes"] <= state_bytes]
    assert round(error, 4) <= round(min(others), 4)
    best = min(one["error"] for one in FOUND["seeds"])
    told = re.findall(r"\b(\d\.\d{4})\b", analysis.policy.doc)
    assert told == [f"{error:.4f}", f"{best:.4f}"]


@pytest.mark.parametrize("path", found_policies(), ids=lambda path: path.stem)
def test_has_kernels(path: Path) -> None:
    assert all(one["ok"] for one in facts(analyse(path).policy).backends if one["name"] in ("cpu", "triton"))
