"""Every shipped policy has tests, which pass, and the machinery around files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse, find_policy, shipped_policies
from kvdsl.diagnostics import DiagnosticError
from kvdsl.scenarios.run import run_scenario
from kvdsl.shipped import all_policies, found_policies
from tests.quick import few

TESTS = sorted(shipped_policies()[0].parent.glob("*_test.kv"))


def test_every_policy_has_tests() -> None:
    assert {path.stem.removesuffix("_test") for path in TESTS} == {path.stem for path in shipped_policies()}


@pytest.mark.parametrize("path", few(all_policies(), *shipped_policies(), *found_policies()), ids=lambda path: path.stem)
def test_they_pass(path: Path) -> None:
    analysis = analyse(path.with_name(f"{path.stem}_test.kv"))
    assert not analysis.diagnostics
    assert len(analysis.scenarios) >= 2
    policy = analyse(path).policy
    for scenario in analysis.scenarios:
        if scenario.policy is None:  # a refusal is expected
            assert path in shipped_policies()
        else:
            assert scenario.policy.name == policy.name
        outcome = run_scenario(scenario)
        assert outcome.passed, (scenario.title, [failure.message for failure in outcome.failures])


def test_they_are_no_policies() -> None:
    assert not [path for path in shipped_policies() if path.stem.endswith("_test")]
    with pytest.raises(DiagnosticError):
        find_policy("roco_test")


def test_a_state_that_is_wrong_would_be_noticed() -> None:
    """Each shipped test fails when any number in its expectations is another one."""
    from kvdsl.source import SourceFile

    path = next(path for path in TESTS if path.stem == "h2o_test")
    text = path.read_text(encoding="utf-8")
    lines = [
        number for number, line in enumerate(text.split("\n")) if line.startswith(("  expect score", "  expect evicted"))
    ]
    assert len(lines) > 6
    for number in lines:
        changed = text.split("\n")
        changed[number] = "  expect score rest 77" if "score" in changed[number] else "  expect evicted 77"
        scenarios = analyse(SourceFile("h2o_test.kv", "\n".join(changed), path)).scenarios
        assert [run_scenario(scenario).passed for scenario in scenarios].count(False) == 1
