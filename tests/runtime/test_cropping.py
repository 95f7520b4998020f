"""What `crop` is asked for: more than there is, nothing, and what is no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import policies, zoo
from tests.quick import few

TOKENS = 24
POLICIES: dict[str, dict[str, float]] = {
    "full": {},
    "quest": {"tokens": 16},
    "window": {"budget": 60},
    "h2o": {"budget": 12},
}


@pytest.fixture(params=few(POLICIES, "quest", "h2o"))
def filled(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    """A cache of 20 tokens of a prompt and four more, all of them noted where the policy evicts, and the text."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 40)
    cache = policies.cache_class(request.param)(model, **POLICIES[request.param])
    if request.param == "h2o":
        cache.activate_past_recording(30)
    for part in ids[:, :TOKENS].split([20, 1, 1, 1, 1], 1):
        model(part, **with_cache(cache))
    return cache, ids


def goes_on(cache: Any, ids: Tensor) -> None:
    """The cache is as if nothing had been asked of it."""
    model = zoo.model("llama")
    assert cache.get_seq_length() == TOKENS and all(layer.length == TOKENS for layer in cache.layers)
    fresh = type(cache)(model, **POLICIES[type(cache).__name__.removesuffix("Cache").lower()])
    for part in ids[:, :TOKENS].split([20, 1, 1, 1, 1], 1):
        model(part, **with_cache(fresh))
    further = ids[:, TOKENS : TOKENS + 1]
    assert torch.equal(model(further, **with_cache(cache)).logits, model(further, **with_cache(fresh)).logits)


@pytest.mark.parametrize("tokens", [-25, -30, -(10**12)])
def test_more_than_there_is(filled: tuple[Any, Tensor], tokens: int) -> None:
    """The length would be negative, and positions with it."""
    with pytest.raises(KvdslError, match=rf"remove {-tokens} tokens, but the cache has 24.*reset\(\)"):
        filled[0].crop(tokens)
    goes_on(*filled)


@pytest.mark.parametrize("tokens", [0, 24, 30, torch.tensor(0)])
def test_nothing(filled: tuple[Any, Tensor], tokens: Any) -> None:
    filled[0].crop(tokens)
    goes_on(*filled)


def test_everything(filled: tuple[Any, Tensor]) -> None:
    with pytest.raises(KvdslError, match=r"reset\(\)"):
        filled[0].crop(-24)
    goes_on(*filled)


@pytest.mark.parametrize("tokens", [2.0, -2.5, True, "3", None, torch.tensor(-2.0), float("nan")])
def test_what_is_no_whole_number(filled: tuple[Any, Tensor], tokens: Any) -> None:
    with pytest.raises(KvdslError, match="takes a whole number"):
        filled[0].crop(tokens)
    goes_on(*filled)


def test_numbers_of_other_kinds(filled: tuple[Any, Tensor]) -> None:
    """As transformers' own layers take them."""
    filled[0].crop(torch.tensor(-2))
    filled[0].crop(torch.tensor(21))
    assert filled[0].get_seq_length() == 21


def test_a_layer_alone(filled: tuple[Any, Tensor]) -> None:
    with pytest.raises(KvdslError, match="the cache has 24"):
        filled[0].layers[0].crop(-30)
    goes_on(*filled)


def test_an_empty_cache() -> None:
    cache = policies.cache_class("full")(zoo.model("llama"))
    cache.crop(0)
    with pytest.raises(KvdslError, match="the cache has 0"):
        cache.crop(-1)
