"""Budgets that read the data, in a model: what each row and KV head holds, and in how many slots."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.hf.versions import with_cache

LAYERS, HEADS, RECENT = 2, 2, 3
HALF = 'kv 1\npolicy Half {\n  "Half of the text."\n  budget 0.5 * seen at most 16\n  score position\n}\n'
GROWING = HALF.replace(" at most 16", "").replace("Half", "Growing")
SHARP = f"""kv 1

policy Sharp {{
  "Tokens above a threshold, and the most recent."
  given importance
  budget sum(importance >= 0.5 or age < {RECENT} over slots)
  score importance
  keep last {RECENT}
}}
"""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=32, **sizes)).eval()


def tokens(count: int, rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, 61, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(model: LlamaForCausalLM, cache: KVCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of the last of some tokens."""
    with torch.inference_mode():
        return model(ids, **with_cache(cache), attention_mask=mask).logits[:, -1]


def held(cache: KVCache, layer: int, row: int, head: int = 0) -> list[int]:
    found = cache.positions(layer)[row, head]
    return sorted(found[found >= 0].tolist())


def newest(seen: int, budget: int) -> list[int]:
    return list(range(seen - budget, seen))


def made(model: LlamaForCausalLM, text: str, **more: Any) -> KVCache:
    return kvdsl.compile(text)(model, backend="torch", **more)


def test_every_row_has_a_share_of_its_own_text(model: LlamaForCausalLM) -> None:
    """In a padded batch, while decoding, and in the next turn of a chat; never more than the bound."""
    cache, seen = made(model, HALF), torch.tensor([20, 13])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    read(model, cache, tokens(20), mask)
    for step in range(18):
        assert [held(cache, 1, row) for row in (0, 1)] == [newest(n, min(16, n // 2)) for n in seen.tolist()]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        read(model, cache, tokens(1, seed=step), mask)
        seen += 1
    mask = torch.nn.functional.pad(mask, (0, 7), value=1)
    read(model, cache, tokens(7), mask)
    assert [held(cache, 0, row) for row in (0, 1)] == [newest(45, 16), newest(38, 16)]


def test_slots_are_those_of_the_bound(model: LlamaForCausalLM) -> None:
    cache = made(model, HALF)
    read(model, cache, tokens(60))
    assert [layer.state.slots for layer in cache.layers] == [17, 17]
    for step in range(5):
        read(model, cache, tokens(1, seed=step))
    assert [layer.state.slots for layer in cache.layers] == [17, 17]


def test_without_a_bound_slots_grow_with_what_stays(model: LlamaForCausalLM) -> None:
    """And not with the text: of 200 tokens half stay."""
    cache = made(model, GROWING)
    read(model, cache, tokens(100, rows=1))
    for step in range(100):
        read(model, cache, tokens(1, rows=1, seed=step))
    assert held(cache, 0, 0) == newest(200, 100)
    assert all(layer.state.slots <= 100 + 1 + 100 // 4 + 64 for layer in cache.layers)


def test_heads_count_for_themselves(model: LlamaForCausalLM) -> None:
    """What is given decides; a beam takes another row's tokens with it."""
    ids, given = tokens(30), {}

    def importance(module: Any, hidden: Tensor) -> Tensor:
        found = torch.stack([hidden[..., 0] > 0, hidden[..., 1] > 0.3], 1).float()
        given.setdefault(module.layer_idx, []).append(found)
        return found

    cache = made(model, SHARP, importance=importance)
    for part in ids.split([20, *[1] * 10], 1):
        read(model, cache, part)
    cache.reorder_cache(torch.tensor([1, 1]))
    for layer in range(LAYERS):
        told = torch.cat(given[layer], 2)
        for head in range(HEADS):
            stays = [place for place in range(30) if told[1, head, place] or place >= 30 - RECENT]
            assert held(cache, layer, 0, head) == held(cache, layer, 1, head) == stays
    assert len({len(held(cache, 0, 0, head)) for head in range(HEADS)}) == 2


def test_steps_are_taken_back(model: LlamaForCausalLM) -> None:
    """As they were noted; without notes nobody knows what a shorter text would have left."""
    ids, cache, twin = tokens(30), made(model, GROWING), made(model, GROWING)
    cache.activate_past_recording(4)
    for part in ids[:, :26].split([20, *[1] * 6], 1):
        read(model, cache, part)
    cache.crop(-3)
    for part in ids[:, :23].split([20, *[1] * 3], 1):
        read(model, twin, part)
    assert held(cache, 0, 0) == held(twin, 0, 0) == newest(23, 11)
    assert torch.equal(read(model, cache, ids[:, 26:27]), read(model, twin, ids[:, 26:27]))
    whole = made(model, GROWING.replace("0.5 * seen", "live"))
    read(model, whole, ids)
    with pytest.raises(KvdslError):
        whole.crop(-2)


def test_it_can_be_saved(model: LlamaForCausalLM) -> None:
    cache = made(model, HALF)
    read(model, cache, tokens(20))
    again = pickle.loads(pickle.dumps(cache))
    again.attach(model)
    one = tokens(1, seed=9)
    assert torch.equal(read(model, cache, one), read(model, again, one))
    assert held(cache, 0, 1) == held(again, 0, 1) == newest(21, 10)
