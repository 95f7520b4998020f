"""A text that is read once for many caches: they are as if the model had read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval.reading import Reading, read

BLOCKS = """kv 1
policy InBlocks {
  "Settles within the prompt."
  param budget = 16
  score mean(attn)
  prefill blocks of 8
}
"""


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 100, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["full", "h2o", "roco", "snapkv", "streaming_llm", "adakv", "quest", "knorm"])
@pytest.mark.parametrize("tokens", [None, 40])
def test_a_cache_is_what_the_models_own_reading_makes_it(model: Any, ids: Tensor, name: str, tokens: int | None) -> None:
    cache_class: Any = kvdsl.load(name)
    budget = {"budget": 40} if "budget" in cache_class.spec.params else {}
    ours, wanted = cache_class(model, **budget), cache_class(model, **budget)
    reading = Reading(model, ids)
    assert reading.give(ours, tokens)
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :tokens], **with_cache(wanted)).logits[:, -1]
        if tokens is None:
            torch.testing.assert_close(reading.logits, logits, rtol=1e-4, atol=1e-4)
        for layer in range(2):
            assert torch.equal(ours.positions(layer), wanted.positions(layer))
        step = ids[:, :1]
        after = [model(input_ids=step, **with_cache(cache)).logits for cache in (ours, wanted)]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-4)


def test_a_policy_that_settles_within_the_prompt_has_the_model_read(model: Any, ids: Tensor) -> None:
    cache_class: Any = kvdsl.compile(BLOCKS)
    cache, wanted, reading = cache_class(model), cache_class(model), Reading(model, ids)
    assert not reading.give(cache)
    assert cache.get_seq_length() == 0
    read(model, cache, reading)
    with torch.inference_mode():
        model(input_ids=ids, **with_cache(wanted))
    assert torch.equal(cache.positions(1), wanted.positions(1))
