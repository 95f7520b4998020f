"""Text, times and sizes of a generation."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import kvdsl
from kvdsl.generation import generate
from kvdsl.generation.models import windows
from kvdsl.generation.report import same_prefix, shared_words, size

PROMPT = list(range(40, 100))


def roco(model, budget):
    return kvdsl.load("roco")(model, budget=budget, backend="torch")


def test_the_full_cache_gives_what_transformers_gives(model, tokenizer):
    found = generate.generate_full(model, tokenizer, PROMPT, 12)
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    assert list(found.tokens) == wanted.tolist()
    assert found.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert found.prompt_tokens == len(PROMPT) and len(found.token_ms) == 11
    tokens = len(PROMPT) + 11  # the last one is never fed
    assert found.cache_bytes == found.full_cache_bytes == 2 * 2 * 2 * tokens * 8 * 4


def test_a_large_budget_changes_no_token_and_counts_the_same_full_cache(model, tokenizer):
    full = generate.generate_full(model, tokenizer, PROMPT, 12)
    found = generate.generate(model, tokenizer, PROMPT, 12, roco(model, 200))
    assert found.tokens == full.tokens
    assert found.full_cache_bytes == full.cache_bytes


def test_layers_that_keep_no_tokens_count_in_both() -> None:
    """As those of linear attention: their states lie in dicts."""
    layer = SimpleNamespace(states={"conv": torch.zeros(3), "recurrent": torch.zeros(5)}, keys=torch.zeros(2))
    cache = SimpleNamespace(layers=[layer])
    assert generate.cache_bytes(cache) == generate.full_cache_bytes(cache) == 40


def test_a_small_budget_holds_less(model, tokenizer):
    found = generate.generate(model, tokenizer, PROMPT, 12, roco(model, 16))
    assert found.cache_bytes < found.full_cache_bytes / 2


def test_warm_up_leaves_no_trace(model, tokenizer):
    cache = roco(model, 16)
    cold = generate.generate(model, tokenizer, PROMPT, 8, roco(model, 16))
    generate.warm_up(model, tokenizer, PROMPT[:10], cache)
    assert generate.generate(model, tokenizer, PROMPT, 8, cache).tokens == cold.tokens


def test_one_token_has_no_rate(model, tokenizer):
    found = generate.generate_full(model, tokenizer, PROMPT, 1)
    assert math.isnan(found.tpot_ms)
    assert found.times()["tpot_ms"] is None and found.times()["ttft_ms"] > 0


@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_greedy_rows_are_what_each_row_gives_alone(model, tokenizer, chunk):
    ids = windows(tokenizer, "It was a dark and stormy night. " * 40, 33, 3)
    found = generate.greedy(model, ids, 9, DynamicCache(config=model.config), chunk)
    for row, wanted in zip(ids, found, strict=True):
        alone = generate.generate_full(model, tokenizer, row.tolist(), 9)
        assert list(alone.tokens) == wanted.tolist()


def test_same_prefix():
    assert same_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert same_prefix([1, 2], [1, 2, 3]) == 2
    assert same_prefix([], [1]) == 0


def test_words_in_common():
    assert shared_words("a b c", "a b c") == 1
    assert shared_words("a b", "c d") == 0
    assert shared_words("a a b", "a b b") == pytest.approx(2 / 3)


def test_sizes_in_words():
    assert [size(count) for count in (12, 2048, 3 * 2**20, 5 * 2**30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
