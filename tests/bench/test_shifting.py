"""Caches that are shifted for every token keep what the policy keeps in place, done well and as published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.bench import shifting
from kvdsl.bench.shifting import ShiftedCache, rule, twin
from kvdsl.runtime.errors import KvdslError
from tests.hf import policies, zoo

BUDGET = 12


def shifted(model: Any, policy: str, *, fresh: bool, budget: int = BUDGET) -> ShiftedCache:
    return ShiftedCache(model, kvdsl.load(policy).spec, {"budget": budget}, fresh=fresh)


def logits(model: Any, cache: Any, prompt: Tensor, tokens: Tensor) -> Tensor:
    """What the model says behind the prompt and behind each of the tokens, [1 + tokens, rows, vocabulary]."""
    with torch.inference_mode():
        parts = [prompt, *tokens.split(1, dim=1)]
        return torch.stack([model(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1] for part in parts])


@pytest.mark.parametrize("length", [7, BUDGET, 20])
@pytest.mark.parametrize("policy", shifting.SERVED)
def test_it_says_what_the_policy_says_in_place(policy: str, length: int) -> None:
    model = zoo.make("Llama")
    other, (prompt, tokens) = twin(model), zoo.prompt(2, length + 25).split([length, 25], dim=1)
    expected = logits(model, policies.make(policy, model, budget=BUDGET, backend="torch"), prompt, tokens)
    for fresh in (False, True):
        cache = shifted(other, policy, fresh=fresh)
        torch.testing.assert_close(logits(other, cache, prompt, tokens), expected, atol=1e-4, rtol=1e-4)
        assert all(layer.keys.shape[2] == BUDGET + 1 and layer.seen == length + 25 for layer in cache.layers)
    more = logits(other, shifted(other, policy, fresh=False, budget=BUDGET + 1), prompt, tokens)
    assert not torch.allclose(more, expected, atol=1e-4, rtol=1e-4), "another budget should be noticed"


def test_done_well_it_moves_into_the_same_memory() -> None:
    model = twin(zoo.make("Llama"))
    cache = shifted(model, "equip_h2o", fresh=False)
    logits(model, cache, zoo.prompt(2, BUDGET), zoo.prompt(2, 4))
    known = addresses(cache)
    logits(model, cache, zoo.prompt(2, 1), zoo.prompt(2, 7))
    assert addresses(cache) == known
    held = [x for layer in cache.layers for x in (layer.keys, layer.values, layer.sums)]
    assert cache.bytes() == sum(x.nbytes for x in (*held, cache.layers[0].room.spare, cache.layers[0].room.turned))


def addresses(cache: ShiftedCache) -> set[int]:
    """Of keys and values, and of what they are moved and turned into."""
    room = cache.layers[0].room
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return {x.data_ptr() for x in (*tensors, room.spare, room.turned)}


def test_the_twin_leaves_the_model_as_it_was() -> None:
    model, ids = zoo.make("Llama"), zoo.prompt(1, 9)
    expected, before = model(input_ids=ids).logits, model.config._attn_implementation
    other = twin(model)
    logits(other, shifted(other, "h2o", fresh=False), ids, ids)
    assert other.lm_head.weight is model.lm_head.weight
    assert model.config._attn_implementation == before and torch.equal(model(input_ids=ids).logits, expected)


def test_the_rule_is_the_policys() -> None:
    spec = kvdsl.load("h2o").spec
    assert rule(spec, {"budget": 64}, 20) == shifting.Rule(64, None, 32)
    assert rule(spec, {"budget": 0.5}, 20) == shifting.Rule(10, None, 5)
    assert rule(kvdsl.load("streaming_llm", sinks=2).spec, {"budget": 8}, 20) == shifting.Rule(8, 2, None)


def test_what_it_does_not_serve() -> None:
    with pytest.raises(KvdslError, match=r"written for h2o, .*not for `roco`"):
        shifted(zoo.make("Llama"), "roco", fresh=False)
    with pytest.raises(KvdslError, match="not laid out as Llama is"):
        shifted(zoo.model("gpt2"), "equip_h2o", fresh=False)
    model = twin(zoo.make("Llama"))
    cache = shifted(model, "h2o", fresh=True)
    logits(model, cache, zoo.prompt(1, 5), zoo.prompt(1, 2))
    with pytest.raises(KvdslError, match="one token at a time"):
        model(input_ids=zoo.prompt(1, 3), past_key_values=cache)
