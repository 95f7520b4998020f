"""Under a budget that does not hold everything: the bound holds, and a row of a batch gets what it gets alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from tests.hf import policies, zoo
from tests.quick import few

BUDGET = 12


def kept(cache: Any, row: int) -> list[list[list[int]]]:
    """Sorted text positions of one row, per managed layer and KV head."""
    return [[sorted(int(p) for p in head if p >= 0) for head in cache.positions(layer)[row]] for layer in cache.managed]


def run(family: str, policy: str, inputs: dict[str, Tensor], new: int = 15) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A cache after generating, and the text."""
    model = zoo.model(family)
    cache = policies.make(policy, model, budget=BUDGET)
    return cache, zoo.greedy(model, inputs, new, cache=cache)


@pytest.mark.parametrize("policy", few(policies.EVICTING, "h2o", "streaming_llm", "roco"))
@pytest.mark.parametrize("length", [5, 30])
def test_budget_bounds_every_head(policy: str, length: int) -> None:
    cache, _ = run("llama", policy, zoo.plain(zoo.prompt(2, length)), new=30)
    for layer in cache.managed:
        positions = cache.positions(layer)
        live = (positions >= 0).sum(-1)
        assert (live == BUDGET).all()
        assert positions.shape[-1] <= BUDGET + 1
        assert int(positions.max()) < length + 29
        for row in range(2):
            for head in positions[row]:
                assert len(set(head[head >= 0].tolist())) == BUDGET, "a token twice"


@pytest.mark.parametrize("policy", few(policies.EVICTING, "h2o", "streaming_llm", "roco"))
@pytest.mark.parametrize("family", few(["llama", "mistral-windowed", "gemma2", "gpt_neox"], "gemma2"))
def test_padded_row_gets_what_it_gets_alone(family: str, policy: str) -> None:
    rows = zoo.prompt(3, 31, seed=5)
    texts = [rows[0], rows[1, :18], rows[2, :7]]
    together, (tokens, logits) = run(family, policy, zoo.left_padded(texts))
    for row, text in enumerate(texts):
        alone, theirs = run(family, policy, zoo.plain(text[None]))
        zoo.assert_same_text((tokens[row, None], logits[row, None]), theirs)
        assert kept(together, row) == kept(alone, 0)


def test_eviction_changes_the_text() -> None:
    """Otherwise the comparisons above would compare nothing."""
    inputs = zoo.plain(zoo.prompt(1, 40))
    full = zoo.greedy(zoo.untouched("llama"), inputs, 15)
    _, evicted = run("llama", policies.OBSERVING, inputs)
    assert (full[1][:, -1] - evicted[1][:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize(("budget", "held"), [(1.0, 40), (1, 1), (np.float32(1), 40), (np.int64(1), 1), (2.0, 2), (0.5, 20)])
def test_a_float_up_to_one_is_a_rate(budget: float, held: int) -> None:
    model = zoo.model("llama")
    cache = policies.make("tova", model, budget=budget)
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 40)), 5, cache=cache)
    assert (cache.positions(0) >= 0).sum(-1).tolist() == [[held, held]]
    assert ("budget=1.0" in repr(cache)) == (held == 40)


@pytest.mark.parametrize(("ratio", "held"), [(1, 40), (1.0, 40), (np.int64(1), 40), (0.5, 20), (0.001, 1)])
def test_a_ratio_is_always_a_rate(ratio: float, held: int) -> None:
    model = zoo.model("llama")
    cache = policies.make("tova", model, ratio=ratio)
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 40)), 5, cache=cache)
    assert (cache.positions(0) >= 0).sum(-1).tolist() == [[held, held]]


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, 2, float("nan"), True, "0.5"])
def test_what_is_no_ratio(ratio: Any) -> None:
    with pytest.raises(KvdslError, match=r"`ratio` of TOVA is .*; use a ratio of the prompt above 0 and up to 1"):
        policies.make("tova", zoo.model("llama"), ratio=ratio)


def test_a_budget_is_given_once() -> None:
    model = zoo.model("llama")
    with pytest.raises(KvdslError, match="`budget` and `ratio` of TOVA are both given"):
        policies.make("tova", model, budget=512, ratio=0.5)
    with pytest.raises(TypeError, match="ratio"):
        policies.make("full", model, ratio=0.5)
    assert "budget=512" in repr(policies.make("tova", model)) and "budget=0.5" in repr(
        policies.make("tova", model, ratio=0.5)
    )
    own = repr(policies.make("compression_ratio_decoding", model, ratio=1))
    assert "ratio=1" in own and "budget" not in own


def test_a_large_budget_is_written_out() -> None:
    assert "(budget=1234567)" in repr(policies.make("tova", zoo.model("llama"), budget=1_234_567))


def test_windowed_model_attends_within_its_window_only() -> None:
    """Mistral's window is 8, the budget holds everything: the text is the native cache's, whatever the slots still hold."""
    model, inputs = zoo.model("mistral-windowed"), zoo.plain(zoo.prompt(1, 30))
    cache = policies.make(policies.OBSERVING, model, budget=100)
    ours = zoo.greedy(model, inputs, 12, cache=cache)
    zoo.assert_same_text(ours, zoo.greedy(zoo.untouched("mistral-windowed"), inputs, 12))
    assert cache.managed == [0, 1]
    bounded = policies.make(policies.OBSERVING, model, budget=10)
    zoo.greedy(model, inputs, 12, cache=bounded)
    assert int((bounded.positions(0) >= 0).sum(-1).max()) == 10


def test_hybrid_model_keeps_its_own_sliding_layers() -> None:
    cache, _ = run("gemma2", policies.OBSERVING, zoo.plain(zoo.prompt(1, 30)))
    assert cache.managed == [1]
    assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
    assert cache.positions(1).shape[-1] <= BUDGET + 1


def test_state_columns_belong_to_the_kept_slots() -> None:
    cache, _ = run("llama", policies.OBSERVING, zoo.plain(zoo.prompt(2, 30)))
    columns = cache.state(0)
    assert columns, "the policy observes attention"
    for column in columns.values():
        assert column.shape == cache.positions(0).shape
        assert column.dtype == torch.float32
        assert torch.isfinite(column[cache.positions(0) >= 0]).all()
    next(iter(columns.values())).fill_(7)
    assert not (next(iter(cache.state(0).values())) == 7).all(), "state() must hand out copies"
