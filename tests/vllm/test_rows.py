"""Pages that are the rows of one state, as on a GPU, with the kernels in Triton's interpreter: the same as pages that are blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")


def told(module: str, *given: str) -> dict[str, Any]:
    """What a process says that plays a GPU by Triton's interpreter."""
    words = [sys.executable, "-m", module, *given]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("told: ")[2])
    return found


@pytest.mark.parametrize(("policy", "runner"), [("h2o", "v1"), ("h2o", "v2"), ("streaming_llm", "v2"), ("h2o", "graphs")])
def test_pages_that_are_rows_say_and_keep_the_same(policy: str, runner: str) -> None:
    """By either of vLLM's runners; its second is what it takes on GPUs. There it replays captured steps, some with padding."""
    blocks = told("tests.vllm.in_rows", "cpu", policy, "v1" if runner == "v1" else "v2")
    rows = told("tests.vllm.in_rows", "triton", policy, runner)
    assert rows["replayed"] == ([[2, 1], [2, 2], [4, 3], [4, 4]] if runner == "graphs" else [])
    assert rows["tokens"] == blocks["tokens"]
    assert rows["held"] == blocks["held"]
    for found, wanted in zip(rows["logprobs"], blocks["logprobs"], strict=True):
        assert found == pytest.approx(wanted, abs=2e-5)
    assert max(len(head) for layer in rows["held"] for page in layer for head in page) <= 49


def test_buffers_other_than_those_captured_are_noticed() -> None:
    """The control: a builder that fills new tensors leaves the captured ones with nobody's numbers."""
    replayed, stale = (told("tests.vllm.in_rows", "triton", "h2o", runner) for runner in ("v2", "stale"))
    assert stale["replayed"] and stale["tokens"] != replayed["tokens"]
