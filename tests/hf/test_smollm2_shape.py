"""A model of SmolLM2-135M's shape: 30 layers, 3 KV heads in groups of 3, heads of 64, and chats of several rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf import policies, zoo

pytestmark = pytest.mark.nightly

LENGTHS = (75, 66, 70)


@cache
def model() -> Any:
    """Only what attention does not see is smaller: the feed-forward layers and the vocabulary."""
    return zoo.make(
        "Llama", num_hidden_layers=30, hidden_size=576, intermediate_size=64, num_attention_heads=9, num_key_value_heads=3,
        initializer_range=0.06,
    )  # fmt: skip


def chat(cache: Any, turns: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """The rows' answers of every turn and their logits: [rows, turns * 4], [rows, turns * 4, vocabulary]."""
    inputs: dict[str, Tensor] = {}
    said, logits = [], []
    for rows in turns:
        more = zoo.left_padded(rows)
        inputs = {name: torch.cat([inputs[name], more[name]], 1) if inputs else more[name] for name in more}
        answers, scores = zoo.greedy(model(), inputs, 4, cache=cache)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answers], 1)
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(answers)], 1)
        said.append(answers)
        logits.append(scores)
    return torch.cat(said, 1), torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("policy", "budget", "backend"),
    [
        ("roco", 20, "cpu"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ("h2o", 0.5, "cpu"), ("streaming_llm", 16, "cpu"), ("snapkv", 0.5, "cpu"), ("roco", 20, "torch"), ("snapkv", 0.5, "torch"),
        )),
    ],
)  # fmt: skip
def test_left_padded_chats_answer_as_alone(policy: str, budget: float, backend: str) -> None:
    first = [zoo.prompt(1, length, seed=row)[0] for row, length in enumerate(LENGTHS)]
    second = [zoo.prompt(1, length, seed=10 + row)[0] for row, length in enumerate((9, 14, 5))]
    together, logits = chat(policies.make(policy, model(), budget=budget, backend=backend), [first, second])
    for row in range(len(LENGTHS)):
        alone, wanted = chat(policies.make(policy, model(), budget=budget, backend=backend), [[first[row]], [second[row]]])
        assert torch.equal(together[row], alone[0])
        assert (logits[row] - wanted[0]).abs().max() < 1e-3 * wanted.abs().max()


def test_the_full_cache_is_transformers_own() -> None:
    inputs = zoo.left_padded([zoo.prompt(1, length, seed=row)[0] for row, length in enumerate(LENGTHS)])
    ours = zoo.greedy(model(), inputs, 6, cache=policies.make("full", model()))
    zoo.assert_same_text(ours, zoo.greedy(model(), inputs, 6))
