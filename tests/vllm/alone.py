"""What a text gets in transformers, by itself: the measure of what it gets in an engine, beside others."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import kvdsl
from kvdsl.assets import load_reference_model
from kvdsl.runtime.hf.layer import SlotLayer
from kvdsl.runtime.hf.versions import with_cache

BUDGET, NEW = 48, 24

NEAR = 2e-5
"""Of log-probabilities: float32 in two orders of summation."""

PARAMS: dict[str, dict[str, int]] = {
    "full": {},
    "quest": {"tokens": 64},
    "sparcas": {"tokens": 48, "dims": 6},
    "roco_sparcas": {"budget": 96, "tokens": 40, "dims": 6},
    "roco_easykv": {"generated": 12},
    "h2o_answer": {"budget": 12},
    "keydiff_answer": {"budget": 12},
    "lazy_answer": {"budget": 12, "window": 4},
    "rkv_answer": {"budget": 12, "buffer": 4, "window": 4},
    "random_answer": {"budget": 12},
    "recent_answer": {"budget": 12},
}
"""Of the policies of which not only the budget is given."""


def params(policy: str) -> dict[str, int]:
    return PARAMS.get(policy, {"budget": BUDGET})


@cache
def reference() -> tuple[Any, Any]:
    return load_reference_model()


def alone(
    policy: str, prompt: list[int], tokens: list[int], model: Any = None, kv_dtype: str = "model"
) -> tuple[list[float], dict[int, torch.Tensor]]:
    """Log-probabilities of a text's new tokens in transformers, and what each layer of the policy holds at the end: [kv_heads, slots]."""
    model = model or reference()[0]
    made = kvdsl.load(policy)(model, **params(policy), kv_dtype=kv_dtype)
    found = []
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **with_cache(made)).logits[0, -1]
        for token in tokens:
            found.append(float(logits.log_softmax(-1)[token]))
            if len(found) < len(tokens):
                logits = model(torch.tensor([[token]]), **with_cache(made)).logits[0, -1]
    served = [index for index, layer in enumerate(made.layers) if isinstance(layer, SlotLayer)]
    return found, {index: made.positions(index)[0] for index in served}
