"""What vLLM chooses on a played GPU. `test_rows` and `test_answers_on_gpus` test how it serves there."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from kvdsl.files import resource
from tests.vllm.test_rows import told


@pytest.mark.parametrize(
    ("policy", "attention", "room"),
    [
        ("h2o", "PolicyBackend", "InRows"),
        ("streaming_llm", "PolicyBackend", "InRows"),
        ("h2o_answer", "AnswerBackendOnGpus", "Room"),
    ],
)
def test_a_policy_is_attention_whatever_vllm_would_take(policy: str, attention: str, room: str) -> None:
    found = told("tests.vllm.played_gpu", policy)
    assert found == {"attention": [attention], "ours": True, "served": ["TritonBackend", room]}


def test_a_step_that_vllm_makes_up_has_nobodys_tokens() -> None:
    """As it does to compile and to warm up on GPUs: nobody's prompts have lengths, and layers answer zeros."""
    from kvdsl.integrations.vllm.backend import StepBuilder

    made_up = SimpleNamespace(rswa_prefix_lens=None, max_query_len=22, num_reqs=1)
    assert StepBuilder.build(SimpleNamespace(), 0, made_up) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runner", "dtype", "whole", "threshold", "answers", "pages"),
    [
        (True, torch.bfloat16, True, 0, True, True),
        (False, torch.bfloat16, True, 0, False, False),
        (True, torch.float32, True, 0, False, True),
        (True, torch.bfloat16, False, 0, True, False),
        (True, torch.bfloat16, True, 64, True, False),
    ],
)
def test_whole_steps_are_captured_where_replays_are_right(
    runner: bool, dtype: torch.dtype, whole: bool, threshold: int, answers: bool, pages: bool
) -> None:
    from kvdsl.integrations.vllm import answers_on_gpus, backend

    scheduler = SimpleNamespace(long_prefill_token_threshold=threshold)
    config, spec = SimpleNamespace(use_v2_model_runner=runner, scheduler_config=scheduler), SimpleNamespace(dtype=dtype)
    gpu, plan = SimpleNamespace(is_cpu=lambda: False), SimpleNamespace(of=lambda _: SimpleNamespace(whole=whole))
    with mock.patch.multiple(backend, current_platform=gpu, Plan=plan):
        for builder, captured in ((answers_on_gpus.StepBuilderOnGpus, answers), (backend.StepBuilder, pages)):
            found = builder.get_cudagraph_support(config, spec).name
            assert found == ("UNIFORM_SINGLE_TOKEN_DECODE" if captured else "NEVER")


def test_who_asks_for_none_has_vllms() -> None:
    found = told("tests.vllm.played_gpu")
    assert found["attention"] and not found["ours"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("h2o", "TRITON_ATTN"), "this configuration has chosen TRITON_ATTN: leave --attention-backend out"),
        ((str(resource("policies", "gallery", "rocketkv.kv")),), "there are no Triton kernels for `select` by `pages`"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], why: str) -> None:
    assert why in told("tests.vllm.played_gpu", *words)["refused"]
