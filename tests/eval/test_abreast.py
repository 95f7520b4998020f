"""Caches that are fed in one forward: each is what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval.abreast import Abreast, abreast, feed

POLICIES = ("full", "streaming_llm", "h2o", "roco", "tova", "quest", "snapkv")
BUDGET = 34
PROMPT, LATER = 40, 8


def caches(model: Any, backend: str) -> list[Any]:
    classes: list[Any] = [load(name) for name in POLICIES]
    return [cls(model, backend=backend, **({"budget": BUDGET} if "budget" in cls.spec.params else {})) for cls in classes]


def texts(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 250, (rows, tokens), generator=torch.Generator().manual_seed(3))


def walk(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt and then token by token, [rows, forwards, vocabulary]."""
    with torch.inference_mode():
        parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
        return torch.stack([model(input_ids=part, **with_cache(cache)).logits[:, -1] for part in parts], dim=1)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers take one row of a batch at a time. How torch rounds a row's products depends on how many rows there are: on a CPU
    with AVX2 alone transformers' own cache, in a batch of 14 and of 2, gives logits that differ by 5e-5."""
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *given: torch.cat([linear(row, *given) for row in x.split(1)]))


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_each_is_what_it_would_be_alone(model: Any, backend: str) -> None:
    rows = 2
    ids = texts(rows * len(POLICIES), PROMPT + LATER)
    together = caches(model, backend)
    found = walk(model, Abreast(together, rows), ids)
    for cache, alone, own, text in zip(together, caches(model, backend), found.split(rows), ids.split(rows), strict=True):
        assert torch.equal(own, walk(model, alone, text))
        for layer in alone.managed:
            assert torch.equal(cache.positions(layer), alone.positions(layer))


def test_one_that_cannot_stand_there_is_fed_by_itself(model: Any) -> None:
    cls: Any = load("h2o")
    pair = [cls(model, budget=BUDGET), DynamicCache(config=model.config)]
    ids = texts(2, PROMPT)
    assert [count for _, count in abreast(pair)] == [1, 1]
    found = feed(model, pair, ids)
    with torch.inference_mode():
        torch.testing.assert_close(found, model(input_ids=ids).logits[:, -1], atol=2e-5, rtol=1e-5)
    with pytest.raises(KvdslError, match="DynamicCache cannot be fed with others"):
        Abreast(pair)


def test_unequal_lengths_are_refused(model: Any) -> None:
    cls: Any = load("h2o")
    pair = [cls(model, budget=BUDGET), cls(model, budget=BUDGET)]
    feed(model, pair[:1], texts(1, PROMPT))
    with pytest.raises(KvdslError, match="texts of 0, 40 tokens"):
        Abreast(pair)
