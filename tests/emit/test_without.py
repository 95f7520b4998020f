"""What is said of a policy that a target has no kernels for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdsl.compiler import analyse, package, plan_of
from kvdsl.errors import warn
from kvdsl.ir.ops import POOLS, REDUCTIONS
from kvdsl.lower.without import _INSTEAD, COST, sentence, without
from kvdsl.shipped import all_policies

ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_policy_without_kernels_says_which_line() -> None:
    found = 0
    for path in all_policies():
        text = path.read_text()
        plan = plan_of(analyse(path).policy)
        for target, refusal in plan.refusals.items():
            if refusal:
                found += 1
                told = sentence(target, refusal, text)
                assert "\n" not in told and told.count("; ") >= 2
                if "`" not in refusal:  # no word of the language
                    continue
                number, line = re.search(r"\(line (\d+): `(.+?)`\)", told).groups()  # type: ignore[union-attr]
                assert line in " ".join(text.splitlines()[int(number) - 1].split()), told
    assert found


def test_all_that_is_advised_is_of_a_refusal() -> None:
    """As lowering words them, or an operation's name."""
    said = "\n".join(path.read_text() for path in (ROOT / "kvdsl" / "lower").glob("*.py"))
    names = " ".join(f"`{name}`" for name in (*POOLS, *REDUCTIONS))
    assert not [part for part, _ in _INSTEAD if part not in said and part not in names]


def test_every_reason_has_its_advice() -> None:
    told = sentence("triton", "a count of `select` that reads what is cached, `group each`: a kernel chooses once", "")
    assert "select a number of tokens" in told and "leave out `group each`" in told


def test_the_line_is_no_comment_and_no_docstring() -> None:
    text = 'kv 2\n\npolicy P {\n  "weight one"\n  param budget = 8  # weight two\n  score position\n  select where seen weight 2\n}\n'
    assert "(line 7: `select where seen weight 2`)" in sentence("cpu", "`weight` in `select`", text)
    assert "line" not in sentence("cpu", "a reduction over dims inside another one", text)


def test_the_cost_is_the_one_that_was_measured() -> None:
    row = next(
        line for line in (ROOT / "docs/performance.md").read_text().splitlines() if line.startswith("| fp32, 8 rows, 4,096")
    )
    assert row.split("|")[5].split(",")[0].strip() in COST["cpu"]


def test_the_manifest_has_it() -> None:
    made = {stem: package(policy, "") for stem in ("loki", "h2o") if (policy := analyse(_path(stem)).policy)}
    assert "`project`" in (without(made["loki"]["manifest.json"], "cpu") or "")
    assert without(made["h2o"]["manifest.json"], "cpu") is None and "without" not in json.loads(made["h2o"]["manifest.json"])


def _path(stem: str) -> Path:
    return next(path for path in all_policies() if path.stem == stem)


def test_a_warning_points_to_the_users_line() -> None:
    with pytest.warns(UserWarning, match="mind this") as told:
        inner = {"__name__": "kvdsl.somewhere", "warn": warn}
        exec(compile("def call(): warn('mind this')", "inner.py", "exec"), inner)
        inner["call"]()  # type: ignore[operator]
    assert told[0].filename == __file__
