"""The last steps taken back: the cache is to the bit what it was, and goes on as if they had never been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import Before, UndoLog
from tests.quick import thinned

BATCH, HEADS, DIM = 2, 2, 16

SHIPPED: dict[str, dict[str, float]] = {
    "full": {},
    "h2o": {"budget": 12},
    "roco": {"budget": 12},
    "tova": {"budget": 12},
    "random": {"budget": 12},
    "vatp_scissorhands": {"budget": 12, "sinks": 2, "history": 5},
    "lazy_streaming": {"budget": 12, "R": 5, "sigma": 3, "delta": 2},
    "equip_h2o": {"budget": 12, "recent": 4},
    "snapkv": {"budget": 34},
    "sparcas": {"tokens": 9, "dims": 4},
    "quest": {"tokens": 32},
    "roco_sparcas": {"budget": 20, "protect": 4, "tokens": 9, "dims": 4},
}
WRITTEN = {
    "hard_cap": "param budget = 12\nscore sum(attn)\ncap hard",
    "the_newest_leaves": "param budget = 12\nscore sum(attn)\ncap hard\nkeep last 0",
    "hard_cap_compact": "param budget = 12\nscore sum(attn)\ncap hard\npositions compact\nslack 3\nmax_drop 2\ntrigger overflow >= 2",
    "ring_of_a_rate": "param budget = 12\nparam n = prompt / 4\nscore mean(attn over last n queries) + max(attn)",
    "sketch_often": "param tokens = 9\nsketch top 4 dims by abs(q) every 2 queries\nselect top tokens by dot(q, k over sketch)",
}


class Run:
    """A prompt of two rows, one of them padded, and tokens after it, some of them padding."""

    def __init__(self, spec: PolicySpec, given: dict[str, float], backend: str, prompt: int = 40) -> None:
        self.backend: Backend = choose(spec, backend, torch.device("cpu"), torch.float32)
        self.state = SlotState(spec, given)
        self.rope = Rope(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
        real = torch.ones(BATCH, prompt, dtype=torch.bool)
        real[1, :7] = False
        self.backend.prefill(self.state, self.call(prompt, 0, real))

    def call(self, tokens: int, seed: int, real: Tensor | None = None) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        key, value = torch.randn(2, BATCH, HEADS, tokens, DIM, generator=make)
        query = torch.randn(BATCH, HEADS * 2, tokens, DIM, generator=make)
        return AttentionCall(query, key, value, real, 0.25, rope=self.rope)

    def step(self, seed: int) -> Tensor:
        real = torch.tensor([[True], [seed % 5 != 0]])
        return self.backend.decode(self.state, self.call(1, seed, real))

    def content(self) -> dict[str, Tensor]:
        copies = ("sketch_keys", "page_bounds", "copied", "half_keys", "length")
        return {name: x.clone() for name, x in self.state.tensors().items() if name not in copies}


def spec_of(name: str, folder: Path) -> PolicySpec:
    if name in SHIPPED:
        return kvdsl.load(name, rope="cached" if name == "equip_h2o" else None).spec
    file = folder / f"{name}.kv"
    title = "".join(word.title() for word in name.split("_"))
    statements = "".join(f"  {line}\n" for line in WRITTEN[name].splitlines())
    file.write_text(f'kv 1\n\npolicy {title} {{\n  """A policy of the tests."""\n{statements}}}\n')
    return kvdsl.load(file).spec


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", thinned([*SHIPPED, *WRITTEN], 3))
def test_what_was_taken_back_never_happened(name: str, backend: str, tmp_path: Path) -> None:
    check_taking_back(spec_of(name, tmp_path), SHIPPED.get(name, {}), backend)


def check_taking_back(
    spec: PolicySpec,
    given: dict[str, float],
    backend: str,
    *,
    steps: int = 15,
    backs: tuple[int, ...] = (3, 1, 9),
    after: int = 6,
) -> None:
    """Make steps, take some back, and more; compare with what was, and go on as if they had never been."""
    run, log, contents = Run(spec, given, backend), UndoLog(20), []
    for seed in range(1, steps + 1):
        contents.append(run.content())
        log.note(run.state)
        run.step(seed)
    assert not torch.equal(contents[-1]["seen"], contents[0]["seen"])
    for back in backs:
        log.take_back(run.state, back)
        assert_same(run.content(), contents[len(log)])
    plain = Run(spec, given, backend)
    for seed in (*range(1, len(log) + 1), *range(41, 41 + after)):
        expected = plain.step(seed)
        if seed > len(log):
            assert torch.equal(run.step(seed), expected)
    assert_same(run.content(), plain.content())


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_slots_that_have_grown_since(backend: str) -> None:
    run, log = Run(kvdsl.load("full").spec, {}, backend, prompt=50), UndoLog(20)
    before = run.content()
    for seed in range(1, 17):
        log.note(run.state)
        run.step(seed)
    assert (before["position"].shape[-1], run.state.slots) == (50, 128)
    log.take_back(run.state, 16)
    found = run.content()
    assert (found["position"][..., 50:] == -1).all()
    for name in ("position", "key_pool", "value_pool"):
        assert torch.equal(found[name][:, :, :50], before[name])
    assert run.state.room.filled == 50


def test_a_step_costs_what_it_says() -> None:
    """Per row and KV head: one key and value, and four bytes a slot for the position, each column, each ring and the rank."""
    for name, columns, rings, rank in (("roco", 2, 0, 0), ("vatp_scissorhands", 1, 1, 0), ("equip_h2o", 1, 0, 1)):
        state = Run(kvdsl.load(name).spec, SHIPPED[name], "torch").state
        assert (len(state.spec.columns), len(state.spec.rings)) == (columns, rings)
        slot_and_seen = BATCH * HEADS * 8 + BATCH * 4
        expected = BATCH * HEADS * (2 * DIM * 4 + 4 * state.slots * (1 + columns + rings + rank)) + slot_and_seen
        assert Before.of(state).bytes() == expected


def test_the_log_keeps_the_last_steps_only() -> None:
    run, log = Run(kvdsl.load("h2o").spec, SHIPPED["h2o"], "torch"), UndoLog(4)
    for seed in range(1, 10):
        log.note(run.state)
        run.step(seed)
    assert len(log) == 4
    assert log.bytes() == 4 * Before.of(run.state).bytes()
    for seed in range(10, 17):
        log.note(run.state, at_least=7)
        run.step(seed)
    assert len(log) == 7
    log.note(run.state)
    assert len(log) == 4
    log.forget()
    assert (len(log), log.bytes()) == (0, 0)
