"""Kept sets of kvpress's presses and of kvdsl's policies: layer by layer, head by head, in kvpress's own environment (`make peers`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make peers` tests this in an environment where it is"
)

from transformers import DynamicCache  # noqa: E402

import kvdsl  # noqa: E402
from kvdsl.integrations.kvpress import PolicyPress  # noqa: E402
from tests.integrations.presses import COUNTERPARTS  # noqa: E402
from tests.integrations.test_kvpress import IDS, TOKENS, model, pressed  # noqa: E402, F401

Kept = list[list[list[int]]]
"""By layer and head."""


@pytest.fixture
def values(model: Any) -> list[torch.Tensor]:  # noqa: F811
    """The prompt's values, by which tokens are told: [1, heads, tokens, dim] of each layer."""
    cache = DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return [layer.values for layer in cache.layers]


def kept(model: Any, cache: DynamicCache, values: list[torch.Tensor]) -> Kept:  # noqa: F811
    """The places in the text of what a cache holds; without what kvpress masks in its attention."""
    found: Kept = []
    for layer, whole, block in zip(cache.layers, values, model.model.layers, strict=True):
        masked = getattr(block.self_attn, "masked_key_indices", None)
        free = torch.zeros(layer.values.shape[:3], dtype=torch.bool)
        if masked is not None:
            free[tuple(masked)] = True
        found.append(
            [
                sorted(int((whole[0, head] - value).abs().sum(-1).argmin()) for value in held[~free[0, head]])
                for head, held in enumerate(layer.values[0])
            ]
        )
    return found


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("policy", COUNTERPARTS)
def test_the_same_tokens_stay(model: Any, values: list[torch.Tensor], policy: str, ratio: float) -> None:  # noqa: F811
    counterpart, budget = COUNTERPARTS[policy], int(TOKENS * (1 - ratio))
    model.set_attn_implementation(counterpart.attention)
    theirs = kept(model, pressed(model, counterpart.press(kvpress, ratio)), values)
    settings = {"budget": budget, **counterpart.settings(budget)}
    ours = kept(model, pressed(model, PolicyPress(policy, settings=settings)), values)
    assert ours == theirs
    assert sum(len(head) for layer in ours for head in layer) == budget * sum(map(len, ours))


def test_a_ratio_for_each_layer(model: Any, values: list[torch.Tensor]) -> None:  # noqa: F811
    press = kvpress.PerLayerCompressionPress(kvpress.KnormPress(), [0.25, 0.25, 0.75])
    theirs = kept(model, pressed(model, press), values)
    settings = {"budget": 1, "lower": 0.75, "upper": 0.25}
    assert kept(model, pressed(model, PolicyPress("per_layer", settings=settings)), values) == theirs
    assert [len(layer[0]) for layer in theirs] == [60, 60, 20]


def test_an_interval_of_decoding(model: Any) -> None:  # noqa: F811
    """60 tokens are read one by one behind a prompt of 20, which is the target; both prune at every eighth."""
    token = IDS[:, 20:]
    press = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=8, target_size=20)
    theirs = DynamicCache()
    ours = kvdsl.load("knorm_decoding")(model, budget=20, interval=8)
    with torch.no_grad(), press(model):
        model(IDS[:, :20], past_key_values=theirs)
        for at in range(20, TOKENS):
            model(token[:, at - 20 : at - 19], past_key_values=theirs, position_ids=torch.tensor([[at]]))
    sizes = []
    with torch.no_grad():
        model(IDS[:, :20], past_key_values=ours)
        for at in range(20, TOKENS):
            model(token[:, at - 20 : at - 19], past_key_values=ours)
            sizes.append(int((ours.positions(0)[0, 0] >= 0).sum()))
    kvdsl.load("knorm_decoding").release(model)
    assert max(sizes) == 27 and sizes.count(20) == TOKENS // 8 - 3
    for layer in range(3):
        mine = ours.layers[layer]
        for head in range(4):
            live = ours.positions(layer)[0, head] >= 0
            expected = theirs.layers[layer].values[0, head]
            got = mine.values[0, head][live]
            torch.testing.assert_close(got.sort(0).values, expected.sort(0).values, atol=1e-5, rtol=1e-5)
