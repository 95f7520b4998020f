"""Query heads that select for themselves, in models: as in one that stores each key and value once for every query head."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import zoo

pytestmark = pytest.mark.nightly

STATEMENTS = {
    "dot": "select top 6 by dot(q, k)\n  keep first 2",
    "expression": "select top 6 by dot(q, k) - age / 100",
    "pages": "pages 4\n  select top 12 by sum(max(q * min(k over page), q * max(k over page)) over dims)",
    "count": "select top enough(exp(dot(q, k) / 4), 0.5) by dot(q, k)\n  keep last 0",
    "evicts": "param budget = 20\n  score norm1(v) - age / 100\n  select top 6 by dot(q, k)",
    "reused": "select top 6 by dot(q, k) in layers 0 reused above\n  keep last 0",
}
"""What is said beside `group each`; every one skips tokens in texts of some 40."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 6, "hidden_size": 96}),
    "windowed": ("Mistral", {"sliding_window": 16}),
}
IN_CPP = tuple(name for name in STATEMENTS if name != "count")


@cache
def cache_class(name: str, group: str = "each") -> Any:
    return kvdsl.compile(f'kv 1\npolicy Each {{\n  "x"\n  {STATEMENTS[name]}\n  group {group}\n}}\n')


@cache
def grouped(model: str) -> Any:
    stem, extra = MODELS[model]
    return zoo.make(stem, **extra)


@cache
def repeated(model: str) -> Any:
    """The same model with a KV head for each query head."""
    stem, extra = MODELS[model]
    ours = grouped(model)
    made = zoo.make(stem, **extra, num_key_value_heads=ours.config.num_attention_heads)
    group = ours.config.num_attention_heads // ours.config.num_key_value_heads
    dim = ours.config.hidden_size // ours.config.num_attention_heads
    weights = {
        name: x.unflatten(0, (-1, dim)).repeat_interleave(group, 0).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else x
        for name, x in ours.state_dict().items()
    }
    made.load_state_dict(weights)
    return made


def text(*lengths: int) -> dict[str, torch.Tensor]:
    rows = zoo.prompt(len(lengths), max(lengths), seed=8)
    return zoo.left_padded([row[:length] for row, length in zip(rows, lengths, strict=True)])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "backend"), [*((n, "torch") for n in STATEMENTS), *((n, "cpu") for n in IN_CPP)])
def test_it_is_a_kv_head_for_each_query_head(name: str, backend: str, model: str) -> None:
    """Of rows with padding, which generate, and for which a second prompt comes."""
    ours, theirs = grouped(model), repeated(model)
    inputs = text(40, 29)
    caches = [cache_class(name)(ours, backend=backend), cache_class(name, "mean")(theirs, backend=backend)]
    found = [zoo.greedy(one, inputs, 8, cache=each) for one, each in zip((ours, theirs), caches, strict=True)]
    zoo.assert_same_text(*found)
    more = torch.cat([inputs["input_ids"], found[1][0], zoo.prompt(2, 5, seed=3)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 13, dtype=torch.long)], 1)
    inputs = {"input_ids": more, "attention_mask": mask}
    found = [zoo.greedy(one, inputs, 6, cache=each) for one, each in zip((ours, theirs), caches, strict=True)]
    zoo.assert_same_text(*found)


@pytest.mark.parametrize("name", STATEMENTS)
def test_the_group_would_choose_otherwise(name: str) -> None:
    """Or the comparison above would compare nothing."""
    model, inputs = grouped("llama"), text(40)
    each, mean = (zoo.greedy(model, inputs, 8, cache=cache_class(name, group)(model))[1] for group in ("each", "mean"))
    assert (each - mean).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "backend"), [*((n, "torch") for n in STATEMENTS), *((n, "cpu") for n in IN_CPP)])
def test_one_query_head_a_kv_head_is_every_group_to_the_bit(name: str, backend: str) -> None:
    model, inputs = repeated("llama"), text(40, 29)
    each, mean = (
        zoo.greedy(model, inputs, 8, cache=cache_class(name, group)(model, backend=backend))[1] for group in ("each", "mean")
    )
    assert torch.equal(each, mean)


@pytest.mark.parametrize("name", ["dot", "pages", "reused"])
def test_beams(name: str) -> None:
    ours, theirs = grouped("llama"), repeated("llama")
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    found = [
        one.generate(**text(40, 29), **options, **with_cache(cache_class(name, group)(one))).tolist()
        for one, group in ((ours, "each"), (theirs, "mean"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["dot", "evicts", "reused"])
def test_several_tokens_choose_one_by_one_and_may_be_taken_back(name: str, backend: str) -> None:
    model, ids = grouped("llama"), zoo.prompt(1, 34, seed=4)
    alone, together = (cache_class(name)(model, backend=backend) for _ in range(2))
    together.activate_past_recording()
    with torch.no_grad(), alone.one_by_one(), together.one_by_one():
        one = [model(ids[:, :28], **with_cache(alone)).logits[:, -1:]]
        one += [model(ids[:, at : at + 1], **with_cache(alone)).logits for at in range(28, 34)]
        model(ids[:, :28], **with_cache(together))
        model(zoo.prompt(1, 3, seed=9), **with_cache(together))
        together.crop(28)
        several = model(ids[:, 28:34], **with_cache(together)).logits
    assert (torch.cat(one[1:], 1) - several).abs().max() < 1e-4


def test_a_compiled_step_is_the_same() -> None:
    model, ids = grouped("llama"), zoo.prompt(2, 30, seed=4)
    compiled, found = torch.compile(model, backend="eager"), []
    with torch.no_grad():
        for forward in (model, compiled):
            held = cache_class("evicts")(model)
            model(ids[:, :25], **with_cache(held))
            found.append(torch.cat([forward(ids[:, at : at + 1], **with_cache(held)).logits for at in range(25, 30)], 1))
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_attention_sinks_and_caps_are_those_of_each_query_head() -> None:
    """Learned sinks (gpt-oss) and capped logits (Gemma 2): torch and C++ agree."""
    for family in ("gpt_oss", "gemma2"):
        model, inputs = zoo.model(family), text(40, 29)
        found = [zoo.greedy(model, inputs, 8, cache=cache_class("dot")(model, backend=one)) for one in ("torch", "cpu")]
        zoo.assert_same_text(*found)
