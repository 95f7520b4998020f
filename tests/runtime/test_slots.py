"""Slots: how many, where they lie, and how rows move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.order import free, in_text_order, text_order
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import dense
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl.runtime.torch.prompt import Prompt
from tests.texts import spec_of


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


@pytest.mark.parametrize(("device", "slots"), [("cpu", 13), ("cuda", 16)])
def test_rows_of_slots_are_aligned_on_accelerators(device: str, slots: int) -> None:
    state = SlotState(kvdsl.load("h2o").spec, {"budget": 12})
    state.room.plan(state.settings.resolve(torch.tensor([30])), 0, torch.device(device), evicts=True)
    assert state.room.limit == slots


def test_survivors_lie_in_text_order() -> None:
    position = prefilled("h2o", 30, budget=12).position
    assert torch.equal(position[..., :12].sort(-1).values, position[..., :12])
    assert (position[..., 12] == -1).all()


@pytest.mark.parametrize(
    ("position", "already"),
    [([0, 1, 2, 3], True), ([0, 1, 5, -1], True), ([-1, 0, 1, 2], False), ([0, -1, 1, 2], False), ([1, 0, 2, 3], False)],
)
def test_whether_slots_lie_in_text_order(position: list[int], already: bool) -> None:
    slots = torch.tensor([[[0, 1, 2, 3], position]], dtype=torch.int32)
    assert bool(in_text_order(slots)) is already
    assert torch.equal(text_order(slots), torch.arange(4).expand(1, 2, 4)) is already


def test_an_unbounded_cache_grows_by_a_quarter() -> None:
    state, backend = prefilled("full", 1020), TorchBackend()
    assert (state.slots, state.room.grows) == (1020, True)  # no more while later layers read the prompt
    before = state.keys.clone()
    backend.decode(state, call(1, 10))
    assert state.slots == 1344  # 1,030 tokens, a quarter more, in whole multiples of 64
    for step in range(32):
        backend.decode(state, call(1, 10, seed=step))
    assert state.slots == 1728  # 1,350 tokens
    assert torch.equal(state.keys[:, :, :1020], before)
    assert sorted(state.position[0, 0].tolist())[-1350:] == list(range(1350))


def test_rows_move_in_place() -> None:
    state = prefilled("roco", 30, batch=3, budget=12)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    where = state.keys.data_ptr()
    state.select_rows(torch.tensor([2, 2, 0]))
    assert state.keys.data_ptr() == where
    for name, tensor in state.tensors().items():
        rows = before[name].index_select(state.declared[name].batch, torch.tensor([2, 2, 0]))
        assert torch.equal(tensor, rows), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "`budget` of H2O is 0; give a number of tokens"),
        ({"budget": -1}, "`budget` of H2O is -1; give a number of tokens"),
        (
            {"budget": 8, "recent": 9},
            "H2O protects 9 tokens .* but its budget holds 8; raise the budget to at least 9 tokens or protect",
        ),
    ],
)
def test_numbers_that_cannot_be(given: dict[str, float], message: str) -> None:
    with pytest.raises(KvdslError, match=message):
        prefilled("h2o", 30, **given)


@pytest.mark.parametrize(
    ("body", "given", "message"),
    [
        ("budget 4 * layer + 1\nkeep last 2", {}, r"P protects 2 tokens \(keep last 2\) but its budget holds 1; raise"),
        ("budget 8\nkeep last 8 / a", {"a": 0}, r"P protects no finite number of tokens \(keep last 8 / a\): is .* divided by 0"),
    ],
)  # fmt: skip
def test_protecting_what_cannot_be(body: str, given: dict[str, float], message: str) -> None:
    state = SlotState(spec_of(f"param a = 2\nscore sum(attn) / a\n{body}"), given)
    with pytest.raises(KvdslError, match=message):
        TorchBackend().prefill(state, call(1, 30))


# -- how many slots a statement takes ------------------------------------------------------------------------------------


def custom(body: str, tokens: int = 30, steps: int = 0, cuts: int = 1, **given: float) -> SlotState:
    """A policy of these statements after a prompt of that many tokens in so many forwards, and after some more."""
    state, backend = SlotState(spec_of(f"param budget = 8\nscore sum(attn)\n{body}"), given), TorchBackend()
    for part in torch.arange(tokens).tensor_split(cuts):
        backend.prefill(state, call(1, len(part), seed=len(part)))
    for step in range(steps):
        backend.decode(state, call(1, 1, seed=100 + step))
    return state


def live(state: SlotState) -> int:
    return int((state.position >= 0).sum(-1).max())


@pytest.mark.parametrize(
    ("body", "slots", "after_the_prompt", "later"),
    [
        ("cap hard", 8, 8, 8),
        ("cap hard\ntrigger overflow >= 4\nslack 2\nmax_drop 1", 10, 10, 10),
        ("trigger overflow >= 4\nslack 2\nmax_drop 1", 12, 10, 10),
        ("when decode", 31, 30, 8),
        ("prefill blocks of 7", 11, 10, 8),  # of 30 tokens, 28 are in blocks
        ("prefill blocks of 5", 9, 8, 8),
    ],
)
def test_as_many_slots_as_it_takes(tmp_path: Path, body: str, slots: int, after_the_prompt: int, later: int) -> None:
    state = custom(body)
    assert (state.slots, live(state), state.room.grows) == (slots, after_the_prompt, False)
    where = [tensor.data_ptr() for tensor in state.tensors().values()]
    for step in range(12):
        TorchBackend().decode(state, call(1, 1, seed=step))
    assert live(state) == later
    assert [tensor.data_ptr() for tensor in state.tensors().values()] == where


def test_what_was_compressed_once_grows() -> None:
    state = custom("when prefill")
    assert (state.slots, live(state), state.room.grows, state.evicts) == (8, 8, True, False)
    for _ in range(7):
        TorchBackend().decode(state, call(1, 8))
    assert (state.slots, live(state)) == (64, 64)
    before = state.keys.clone()
    TorchBackend().decode(state, call(1, 1))
    assert (state.slots, live(state)) == (128, 65)
    assert torch.equal(state.keys[:, :, :64], before)


def test_a_layer_that_does_not_evict_grows() -> None:
    state = custom("layers 1..")
    assert (live(state), state.room.grows, state.evicts) == (30, True, False)


def test_a_prompt_in_blocks_never_holds_more_than_the_budget_and_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    attend = dense.attend

    def noted(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(prompt.slots)
        return attend(prompt)

    monkeypatch.setattr(dense, "attend", noted)
    custom("prefill blocks of 5", tokens=200)
    assert len(seen) == 40
    assert max(seen) == 8 + 5


def test_rings_are_as_long_as_the_longest_rows() -> None:
    state = custom("keep top 2 by max(attn over last prompt / 3 queries)")
    assert state.column_index.ring_sizes == (10,)
    assert state.columns.shape == (11, 1, 2, 9)
    with pytest.raises(
        KvdslError, match=r"remembers a number of queries that depends on the prompt.* pass the prompt in one"
    ):
        custom("keep top 2 by max(attn over last prompt / 3 queries)", cuts=2)


# -- a budget that the prompt does not fill --------------------------------------------------------------------------------


def grown(body: str, *, reserves: bool = False, batch: int = 1) -> tuple[SlotState, list[int]]:
    """A policy with a budget of 1,060 after a short prompt and 120 more tokens, and how many slots it had on the way."""
    state, backend = slot_state(spec_of(f"budget 1060\nscore sum(attn)\n{body}"), {}), TorchBackend()
    state.room.reserves = reserves
    backend.prefill(state, call(batch, 1000))
    sizes = [state.slots]
    for step in range(4):
        backend.decode(state, call(batch, 30, seed=step))
        sizes.append(state.slots)
    return state, sizes


@pytest.mark.parametrize("reserves", [False, True])
def test_a_large_budget_is_not_allocated_for_a_short_prompt(reserves: bool) -> None:
    state = SlotState(kvdsl.load("h2o").spec, {"budget": 100_000})
    if reserves:
        state.reserve()
    assert state.stays_fixed() == reserves
    TorchBackend().prefill(state, call(1, 18))
    assert (state.slots, state.room.limit, state.room.grows) == (
        (100_001, 100_001, False) if reserves else (1024, 100_001, True)
    )
    assert state.stays_fixed() == reserves
    state.reserve()
    assert (state.slots, state.stays_fixed()) == (100_001, True)
    assert live(state) == 18


@pytest.mark.parametrize(
    ("body", "limit"), [("", 1061), ("cap hard", 1060), ("trigger overflow >= 20", 1080), ("storage blocks 48", 1061)]
)
def test_a_budget_is_filled_by_growing(body: str, limit: int) -> None:
    """What is cached does not depend on when its slots were allocated."""
    ours, sizes = grown(body, batch=2)
    theirs, fixed = grown(body, batch=2, reserves=True)
    assert (sizes[0], sizes[-1], ours.room.limit, ours.room.grows) == (1024, limit, limit, False)
    assert set(fixed) == {limit}
    assert live(ours) <= limit
    for name in ("position", "keys", "values", "seen"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.columns, theirs.columns)
    if isinstance(ours.layout, Blocks) and isinstance(theirs.layout, Blocks):
        assert ours.layout.blocks == theirs.layout.blocks
    where = [tensor.data_ptr() for tensor in ours.tensors().values()]
    TorchBackend().decode(ours, call(2, 5))
    assert [tensor.data_ptr() for tensor in ours.tensors().values()] == where


@pytest.mark.parametrize("backend", [TorchBackend, pytest.param(None, id="cpu")])
def test_a_history_that_only_prompts_ask_goes_with_them(backend: type[TorchBackend] | None) -> None:
    """No memory behind a prompt, in which decoded tokens leave nothing; of a long enough later prompt the same stay as ever."""
    spec = kvdsl.load("snapkv").spec
    serves = choose(spec, "cpu", torch.device("cpu"), torch.float32) if backend is None else backend()
    kept = []
    for decoded in (0, 3):
        state = SlotState(spec, {"budget": 40})
        serves.prefill(state, call(2, 60))
        assert state.columns.shape[0] == 0 and state.column_index.rings(state.columns) == {}
        for token in range(decoded):
            serves.decode(state, call(2, 1, seed=token + 1))
        assert state.columns.numel() == 0
        if decoded:
            live = state.position >= 60
            free(state.position, None, live)  # as if these had not been
            state.seen.fill_(60)
        serves.prefill(state, call(2, 50, seed=9))
        kept.append(state.position.sort(-1).values[..., -40:])
    assert torch.equal(*kept)
    mixed = spec_of("param budget = 40\nwhen prefill\nscore sum(attn over last 4 queries) + sum(attn)")
    state = SlotState(mixed, {})
    TorchBackend().prefill(state, call(1, 60))
    assert state.columns.shape[0] == 5, "sums go on over the whole text, and the history with them"
