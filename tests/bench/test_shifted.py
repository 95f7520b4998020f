"""Shift and append in a model: it keeps what it says, and in-place updates generate the same tokens (EQUIP, theorem 1 and figure 18)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvdsl.assets import load_reference_model
from kvdsl.bench.shifted import ShiftAndAppend
from kvdsl.eval.models import encode, page
from kvdsl.runtime.errors import KvdslError
from tests.hf import policies, zoo

RULES: dict[str, dict[str, int]] = {
    "equip_streaming": {"sinks": 4},
    "equip_h2o": {"recent": 48},
    "paged": {"recent": 48},
}
"""What a policy and its shifted cache are told, beside the budget."""

CLEAR = 1e-4
"""Logits that differ by less are as good as equal: either token may follow."""


@dataclass
class Follow(LogitsProcessor):  # type: ignore[misc]
    """Has `generate` say given tokens, int64 [rows, any], whatever it would say, which is noted: [rows, vocabulary] a step."""

    tokens: Tensor
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = self.tokens[:, len(self.logits)]
        self.logits.append(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted[:, None], 0.0)


def divergences(model: Any, other: Any, ids: Tensor, steps: int, ours: Any, theirs: ShiftAndAppend) -> list[str]:
    """Where one cache generates a token that the other, given the same text so far, clearly would not."""
    options = {"max_new_tokens": steps, "do_sample": False, "use_cache": True}
    said = model.generate(ids, **options, past_key_values=ours)[:, ids.shape[1] :]
    follow = Follow(said)
    with theirs:
        other.generate(ids, **options, past_key_values=theirs, logits_processor=[follow])
    assert len(follow.logits) == steps
    found = []
    for step, logits in enumerate(follow.logits):
        best, second = logits.topk(2, -1).values.unbind(-1)
        other_token = (logits.argmax(-1) != said[:, step]) & (best - second > CLEAR)
        found += [
            f"row {row}, step {step}: {float((best - second)[row]):.1e}" for row in other_token.nonzero()[:, 0].tolist()
        ]
    return found


@cache
def reference() -> tuple[Any, Any, Any]:
    """The model for our caches, and for theirs, which no cache of ours ever changed; the tokenizer."""
    model, tokenizer = load_reference_model()
    return model, load_reference_model()[0], tokenizer


def text(tokens: int) -> Tensor:
    """Two stretches of the book, [2, tokens]."""
    return torch.tensor([encode(reference()[2], page(number))[:tokens] for number in (3, 7)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("policy", RULES)
def test_in_place_says_what_shift_and_append_says_for_500_steps(policy: str, backend: str) -> None:
    model, other, _ = reference()
    ours = policies.make(policy, model, budget=128, backend=backend, **RULES[policy])
    theirs = ShiftAndAppend(other, budget=128, **RULES[policy])
    assert divergences(model, other, text(200), 500, ours, theirs) == []


@pytest.mark.parametrize("policy", ["equip_streaming", "equip_h2o"])
def test_in_place_says_what_shift_and_append_says(policy: str) -> None:
    """Grouped heads, and a model whose attention is far from uniform."""
    model, other = (zoo.make("Llama") for _ in range(2))
    rule = {"sinks": 2} if policy == "equip_streaming" else {"recent": 5}
    ours = policies.make(policy, model, budget=12, backend="torch", **rule)
    assert divergences(model, other, zoo.prompt(2, 30), 40, ours, ShiftAndAppend(other, budget=12, **rule)) == []


def test_another_rule_is_noticed() -> None:
    """The comparison can fail: with other tokens kept, other tokens come."""
    model, other = (zoo.make("Llama") for _ in range(2))
    ours = policies.make("equip_streaming", model, budget=12, sinks=2, backend="torch")
    assert divergences(model, other, zoo.prompt(2, 30), 40, ours, ShiftAndAppend(other, budget=12, sinks=4))


def test_it_is_the_model_itself_while_nothing_leaves() -> None:
    model = zoo.make("Llama")
    ids, options = zoo.prompt(2, 9), {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    before = model.config._attn_implementation
    with ShiftAndAppend(model, budget=64, sinks=4) as cache:
        assert torch.equal(model.generate(ids, **options, past_key_values=cache), expected)
    assert model.config._attn_implementation == before
    assert torch.equal(model.generate(ids, **options), expected), "hooks should be gone"


def test_what_it_takes() -> None:
    with pytest.raises(KvdslError, match="either `sinks`"):
        ShiftAndAppend(zoo.make("Llama"), budget=8)
    with pytest.raises(KvdslError, match="not laid out as Llama is"):
        ShiftAndAppend(zoo.model("gpt2"), budget=8, sinks=2)
