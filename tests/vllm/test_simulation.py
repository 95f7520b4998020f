"""Simulated serving by vLLM's own scheduler, against what can be said without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")

from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.settings import Settings
from kvdsl_lab.serving.driving import Served, serve
from kvdsl_lab.serving.machine import Machine
from kvdsl_lab.serving.simulation import Cache, Simulated, configured, folder_of
from kvdsl_lab.serving.traffic import Asked

LAYERS, HEADS, DIM = 5, 4, 64
"""Of the model that comes with kvdsl-lab."""

H2O = Settings("h2o", (("budget", 16),))
MACHINE = Machine(step=1e-3, weights=2e-2, token=1e-3, request=3e-4, byte=1e-8, pair=2e-6)


def simulated(
    policy: Settings | None, bytes: int, requests: list[Asked], at_once: int = 64, block: int | None = None
) -> Served:
    cache = Cache(policy, bytes, longest=1024, at_once=at_once, dtype="bfloat16", block=block)
    return serve(Simulated(*configured(folder_of("reference"), cache), MACHINE), requests)


@pytest.mark.parametrize("policy", [None, H2O], ids=["full", "h2o"])
def test_one_request_takes_what_the_formula_says(policy: Settings | None) -> None:
    """A prompt of 40 tokens and 5 answered ones, of which the last is not read."""
    token, most = 2 * LAYERS * HEADS * DIM * 2, 1024
    if policy is not None:
        import torch

        most = 16 + 1
        token = LAYERS * page(policy, HEADS, DIM, torch.bfloat16, layers=1, longest=8192).bytes // most
    served = simulated(policy, 32 << 20, [Asked(2.0, 40, 5)])
    prompt = 1e-3 + 40 * 1e-3 + 40 * 41 / 2 * 2e-6
    each = [1e-3 + 2e-2 + 3e-4 + 1e-8 * token * min(most, context) for context in (41, 42, 43, 44)]
    assert served.steps == 5 and served.preemptions == 0 and served.at_once == (pytest.approx(1.0), 1)
    assert served.ttft[0] == pytest.approx(prompt)
    assert served.tpot[0] == pytest.approx(sum(each) / 4)
    assert served.seconds == pytest.approx(prompt + sum(each))


@pytest.mark.parametrize("policy", [H2O, replace(H2O, kv_dtype="int4")], ids=["model", "int4"])
def test_a_page_a_request_and_nobody_begins_anew(policy: Settings) -> None:
    """vLLM keeps one block for itself."""
    import torch

    one = page(policy, HEADS, DIM, torch.bfloat16, layers=1, longest=8192).bytes * LAYERS
    requests = [Asked(0.0, 30, 200) for _ in range(40)]
    served = simulated(policy, 13 * one + one // 2, requests)
    assert served.at_once[1] == 12 and served.preemptions == 0 and served.tokens == 8000
    assert simulated(policy, 64 * one, requests, at_once=8).at_once[1] == 8, "as many as a step may have"


def test_full_attention_takes_blocks_as_texts_grow_and_begins_anew_without() -> None:
    """Room for 12 requests as they come, two blocks each, and for one and a half as they end; a step reads 1,024 tokens of prompts."""
    block = 2 * LAYERS * HEADS * DIM * 2 * 16
    served = simulated(None, 65 * block, [Asked(0.0, 30, 600) for _ in range(12)], block=16)
    assert served.at_once[1] == 12 and served.preemptions > 0 and served.tokens == 7200
    assert served.at_once[0] < 6


def test_policies_serve_more_at_once_from_the_same_bytes() -> None:
    requests = [Asked(0.0, 30, 600) for _ in range(12)]
    full, h2o = (simulated(policy, 1400 * 2 * LAYERS * HEADS * DIM * 2, requests, block=16) for policy in (None, H2O))
    assert h2o.preemptions == 0 < full.preemptions
    assert h2o.at_once[0] > 2 * full.at_once[0] and h2o.throughput > full.throughput
