"""Tests of policies that ask their caller for values: a token brings them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.diagnostics import Diagnostic
from kvdsl.ir.nodes import Policy
from kvdsl.scenarios.run import run_scenario
from kvdsl.scenarios.witness import find_witness
from kvdsl.scenarios.write import as_test

POLICY = """kv 1

policy P {
  "A test."
  param budget = 2
  given worth
  given trust = 0.5
  score worth * trust
}
"""


def written(folder: Path, *steps: str, policy: str = POLICY) -> Path:
    (folder / "p.kv").write_text(policy)
    lines = "\n  ".join(steps)
    (folder / "p_test.kv").write_text(f'kv 1\nimport "p.kv"\n\ntest "it works" {{\n  use P\n  {lines}\n}}\n')
    return folder / "p_test.kv"


def failures(path: Path) -> list[str]:
    found = analyse(path)
    assert not found.diagnostics, found.diagnostics
    return [failure.message for failure in run_scenario(found.scenarios[0]).failures]


def problem(path: Path) -> Diagnostic:
    return analyse(path).diagnostics[0]


def test_a_token_brings_what_the_caller_gives(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "prompt {", "attend 1 given worth 0.25 / 4", "attend 0, 1 given trust 1 given worth 3 / 1", "}",
        "attend rest 0 given worth 2",
        "expect score 0.125, 3, 1 / 2, 1, 1",
        "expect state given_trust 0.5, 1, 0.5",
        "expect evicted 0 / 1",
        "token key 1 given worth 9",
        "expect kept 1, 3 / 0, 3",
    )  # fmt: skip
    assert failures(path) == []
    path.write_text(path.read_text().replace("evicted 0 / 1", "evicted 1 / 1"))
    assert failures(path) == ["evicted in KV head 0: expected 1, found 0"]


@pytest.mark.parametrize(
    ("step", "message", "help"),
    [
        ("attend 1", "`P` needs `worth` of every token, which has no default", "write `worth 0.5` after the token, say"),
        ("attend 1 given wort 1 given worth 1", "`P` has no input `wort`", "did you mean `worth`?"),
        ("attend 1 given worth 1, 2", "a given value is one number of the token", "separate the values of KV heads by"),
        ("attend 1 given worth rest 1", "a given value is one number of the token", "separate the values of KV heads by"),
        ("attend 1 given worth 1 given worth 2", "`worth` is given twice", ""),
        ("attend 1 given worth 1 / 2 / 3 value 1 / 2", "expected 3 KV heads, as before, not 2", ""),
    ],
)  # fmt: skip
def test_what_a_token_cannot_bring_is_said(tmp_path: Path, step: str, message: str, help: str) -> None:
    found = problem(written(tmp_path, step, "expect kept 0"))
    assert found.message == message
    assert help in (found.help or "")


def test_a_text_that_tells_two_policies_apart_says_what_is_given(tmp_path: Path) -> None:
    for name, score in (("P", "worth * trust"), ("Q", "worth - trust * position")):
        text = POLICY.replace("policy P", f"policy {name}").replace("worth * trust", score)
        (tmp_path / f"{name.lower()}.kv").write_text(text)

    def variant(stem: str) -> Callable[[Mapping[str, str]], Policy | None]:
        return lambda settings: analyse(tmp_path / f"{stem}.kv", settings=settings).policy

    witness = find_witness(variant("p"), variant("q")).witness
    assert witness is not None
    text = as_test(witness, ("P", "Q"))
    assert "given" not in text and " worth " in text
    for name, fails in (("P", 0), ("Q", 1)):
        path = tmp_path / f"{name}_test.kv"
        path.write_text(f'kv 1\nimport "{name.lower()}.kv"\n{text.replace("use P", f"use {name}")}\n')
        assert len(failures(path)) == fails
