"""Policies that read spans, turns and tokens: in vLLM as in transformers with the same marks."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM, SamplingParams

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.assets import reference_model_path
from tests.vllm.alone import NEAR, NEW, reference
from tests.vllm.test_serving import kept_in_pages, logprobs, sets
from tests.vllm.texts import drawn

LENGTHS = (47, 130, 301, 700)
PARAMS = {
    "keep_system": {"budget": 48, "recent": 8},
    "decay_tools": {"budget": 48},
    "line_ends": {"budget": 48, "line_end": 31},
    "drop_thinking": {},
}
SPANS: dict[str, dict[str, Any]] = {
    "keep_system": {"system": [[0, 9], [20, 31]]},
    "decay_tools": {"tool": [[5, 21], [30, None]], "turns": [12, 33]},
    "line_ends": {},
    "drop_thinking": {"think": [[3, 11], [17, 24], [40, 44]], "turns": [15, 36]},
}  # fmt: skip
AT_ONCE = 192


def engine(policy: str, **more: Any) -> LLM:
    params = PARAMS.get(policy, {"budget": 12})
    return LLM(
        str(reference_model_path()), dtype="float32", max_model_len=1024, max_num_batched_tokens=AT_ONCE, enforce_eager=True,
        max_num_seqs=len(LENGTHS), additional_config={"kvdsl": {"policy": policy, **params, **more}},
    )  # fmt: skip


@pytest.fixture(scope="module", params=PARAMS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    llm = engine(request.param)
    yield request.param, llm
    del llm
    gc.collect()


def texts() -> list[list[int]]:
    """Prompts in which some tokens are ends of lines."""
    found = [drawn(length, 0) for length in LENGTHS]
    for text in found:
        text[4::13] = [31] * len(text[4::13])
    return found


def asking(spans: Any, **more: Any) -> SamplingParams:
    extra = None if spans is None else {"kvdsl_spans": spans}
    return SamplingParams(
        **({"max_tokens": NEW, "temperature": 0, "logprobs": 0, "ignore_eos": True} | more), extra_args=extra
    )


def answers(llm: LLM, spans: Any, **more: Any) -> Any:
    return logprobs(llm.generate([{"prompt_token_ids": text} for text in texts()], asking(spans, **more), use_tqdm=False))


def alone(
    policy: str, prompt: list[int], tokens: list[int], spans: dict[str, Any]
) -> tuple[list[float], dict[int, torch.Tensor]]:
    """What the text gets in transformers."""
    model, found = reference()[0], []
    cache = kvdsl.load(policy)(model, **PARAMS.get(policy, {"budget": 12}))
    for at in spans.get("turns", []):
        cache.end_turn(at)
    for name, stretches in spans.items():
        for stretch in stretches if name != "turns" else []:
            cache.mark(name, *stretch)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **with_cache(cache)).logits[0, -1]
        for token in tokens:
            found.append(float(logits.log_softmax(-1)[token]))
            if len(found) < len(tokens):
                logits = model(torch.tensor([[token]]), **with_cache(cache)).logits[0, -1]
    return found, {index: cache.positions(index)[0] for index in cache.managed}


def check(policy: str, found: Any, spans: dict[str, Any], pages: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
    held = []
    for text, (tokens, thought) in zip(texts(), found, strict=True):
        expected, kept = alone(policy, text, tokens, spans)
        assert np.abs(np.array(thought) - expected).max() < NEAR, len(text)
        for layer, position in kept.items():
            assert sets(position) in [sets(page) for page in pages[layer]], (
                f"layer {layer} of the text of {len(text)} tokens"
            )
        held.append(kept)
    return held


@pytest.mark.parametrize("as_text", [False, True], ids=["dict", "JSON"])
def test_marks_are_what_they_are_in_transformers(served: tuple[str, LLM], as_text: bool) -> None:
    policy, llm = served
    spans = SPANS[policy]
    found = answers(llm, json.dumps(spans) if as_text else spans)
    marked = check(policy, found, spans, kept_in_pages(llm))
    if not spans or as_text:
        return
    unmarked = check(policy, answers(llm, None), {}, kept_in_pages(llm))
    assert any(sets(a[layer]) != sets(b[layer]) for a, b in zip(marked, unmarked, strict=True) for layer in a)
