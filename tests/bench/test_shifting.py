"""Caches that are shifted for every token keep what the policy keeps in place, done well and as published; and a policy in place
generates what a model with such a cache would say (EQUIP, theorem 1 and figure 18).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.assets import load_reference_model
from kvdsl.errors import KvdslError
from kvdsl.generation.models import encode
from kvdsl.generation.text import page
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.bench import shifting
from kvdsl_lab.bench.shifting import ShiftedCache, rule, twin
from kvdsl_lab.reproduce.equip.common import VARIANTS
from tests.hf import policies, zoo

BUDGET = 12


RULES = {"equip_streaming": {"sinks": 4}, "equip_h2o": {"recent": 48}, "paged": {"recent": 48}}
"""What a policy is told beside the budget of 128."""

CLEAR = 1e-4
"""Logits that differ by less are as good as equal: either token may follow."""


TOKENS = {"snapkv_tokens": {"window": 3}, "lagkv_tokens": {"sinks": 2, "recent": 4}}
"""Policies that EQUIP's table 3 is measured with: what they are told beside a budget of 12."""


def known(policy: str) -> str:
    """What `kvdsl.load` knows it by."""
    return str(VARIANTS / f"{policy}.kv") if policy in TOKENS else policy


def shifted(model: Any, policy: str, *, fresh: bool, budget: int = BUDGET, **given: int) -> ShiftedCache:
    return ShiftedCache(model, kvdsl.load(known(policy)).spec, {"budget": budget, **given}, fresh=fresh)


def logits(model: Any, cache: Any, prompt: Tensor, tokens: Tensor) -> Tensor:
    """What the model says behind the prompt and behind each of the tokens, [1 + tokens, rows, vocabulary]."""
    with torch.inference_mode():
        parts = [prompt, *tokens.split(1, dim=1)]
        return torch.stack([model(input_ids=part, **with_cache(cache), use_cache=True).logits[:, -1] for part in parts])


@pytest.mark.parametrize("length", [7, BUDGET, 20])
@pytest.mark.parametrize("policy", shifting.SERVED)
def test_it_says_what_the_policy_says_in_place(policy: str, length: int) -> None:
    model = zoo.make("Llama")
    other, (prompt, tokens) = twin(model), zoo.prompt(2, length + 25).split([length, 25], dim=1)
    given = TOKENS.get(policy, {})
    expected = logits(model, policies.make(known(policy), model, budget=BUDGET, backend="torch", **given), prompt, tokens)
    for fresh in (False, True):
        cache = shifted(other, policy, fresh=fresh, **given)
        torch.testing.assert_close(logits(other, cache, prompt, tokens), expected, atol=1e-4, rtol=1e-4)
        assert all(layer.keys.shape[2] == BUDGET + 1 and layer.seen == length + 25 for layer in cache.layers)
    more = logits(other, shifted(other, policy, fresh=False, budget=BUDGET + 1, **given), prompt, tokens)
    assert not torch.allclose(more, expected, atol=1e-4, rtol=1e-4), "another budget should be noticed"


def divergences(model: Any, other: Any, ids: Tensor, steps: int, ours: Any, theirs: ShiftedCache) -> list[str]:
    """Where one cache generates a token that the other, given the same text so far, clearly would not."""
    options = {"max_new_tokens": steps, "do_sample": False, "use_cache": True}
    said = model.generate(ids, **options, **with_cache(ours))[:, ids.shape[1] :]
    assert said.shape[1] == steps
    found = []
    for step, here in enumerate(logits(other, theirs, ids, said[:, :-1])):
        best, second = here.topk(2, -1).values.unbind(-1)
        other_token = (here.argmax(-1) != said[:, step]) & (best - second > CLEAR)
        found += [
            f"row {row}, step {step}: {float((best - second)[row]):.1e}" for row in other_token.nonzero()[:, 0].tolist()
        ]
    return found


@cache
def reference() -> tuple[Any, Any, Tensor]:
    """The model for our caches; a twin of one that no cache of ours ever changed; two stretches of the book, [2, 200]."""
    model, tokenizer = load_reference_model()
    text = torch.tensor([encode(tokenizer, page(number))[:200] for number in (3, 7)])
    return model, twin(load_reference_model()[0]), text


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("policy", RULES)
def test_in_place_says_what_shift_and_append_says_for_hundreds_of_steps(policy: str, backend: str) -> None:
    model, other, text = reference()
    ours = policies.make(policy, model, budget=128, backend=backend, **RULES[policy])
    rule_of = "equip_h2o" if policy == "paged" else policy
    theirs = shifted(other, rule_of, fresh=True, budget=128, **RULES[policy])
    steps = 500 if (policy, backend) == ("equip_h2o", "cpu") else 200  # tokens leave from the first step on
    assert divergences(model, other, text, steps, ours, theirs) == []


@pytest.mark.parametrize("policy", ["equip_streaming", "equip_h2o"])
def test_in_place_says_what_shift_and_append_says(policy: str) -> None:
    """Grouped heads, and a model whose attention is far from uniform."""
    model, other = zoo.make("Llama"), twin(zoo.make("Llama"))
    given = {"sinks": 2} if policy == "equip_streaming" else {"recent": 5}
    ours = policies.make(policy, model, budget=BUDGET, backend="torch", **given)
    assert divergences(model, other, zoo.prompt(2, 30), 40, ours, shifted(other, policy, fresh=True, **given)) == []


def test_another_rule_is_noticed() -> None:
    """The comparison can fail: with other tokens kept, other tokens come."""
    model, other = zoo.make("Llama"), twin(zoo.make("Llama"))
    ours = policies.make("equip_streaming", model, budget=BUDGET, sinks=2, backend="torch")
    assert divergences(model, other, zoo.prompt(2, 30), 40, ours, shifted(other, "equip_streaming", fresh=True, sinks=4))


def test_it_is_the_model_itself_while_nothing_leaves() -> None:
    model = zoo.make("Llama")
    ids, options = zoo.prompt(2, 9), {"max_new_tokens": 12, "do_sample": False}
    said = model.generate(ids, **options)[:, 9:]
    other = twin(model)
    theirs = logits(other, shifted(other, "equip_streaming", fresh=True, budget=64), ids, said[:, :-1])
    assert torch.equal(theirs.argmax(-1).T, said)


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
    assert rule(spec, {"budget": 64}, 20) == shifting.Rule("sum", 64, 0, 32, 0)
    assert rule(spec, {"budget": 0.5}, 20) == shifting.Rule("sum", 10, 0, 5, 0)
    assert rule(kvdsl.load("streaming_llm", sinks=2).spec, {"budget": 8}, 20) == shifting.Rule("place", 8, 2, 0, 0)
    assert rule(kvdsl.load(known("snapkv_tokens")).spec, {"budget": 64}, 80) == shifting.Rule("window", 64, 0, 32, 32)


def test_what_it_does_not_serve() -> None:
    with pytest.raises(KvdslError, match=r"written for h2o, .*not for `roco`"):
        shifted(zoo.make("Llama"), "roco", fresh=False)
    with pytest.raises(KvdslError, match="not laid out as Llama is"):
        shifted(zoo.model("gpt2"), "equip_h2o", fresh=False)
    model = twin(zoo.make("Llama"))
    cache = shifted(model, "h2o", fresh=True)
    logits(model, cache, zoo.prompt(1, 5), zoo.prompt(1, 2))
    with pytest.raises(KvdslError, match="one token at a time"):
        model(input_ids=zoo.prompt(1, 3), **with_cache(cache))
