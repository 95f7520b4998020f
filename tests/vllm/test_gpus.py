"""What vLLM takes on GPUs, one of which is played: how it serves there, `test_rows` has."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from kvdsl.resources import resource
from tests.vllm.test_rows import told


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
def test_a_policy_is_attention_whatever_vllm_would_take(policy: str) -> None:
    found = told("tests.vllm.played_gpu", policy)
    assert found == {"attention": ["PolicyBackend"], "ours": True, "served": ["TritonBackend", "InRows"]}


def test_who_asks_for_none_has_vllms() -> None:
    found = told("tests.vllm.played_gpu")
    assert found["attention"] and not found["ours"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("h2o", "TRITON_ATTN"), "this configuration has chosen TRITON_ATTN: leave --attention-backend out"),
        ((str(resource("policies", "gallery", "gkv.kv")),), "has no Triton kernels"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], why: str) -> None:
    assert why in told("tests.vllm.played_gpu", *words)["refused"]
