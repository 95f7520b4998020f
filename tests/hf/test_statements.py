"""Policies that do more than evict token by token, in a model of four layers: who shares, selects, grows, turns and agrees."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import policies, zoo
from tests.hf.test_eviction import kept
from tests.quick import thinned

NEW: dict[str, dict[str, float]] = {
    "knorm": {"budget": 20},
    "lazy_streaming": {"budget": 20, "sinks": 2, "R": 5, "sigma": 3, "delta": 2},
    "equip_streaming": {"budget": 20},
    "equip_h2o": {"budget": 20, "recent": 5},
    "scissorhands_window": {"budget": 20, "history": 8},
    "vatp_scissorhands": {"budget": 20, "sinks": 3, "history": 8},
    "vatp_code": {"budget": 20, "sinks": 3, "history": 8},
    "vatp_roco": {"budget": 20, "sinks": 3},
    "roco_easykv": {"generated": 6},
    "h2o_answer": {"budget": 6},
    "random_answer": {"budget": 6},
    "recent_answer": {"budget": 6},
    "snapkv": {"budget": 34},
    "adakv": {"budget": 34},
    "cake": {"budget": 20, "window": 6},
    "lava": {"budget": 20, "window": 6},
    "pyramidkv": {"budget": 640},  # of which the last layer gets 32
    "sparcas": {"tokens": 9, "dims": 4},
    "quest": {"tokens": 32},
    "token_select": {"tokens": 9, "sinks": 2, "recent": 3},
    "expected_attention": {"budget": 34, "sinks": 2, "horizon": 16},
    "capkv": {"budget": 34, "sinks": 2},
    "lazy_eviction": {"budget": 20, "window": 4, "alpha": 0.05},
    "gkv": {"budget": 20, "window": 4, "buffer": 2},
    "tidaldecode": {"tokens": 9, "start": 1, "again": 2},
    "less_is_more": {"tokens": 9, "start": 1, "again": 2},
    "omnikv": {"share": 0.1, "first": 1, "second": 2},
    "roco_sparcas": {"budget": 20, "protect": 4, "tokens": 9, "dims": 4},
}
"""Params that make every one of them decide something in texts of some 60 tokens."""


@cache
def model() -> Any:
    return zoo.make("Llama", num_hidden_layers=4)


def make(name: str, **options: Any) -> Any:
    return policies.cache_class(name)(model(), **{**NEW[name], **options})


def text(*lengths: int) -> dict[str, torch.Tensor]:
    rows = zoo.prompt(len(lengths), max(lengths), seed=8)
    return zoo.left_padded([row[:length] for row, length in zip(rows, lengths, strict=True)])


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned(NEW, 8))
def test_padded_row_gets_what_it_gets_alone(name: str) -> None:
    together = make(name)
    tokens, logits = zoo.greedy(model(), text(66, 50, 37), 12, cache=together)
    for row, length in enumerate((66, 50, 37)):
        alone = make(name)
        one = {key: value[row, None, -length:] for key, value in text(66, 50, 37).items()}
        theirs = zoo.greedy(model(), one, 12, cache=alone)
        zoo.assert_same_text((tokens[row, None], logits[row, None]), theirs)
        assert kept(together, row) == kept(alone, 0)


@pytest.mark.parametrize("name", thinned(NEW, 8))
def test_rows_move_with_all_that_is_known_of_them(name: str) -> None:
    ids = text(50, 50)["input_ids"]
    cache, swapped = make(name), make(name)
    with torch.no_grad():
        for each in (cache, swapped):
            model()(ids[:, :40], **with_cache(each))
        swapped.reorder_cache(torch.tensor([1, 0]))
        for at in range(40, 50):
            ours = model()(ids[[1, 0], at : at + 1], **with_cache(swapped)).logits
            theirs = model()(ids[:, at : at + 1], **with_cache(cache)).logits
            assert (ours[[1, 0]] - theirs).abs().max() < 1e-5


# -- one by one --------------------------------------------------------------------------------------------------------


def test_history_is_shown_query_by_query() -> None:
    """What a query gave stands in its place; the last one's probabilities add up to 1 over the slots of the text."""
    cache = make("scissorhands_window", budget=100)
    with torch.no_grad():
        model()(text(30)["input_ids"], **with_cache(cache))
    ring = cache.state(0)["attn_ring"]
    assert ring.shape == (*cache.positions(0).shape, 8)
    assert torch.allclose(ring[..., 29 % 8].sum(-1), torch.ones(1, 2))
    assert torch.allclose(ring[..., 25 % 8][cache.positions(0) <= 25].view(1, 2, -1).sum(-1), torch.ones(1, 2))


