"""What the C++ kernels are told of a state is written once, and anew whenever its tensors are others."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.prepared import DecodeArgs
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend


def call(batch: int, tokens: int, seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    return AttentionCall(query, key, value, None, 0.3)


def prefilled(policy: str, batch: int = 2, **given: float) -> SlotState:
    spec = kvdsl.load(policy).spec
    state = SlotState(spec, dict.fromkeys(spec.params) | given)
    TorchBackend().prefill(state, call(batch, 30))
    return state


def pointed(state: SlotState) -> tuple[int, ...]:
    found: list[int] = []

    def kernel(given: Any) -> int:
        args = ctypes.cast(given, ctypes.POINTER(DecodeArgs)).contents
        assert args.batch == len(state.seen) and args.slots == state.slots
        found.extend(getattr(args, name) or 0 for name in ("keys", "values", "position", "state", "seen", "params"))
        return 0

    one = call(len(state.seen), 1)
    assert CpuBackend.step(state, one).run(kernel, one, None) == 0
    return tuple(found)


def own(state: SlotState) -> tuple[int, ...]:
    names = ("keys", "values", "position", "columns", "seen", "numbers")
    return tuple(getattr(state, name).data_ptr() if getattr(state, name).numel() else 0 for name in names)


def test_arguments_follow_the_tensors() -> None:
    state = prefilled("h2o", budget=12)
    assert pointed(state) == pointed(state) == own(state)
    other = copy.deepcopy(state)
    assert pointed(other) == own(other) != own(state)
    state.select_rows(torch.tensor([0, 0, 0]))
    assert pointed(state) == own(state)
    state.select_rows(torch.tensor([0]))
    assert pointed(state) == own(state)
    growing = prefilled("full")
    assert pointed(growing) == own(growing)
    growing.make_room(100)
    assert growing.slots > 100 and pointed(growing) == own(growing)


def test_nothing_lives_longer_for_having_been_pointed_to() -> None:
    state = prefilled("h2o", budget=12)
    pointed(state)
    keys, gone = weakref.ref(state.keys), weakref.ref(state)
    state.reset()
    gc.collect()
    assert keys() is None
    del state
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_steps_of_two_states_in_turns(policy: str) -> None:
    """Each has its own arguments, which every step writes anew where the token is concerned."""
    given = {"budget": 12.0} if policy == "h2o" else {}
    backend = choose(kvdsl.load(policy).spec, "cpu", torch.device("cpu"), torch.float32)
    pairs = [(prefilled(policy, batch, **given), prefilled(policy, batch, **given)) for batch in (1, 3)]
    for seed in range(60):
        for ours, expected in pairs:
            one = call(len(ours.seen), 1 + seed % 2, seed)
            torch.testing.assert_close(backend.decode(ours, one), TorchBackend().decode(expected, one), atol=2e-6, rtol=0)
            assert torch.equal(ours.position, expected.position)
