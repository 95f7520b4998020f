"""Budgets that heads share: each head has its own length in one flat array, and what comes out is what padded slots give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvdsl
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog

HEADS, DIM, PROMPT = 4, 16, 200
PADDING = (0, 90)
GIVEN: dict[str, float] = {"budget": 48}


def spec() -> PolicySpec:
    found: PolicySpec = kvdsl.load("adakv").spec
    return found


class Run:
    """Two rows of different lengths, of whose heads some look at little and others at much."""

    def __init__(self, state: SlotState, backend: str) -> None:
        self.state = state
        self.backend: Backend = choose(state.spec, backend, torch.device("cpu"), torch.float32)
        self.out = [self.backend.prefill(state, self.call(PROMPT, 0))]

    def call(self, tokens: int, seed: int) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        rows = len(self.state.seen) if self.state.allocated else len(PADDING)
        key, value = torch.randn(2, rows, HEADS, tokens, DIM, generator=make)
        query = torch.randn(rows, HEADS * 2, tokens, DIM, generator=make)
        query *= torch.tensor([0.2, 1.0, 2.0, 4.0]).repeat_interleave(2)[:, None, None]
        real = torch.arange(tokens) >= torch.tensor(PADDING)[:, None] if tokens == PROMPT else None
        if seed % 3 == 2:  # a token that only the first row has
            real = torch.arange(rows)[:, None] == 0
        return AttentionCall(query, key, value, real, 0.25)

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            self.out.append(self.backend.decode(self.state, self.call(1, seed)))


def pair(backend: str) -> tuple[Run, Run]:
    """The policy's own layout, and every head with as many slots as the longest one."""
    where = {"layer": 1, "layers": 4}
    return Run(slot_state(spec(), GIVEN, **where), backend), Run(SlotState(spec(), GIVEN, **where), backend)


def assert_same(flat: Run, padded: Run) -> None:
    live = padded.state.position >= 0
    assert torch.equal(flat.state.position, padded.state.position)
    assert torch.equal(flat.state.keys[live], padded.state.keys[live])
    assert torch.equal(flat.state.values[live], padded.state.values[live])
    assert all(torch.equal(*outs) for outs in zip(flat.out, padded.out, strict=True))


def rows(state: SlotState) -> int:
    assert isinstance(state.layout, Flat)
    return len(state.layout.key_pool)


BACKENDS = ("torch", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_comes_out_is_the_same_to_the_bit(backend: str) -> None:
    flat, padded = pair(backend)
    before = rows(flat.state)
    for run in (flat, padded):
        run.steps(*range(1, 100))
    assert rows(flat.state) > before  # past the room of the prompt's end
    assert_same(flat, padded)


def test_what_heads_do_not_keep_takes_no_memory() -> None:
    flat, padded = pair("torch")
    live = (flat.state.position >= 0).sum(-1)
    assert int(live.max()) > 1.5 * int(live.min())
    free = flat.state.slots - int(live.max())
    assert rows(flat.state) == int((live + free).sum())
    assert rows(flat.state) < padded.state.position.numel()
    assert flat.state.bytes() < padded.state.bytes()


def test_nothing_moves_while_there_is_room() -> None:
    flat, _ = pair("cpu")
    where = flat.state.layout.key_pool.data_ptr()
    live = int((flat.state.position >= 0).sum(-1).max())
    flat.steps(*range(1, flat.state.slots - live + 1))
    assert flat.state.layout.key_pool.data_ptr() == where


@pytest.mark.parametrize("backend", BACKENDS)
def test_beams(backend: str) -> None:
    flat, padded = pair(backend)
    for run in (flat, padded):
        run.steps(1, 2, 3)
        run.state.select_rows(torch.tensor([1, 1]))
        run.steps(4, 5)
        run.state.select_rows(torch.tensor([0, 0, 1, 1]))
        run.steps(6, 7)
    assert_same(flat, padded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_prompt(backend: str) -> None:
    flat, padded = pair(backend)
    for run in (flat, padded):
        run.steps(1, 2)
        run.out.append(run.backend.prefill(run.state, run.call(PROMPT, 7)))
        run.steps(3, 4)
    assert_same(flat, padded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_that_are_taken_back(backend: str) -> None:
    flat, never = pair(backend)[0], pair(backend)[0]
    for run in (flat, never):
        run.steps(1, 2)
    log = UndoLog(90)
    for seed in range(3, 83):  # the arrays grow meanwhile
        log.note(flat.state)
        flat.steps(seed)
    log.take_back(flat.state, 80)
    del flat.out[3:]
    for run in (flat, never):
        run.steps(4, 5)
    live = never.state.position >= 0
    assert torch.equal(flat.state.position[..., : never.state.slots], never.state.position)
    assert torch.equal(flat.state.keys[:, :, : never.state.slots][live], never.state.keys[live])
    assert all(torch.equal(*outs) for outs in zip(flat.out, never.out, strict=True))


def test_who_evicts_while_decoding_keeps_its_slots() -> None:
    """There heads change their lengths at every token."""
    made = kvdsl.load("adakv").spec
    assert not isinstance(slot_state(replace(made, when="both"), GIVEN).layout, Flat)
