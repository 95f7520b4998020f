"""E1 (docs/records/underflow.md) on the reference model in fp16: tokens whose squares vanish there have a deviation here, the smallest."""

from __future__ import annotations

import pytest
import torch

from kvdsl.generation.text import read_text
from kvdsl.policies import RoCoCache
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.assets import load_reference_model, reference_model_path

pytestmark = pytest.mark.nightly

TOKENS = 700
VANISHES = 2.0**-25
"""What is not larger than half of fp16's smallest number is 0 in it."""


@pytest.mark.skipif(not (reference_model_path() / "model.safetensors").exists(), reason="needs the reference model")
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_squares_that_fp16_loses(backend: str) -> None:
    model, tokenizer = load_reference_model(torch.float16)
    ids = tokenizer(read_text(None)[20_000:26_000], return_tensors="pt")["input_ids"][:, :TOKENS]
    cache = RoCoCache(model, budget=TOKENS - 50, backend=backend)
    with torch.no_grad():
        model(ids[:, :-4], **with_cache(cache))
        for token in ids[0, -4:]:
            model(token.reshape(1, 1), **with_cache(cache))
    lost = 0
    for layer in range(model.config.num_hidden_layers):
        live = cache.positions(layer) >= 0
        count = (TOKENS - cache.positions(layer))[live]
        state = cache.state(layer)
        total, squares = state["sum_attn"][live], state["sum_attn_squared"][live]
        deviation = (squares / count - (total / count) ** 2).clamp(min=0).sqrt()
        assert not deviation.isnan().any()
        gone = squares <= VANISHES  # so every single square is, and in fp16 their sum is 0
        assert (squares[gone] > 0).all()
        assert (deviation[gone] < deviation.median()).all()  # not what RoCo protects
        lost += int(gone.sum())
    assert lost > 0
