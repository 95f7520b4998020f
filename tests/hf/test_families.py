"""A budget that holds everything changes nothing, on any family, under any policy, with and without padding.

What a policy keeps does not depend on the family: each is tried on two of them, and each family under a policy that reads attention.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from tests.hf import policies, zoo
from tests.quick import few

LENGTH, NEW = 19, 10

CASES = [(family, policy) for family in ("llama", "mistral-windowed") for policy in policies.NAMES]
CASES += [
    (family, policy) for family in zoo.PROMISED for policy in ("h2o", "streaming_llm") if (family, policy) not in CASES
]
CASES += [(family, policies.OBSERVING) for family in zoo.FAMILIES if family not in zoo.PROMISED]
GATE = [(family, policy) for family in ("llama", "gemma2", "gpt_neox") for policy in ("h2o", "streaming_llm")]


def inputs(batch: int) -> dict[str, Tensor]:
    """One row, or two of which the second is left-padded."""
    rows = zoo.prompt(2, LENGTH)
    return zoo.plain(rows[:1]) if batch == 1 else zoo.left_padded([rows[0], rows[1, :11]])


@cache
def expected(family: str, batch: int) -> tuple[Tensor, Tensor]:
    """What a model that never met kvdsl says, with transformers' own DynamicCache."""
    return zoo.greedy(zoo.untouched(family), inputs(batch), NEW)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("family", "policy"), few(CASES, *GATE))
def test_budget_that_holds_everything_is_the_dynamic_cache(family: str, policy: str, batch: int) -> None:
    model = zoo.model(family)
    cache = policies.make(policy, model, budget=64)
    zoo.assert_same_text(zoo.greedy(model, inputs(batch), NEW, cache=cache), expected(family, batch))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("stem", few(["Gemma3", "Llava", "Qwen2VL"], "Gemma3"))
def test_text_of_multimodal_models(stem: str, batch: int) -> None:
    """Only the part that generates text is bound; the rest keeps its attention."""
    model, other = zoo.multimodal(stem), zoo.multimodal(stem)
    other.set_attn_implementation("eager")
    own = model.config._attn_implementation
    cache = policies.make(policies.OBSERVING, model, budget=64)
    zoo.assert_same_text(zoo.greedy(model, inputs(batch), NEW, cache=cache), zoo.greedy(other, inputs(batch), NEW))
    assert model.config._attn_implementation == own
    type(cache).release(model)
    assert model.config.get_text_config()._attn_implementation == own