# -- agreement ---------------------------------------------------------------------------------------------------------

BLOCKS = "param budget = 12\nscore sum(attn)\nprefill blocks of 8"


def custom(body: str, **options: Any) -> Any:
    return kvdsl.compile(f'kv 1\npolicy Custom {{\n"a test"\n{body}\n}}\n')(model(), **options)


@pytest.mark.parametrize("who", ["heads", "layers"])
def test_who_agrees_keeps_the_same(who: str) -> None:
    cache = custom(f"param budget = 12\nscore sum(attn)\nvictims shared by {who}")
    zoo.greedy(model(), text(40, 25), 10, cache=cache)
    for row in range(2):
        layers = kept(cache, row)
        assert all(head == layer[0] for layer in layers for head in layer)
        assert all(len(layer[0]) == 12 for layer in layers)
        assert (who == "layers") == all(layer == layers[0] for layer in layers)


def test_layers_agree_after_a_later_prompt_as_well() -> None:
    cache = custom("param budget = 12\nscore sum(attn)\nvictims shared by layers")
    ids = text(40)["input_ids"]
    with torch.no_grad():
        model()(ids[:, :30], **with_cache(cache))
        model()(ids[:, 30:31], **with_cache(copy.deepcopy(cache)))
        model()(ids[:, 30:31], **with_cache(cache))
        model()(ids[:, 31:38], **with_cache(cache))
        model()(ids[:, 38:39], **with_cache(cache))
    layers = kept(cache, 0)
    assert all(head == layers[0][0] for layer in layers for head in layer)
    assert len(layers[0][0]) == 12


@pytest.mark.parametrize(
    "body", ["victims shared by heads", "victims shared by layers", "when prefill\nbudget budget across heads",
             "when prefill\nbudget budget across layers by max(mean(sum(attn) over slots) over heads)",
             "victims shared by heads\nselect top 4 by sum(dot(q, k) over heads)"],
)  # fmt: skip
def test_heads_of_other_processes_cannot_agree(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    custom(f"param budget = 12\nscore sum(attn)\n{body}")
    monkeypatch.setattr(model(), "_tp_size", 2)
    with pytest.raises(KvdslError, match="tensor parallelism spreads them over 2 processes"):
        custom(f"param budget = 12\nscore sum(attn)\n{body}")


def test_blocks_do_not_depend_on_how_the_prompt_is_cut() -> None:
    inputs, caches = text(62, 45), [custom(BLOCKS) for _ in range(2)]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole = model()(ids, attention_mask=mask, **with_cache(caches[0])).logits[:, -1]
        for end in (10, 20, 41, 62):
            seen = caches[1].get_seq_length()
            parts = model()(ids[:, seen:end], attention_mask=mask[:, :end], **with_cache(caches[1])).logits[:, -1]
        assert torch.allclose(parts, whole, atol=1e-4)
        for _ in range(8):  # what the last block leaves goes with the first of them
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            token = whole.argmax(-1, keepdim=True)
            whole, parts = (model()(token, attention_mask=mask, **with_cache(cache)).logits[:, -1] for cache in caches)
            assert torch.allclose(parts, whole, atol=1e-4)
    assert [kept(caches[0], row) for row in range(2)] == [kept(caches[1], row) for row in range(2)]
