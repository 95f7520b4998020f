"""Models with windows, sinks and a cap of their logits over shared prompts: layers with a window keep it, the policy serves the others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM

from kvdsl.integrations.vllm.ledger import Ledger
from tests.vllm.alone import NEAR, alone
from tests.vllm.test_answers import (
    KEPT,
    LENGTHS,
    NEW,
    Served,
    check,
    drawn,
    engine,
    everyone,
    layers,
    nothing_is_lost,
    scheduler,
)
from tests.vllm.test_windows import HEADS, MODELS, SLIDING, made, read


class Case(NamedTuple):
    """A model in an engine, and in transformers."""

    policy: str
    place: Path
    model: Any
    llm: LLM


@pytest.fixture(
    scope="module",
    params=[("gemma3", "h2o_answer"), ("gemma2", "roco_easykv"), ("gpt_oss", "h2o_answer")],
    ids=lambda case: case[0],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, policy = request.param
    place = made(family, tmp_path_factory.mktemp(family))
    llm = engine(policy, model=place, skip_tokenizer_init=True)
    assert len(layers(llm)) == sum(kind != SLIDING for kind in MODELS[family][1]["layer_types"])
    yield Case(policy, place, read(place), llm)
    del llm
    gc.collect()


def test_requests_together_are_what_they_are_alone(case: Case) -> None:
    """In parts of at most 96 tokens; then once more, with what is found of the prompts. Only the layers that the policy serves evict."""
    ledger = Ledger.find(0)
    assert ledger is not None
    for hits in (False, True):
        before = ledger.evicted
        found, named = everyone(case.llm)
        check(case.policy, found, named, case.model)
        assert len(found.held) == len(named)
        assert bool(sum(out.num_cached_tokens for out in found.outputs.values())) == hits
        assert ledger.evicted - before == len(LENGTHS) * (NEW - 1 - KEPT) * len(layers(case.llm)) * HEADS
    assert nothing_is_lost(case.llm)


def test_requests_that_lose_their_blocks_go_on_as_if_they_had_not(case: Case) -> None:
    def during(served: Served) -> None:
        if served.steps in (16, 30):
            assert served.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    found, named = everyone(case.llm, during)
    check(case.policy, found, named, case.model)
    assert nothing_is_lost(case.llm)


def test_who_is_preempted_finds_its_prompt_and_not_its_answer_in_anothers(case: Case) -> None:
    """Layers with windows may lend no more than the others."""
    case.llm.reset_prefix_cache()

    def during(served: Served) -> None:
        here = scheduler(served.llm)
        one = next((one for one in here.requests.values() if one.request_id.startswith("r128")), None)
        if served.steps == 34 and one is not None:
            served.add("other", list(one.all_token_ids))
        if served.steps == 37 and one is not None:
            here.running.remove(one)
            here._preempt_request(one, 0.0)
            assert here.kv_cache_manager.get_computed_blocks(one)[1] == 128

    found = Served(case.llm, during)
    found.add("r128", drawn(128))
    found.run()
    assert "other" in found.outputs
    check(case.policy, found, {"r128": drawn(128)}, case.model)


def test_another_window_or_sink_or_cap_says_other_things(case: Case) -> None:
    """The comparisons above can fail."""
    found = Served(case.llm)
    found.add("r301", drawn(301))
    answer = found.run().outputs["r301"].outputs[0]
    tokens = list(answer.token_ids)
    thought = np.array([step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)])
    others = [read(case.place, sliding_window=case.model.config.sliding_window + 1)]
    if case.model.config.model_type == "gpt_oss":
        bare = read(case.place)
        with torch.no_grad():
            for layer in bare.model.layers:
                layer.self_attn.sinks.fill_(-30.0)
        others.append(bare)
    if getattr(case.model.config, "attn_logit_softcapping", None) is not None:
        others.append(read(case.place, attn_logit_softcapping=case.model.config.attn_logit_softcapping / 50))
    for other in others:
        assert np.abs(thought - alone(case.policy, drawn(301), tokens, other)[0]).max() > 100 * NEAR
