"""Slots: how many, where they lie, and how rows move."""

from __future__ import annotations

import pytest
import torch

import kvdsl
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.torch_backend import TorchBackend


def call(batch: int, tokens: int, *, heads: int = 2, group: int = 2, dim: int = 8, seed: int = 0) -> AttentionCall:
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * group, tokens, dim, generator=make)
    key, value = torch.randn(2, batch, heads, tokens, dim, generator=make)
    return AttentionCall(query, key, value, None, dim**-0.5)


def prefilled(policy: str, tokens: int, batch: int = 1, **given: float) -> SlotState:
    state = SlotState(kvdsl.load(policy).spec, given)
    TorchBackend().prefill(state, call(batch, tokens))
    return state


def test_as_many_slots_as_the_budget_and_the_token_that_comes_in() -> None:
    assert prefilled("h2o", 30, budget=12).slots == 13
    assert prefilled("h2o", 3, budget=12).slots == 13
    assert prefilled("h2o", 30, budget=0.5).slots == 16


def test_survivors_lie_in_text_order() -> None:
    position = prefilled("h2o", 30, budget=12).position
    assert torch.equal(position[..., :12].sort(-1).values, position[..., :12])
    assert (position[..., 12] == -1).all()


def test_an_unbounded_cache_doubles() -> None:
    state, backend = prefilled("full", 1020), TorchBackend()
    assert (state.slots, state.grows) == (1024, True)
    before = state.keys[:, :, :1020].clone()
    for step in range(8):
        backend.decode(state, call(1, 1, seed=step))
    assert state.slots == 2048
    assert torch.equal(state.keys[:, :, :1020], before)
    assert sorted(state.position[0, 0].tolist())[-1028:] == list(range(1028))


def test_rows_move_in_place() -> None:
    state = prefilled("roco", 30, batch=3, budget=12)
    before = {name: getattr(state, name).clone() for name in state.TENSORS}
    where = state.keys.data_ptr()
    state.select_rows(torch.tensor([2, 2, 0]))
    assert state.keys.data_ptr() == where
    for name in state.TENSORS:
        rows = before[name].index_select(state.batch_dim(name), torch.tensor([2, 2, 0]))
        assert torch.equal(getattr(state, name), rows), name


def test_rows_repeat() -> None:
    state = prefilled("roco", 30, batch=2, budget=12)
    state.repeat_rows(2)
    assert state.seen.shape == (4,)
    assert torch.equal(state.columns[:, 0], state.columns[:, 1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "`budget` of H2O is 0; give a number of tokens"),
        ({"budget": -1}, "`budget` of H2O is -1; give a number of tokens"),
        ({"budget": 8, "recent": 9}, "H2O protects 9 tokens .* but its budget holds 8; raise the budget or protect fewer"),
    ],
)
def test_numbers_that_cannot_be(given: dict[str, float], message: str) -> None:
    with pytest.raises(KvdslError, match=message):
        prefilled("h2o", 30, **given)
