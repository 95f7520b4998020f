"""Nothing is read that nobody wrote: free slots and all that kernels work in hold NaN, and steps are what they are on torch."""

from __future__ import annotations

import pytest
import torch

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState
from tests.differential.traces import OUT_TOLERANCE
from tests.quick import few

POLICIES = few(
    ["h2o", "roco", "tova", "scissorhands", "scissorhands_window", "streaming_llm", "window", "knorm", "vatp_h2o", "a2sf", "equip_h2o",
     "sparcas", "quest", "roco_sparcas", "adakv"],
    "roco",
)  # fmt: skip
BUDGET, PROMPT, PAD, STEPS = 40, 35, 9, 9
"""The cache has more slots than tokens at first; it is full, and evicts, before the last step."""

HEADS, GROUP, DIM = 2, 2, 16


def states(policy: str) -> tuple[SlotState, SlotState]:
    """One for Triton, with all slots that it will ever have, and one for torch."""
    spec = kvdsl.load(policy).spec
    given = {"budget": float(BUDGET)} if "budget" in spec.params else {"tokens": 16.0} if policy == "sparcas" else {}
    ours, theirs = (slot_state(spec, given, layer=2, layers=4) for _ in range(2))
    ours.reserve()
    return ours, theirs


def call(tokens: int, make: torch.Generator, dtype: torch.dtype, real: torch.Tensor | None = None) -> AttentionCall:
    heads = (HEADS * GROUP, HEADS, HEADS)
    query, key, value = (torch.randn(2, count, tokens, DIM, generator=make).to(dtype) for count in heads)
    rope = Rope(1e4 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), "half")
    return AttentionCall(query, key, value, real, 0.25, rope=rope)


WHOLE = (
    "first_free",
    "held",
    "grades",
    "levels",
    "candidates",
    "listed",
    "chosen",
    "found",
    "joins",
    "taken",
    "kept",
    "newest",
    "gaps",
    "lowest_found",
    "victims",
    "at_ends",
)
"""Whole numbers of a workspace that a step writes before it reads them."""


def poison(state: SlotState) -> None:
    """NaN wherever nothing is, and numbers that are no slot's or token's."""
    free = state.position < 0
    if state.workspace is not None:
        for name, tensor in state.workspace.tensors.items():
            if name in WHOLE:
                tensor.fill_(-77)
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
    if isinstance(state.layout, SlotAfterSlot):
        state.layout.key_pool[free] = torch.nan
        state.layout.value_pool[free] = torch.nan
    state.columns[:, free] = torch.nan


@pytest.mark.parametrize("dtype", few([torch.float32, torch.float16], torch.float32))
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_over_poisoned_memory(policy: str, dtype: torch.dtype) -> None:
    """In 16 bits `attend` reads free slots, too."""
    make = torch.Generator().manual_seed(3)
    ours, theirs = states(policy)
    triton, torch_ = (choose(ours.spec, name, torch.device("cpu"), dtype) for name in ("triton", "torch"))
    real = torch.arange(PROMPT) >= torch.tensor([[0], [PAD]])
    prompt = call(PROMPT, make, dtype, real)
    triton.prefill(ours, prompt)
    torch_.prefill(theirs, prompt)
    for step in range(STEPS):
        token = call(1, make, dtype)
        poison(ours)
        mine, other = triton.decode(ours, token), torch_.decode(theirs, token)
        assert torch.allclose(mine.float(), other.float(), atol=OUT_TOLERANCE[dtype]), f"step {step}"
        assert kept(ours) == kept(theirs), f"step {step}"


def kept(state: SlotState) -> list[list[list[int]]]:
    return [[sorted(head[head >= 0].tolist()) for head in row] for row in state.position]
