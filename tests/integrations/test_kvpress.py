"""A policy as a press, in kvpress's pipeline and beside its presses, in an environment of its own (`make peers`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make peers` tests this in an environment where it is"
)

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM  # noqa: E402

import kvdsl  # noqa: E402
from kvdsl.errors import KvdslError  # noqa: E402
from kvdsl.integrations.kvpress import PolicyPress  # noqa: E402
from kvdsl.runtime.hf.versions import with_cache  # noqa: E402

pytestmark = pytest.mark.nightly

TOKENS = 80
IDS = torch.randperm(100, generator=torch.Generator().manual_seed(0))[None, :TOKENS]  # none twice: equal keys would tie


def llama() -> Any:
    """Three layers of four KV heads in groups of two, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=8, max_position_embeddings=512, attn_implementation="sdpa", initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> Any:
    return llama()


def pressed(model: Any, press: Any, ids: torch.Tensor = IDS, **inputs: Any) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(ids, **with_cache(cache), **inputs)
    return cache


@pytest.mark.parametrize("policy", ["h2o", "roco", "snapkv", "streaming_llm", "adakv"])
def test_what_follows_is_what_the_policys_own_cache_predicts(model: Any, policy: str) -> None:
    """One token after the prompt, from kvpress's cache under its own attention; AdaKV's heads are filled up with masked keys."""
    budget = 48
    cache = pressed(model, PolicyPress(policy, settings={"budget": budget}))
    at, token = torch.tensor([[TOKENS]]), torch.tensor([[7]])
    with torch.no_grad():
        found = model(token, **with_cache(cache), position_ids=at).logits
        own = kvdsl.load(policy)(model, budget=budget)
        model(IDS, **with_cache(own))
        expected = model(token, **with_cache(own), position_ids=at).logits
    kvdsl.load(policy).release(model)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_nothing_is_pressed_without_a_ratio_or_a_budget(model: Any) -> None:
    assert pressed(model, PolicyPress("h2o")).get_seq_length() == TOKENS


def test_a_prompt_that_is_to_be_decoded_under_another_press(model: Any) -> None:
    press = kvpress.PrefillDecodingPress(
        PolicyPress("roco", settings={"budget": 20}),
        kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=1, target_size=20),
    )
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(IDS, **with_cache(cache))
        model(torch.tensor([[7]]), **with_cache(cache), position_ids=torch.tensor([[TOKENS]]))
    assert cache.get_seq_length() == 20


def test_in_kvpress_own_pipeline() -> None:
    from kvdsl.generation.models import load_model

    model, tokenizer = load_model(None)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    cache = DynamicCache()
    context = "The mountain stood behind the village, and the children went up to see their grandmother. " * 4
    press = PolicyPress("roco", compression_ratio=0.5)
    found = pipe(context, question="They saw", press=press, cache=cache, max_new_tokens=4)
    tokens = tokenizer(tokenizer.bos_token + context, add_special_tokens=False, return_tensors="pt")["input_ids"].shape[1]
    assert cache.get_seq_length() == int(tokens * 0.5)
    assert isinstance(found["answer"], str) and found["answer"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "full"}, "evicts nothing while a prompt is read"),
        ({"policy": "kvzap"}, "KVzap needs `importance` from its caller: give a function, `supplied={'importance': f}`"),
        ({"policy": "h2o", "supplied": {"importance": len}}, "H2O has no `importance` that could be given"),
        ({"policy": "h2o", "compression_ratio": 50}, "the share of tokens that leave, from 0 up to 1, not 50"),
        ({"policy": "h2o", "compression_ratio": math.nan}, "the share of tokens that leave, from 0 up to 1, not nan"),
        ({"policy": "h2o", "backend": "cuda"}, "there is no backend `cuda`"),
        ({"policy": "h2o", "settings": {"budgets": 3}}, "H2O has no `budgets`; it has budget, recent"),
    ],
)
def test_what_cannot_be_a_press(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KvdslError, match=message):
        PolicyPress(**settings)


def test_a_budget_twice(model: Any) -> None:
    with pytest.raises(KvdslError, match="given twice"):
        pressed(model, PolicyPress("h2o", compression_ratio=0.5, settings={"budget": 20}))
    with pytest.raises(KvdslError, match="given twice"):
        pressed(model, PolicyPress("h2o", compression_ratio=0.5, settings={"ratio": 0.25}))
    with pytest.raises(KvdslError, match="`budget` and `ratio` of H2O are both given"):
        PolicyPress("h2o", settings={"budget": 20, "ratio": 0.25})
    assert PolicyPress("h2o", settings={"ratio": 1}).settings == {"budget": 1.0}


def test_behind_another_press(model: Any) -> None:
    both = kvpress.ComposedPress([kvpress.KnormPress(0.5), PolicyPress("h2o", settings={"budget": 20})])
    with pytest.raises(KvdslError, match="a policy is pressed once, by itself"):
        pressed(model, both)


def test_padded_prompts(model: Any) -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(KvdslError, match="the prompts are padded"):
        pressed(model, PolicyPress("h2o", settings={"budget": 20}), IDS.repeat(2, 1), attention_mask=mask)


def test_padded_prompts_of_a_model_with_windows() -> None:
    """A window hides the beginning of a text from its end, but no token from itself."""
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_key_value_heads=4, head_dim=8, sliding_window=24, attn_implementation="sdpa")
    ).eval()
    press = PolicyPress("h2o", settings={"budget": 20})
    pressed(model, press)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(KvdslError, match="the prompts are padded"):
        pressed(model, press, IDS.repeat(2, 1), attention_mask=mask)
