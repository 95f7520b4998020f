"""Tests of policies that read tensors of files: the files have the sizes of the test."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from kvdsl.compiler import analyse
from kvdsl.scenarios.run import run_scenario

POLICY = """kv 1

policy P {
  "A test."
  param budget = 2
  tensor filter [layers, heads, dims] from "filter.safetensors"
  score -dot(filter, k)
}
"""
TEST = """kv 1
import "p.kv"

test "the longest along the filter leaves" {
  use P
  prompt {
    token query 1, 0 / 1, 0 key 3, 1
    token query 1, 0 / 1, 0 key 1, 3
    token query 1, 0 / 1, 0 key 2, 2
  }
  expect score -3, -1, -2 / -1, -3, -2
  expect evicted 0 / 1
}
"""


def failures(folder: Path) -> list[str]:
    (scenario,) = analyse(folder / "p_test.kv").scenarios
    return [failure.message for failure in run_scenario(scenario).failures]


def test_a_test_reads_the_file(tmp_path: Path) -> None:
    (tmp_path / "p.kv").write_text(POLICY)
    (tmp_path / "p_test.kv").write_text(TEST)
    assert failures(tmp_path) == [f"there is no file `{tmp_path / 'filter.safetensors'}`"]
    save_file({"filter": torch.eye(2)[None]}, tmp_path / "filter.safetensors")
    assert failures(tmp_path) == []
    save_file({"filter": torch.eye(2).flip(0)[None]}, tmp_path / "filter.safetensors")
    assert [message.split(":")[0] for message in failures(tmp_path)] == [
        f"{what} in KV head {head}" for what in ("score", "evicted") for head in (0, 1)
    ]
    save_file({"filter": torch.ones(1, 3, 2)}, tmp_path / "filter.safetensors")
    assert "this model needs [1, 2, 2]" in failures(tmp_path)[0]
