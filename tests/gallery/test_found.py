"""What the shelf `policies/found` promises: its policies are finalists of a search whose database is committed, and are like the others."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.explain.facts import facts
from kvdsl.scenarios.run import run_scenario
from kvdsl.shipped import found_policies
from kvdsl_lab.search.space import at_budget, key, seed_of

SEARCH = Path(__file__).resolve().parents[2] / "results" / "search" / "smollm2_128"
FOUND = json.loads((SEARCH / "search.json").read_text(encoding="utf-8"))
BUDGET = FOUND["budgets"][0]


def same(path: Path) -> str:
    """The key of what a policy is at the budget of the search: a share of the budget is a number there."""
    policy = seed_of(analyse(path).policy)
    assert policy is not None, "it lies in the space"
    return key(at_budget(policy, BUDGET))


def test_the_database_knows_the_finalists() -> None:
    with sqlite3.connect(f"file:{SEARCH / 'search.sqlite'}?mode=ro", uri=True) as database:
        known = dict(database.execute("select key, text from policy"))
    assert {one["key"] for one in FOUND["finalists"]} <= known.keys()
    assert FOUND["counts"]["tried"] <= len(known)


@pytest.mark.parametrize("path", found_policies(), ids=lambda path: path.stem)
def test_is_a_finalist_and_says_what_it_found(path: Path) -> None:
    analysis = analyse(path)
    assert not analysis.diagnostics
    (finalist,) = (one for one in FOUND["finalists"] if same(SEARCH / f"{one['name']}.kv") == same(path))
    best = min(one["error"] for one in FOUND["seeds"])
    told = re.findall(r"\b(\d\.\d{4})\b", analysis.policy.doc)
    assert told == [f"{finalist['error']:.4f}", f"{best:.4f}"]


@pytest.mark.parametrize("path", found_policies(), ids=lambda path: path.stem)
def test_its_own_tests_pass(path: Path) -> None:
    analysis = analyse(path.with_name(f"{path.stem}_test.kv"))
    assert not analysis.diagnostics
    assert len(analysis.scenarios) >= 2
    for scenario in analysis.scenarios:
        assert scenario.policy is not None and scenario.policy.name == analyse(path).policy.name
        outcome = run_scenario(scenario)
        assert outcome.passed, (scenario.title, [failure.message for failure in outcome.failures])


@pytest.mark.parametrize("path", found_policies(), ids=lambda path: path.stem)
def test_has_kernels(path: Path) -> None:
    assert all(one["ok"] for one in facts(analyse(path).policy).backends if one["name"] in ("cpu", "triton"))
