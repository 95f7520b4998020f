"""`storage blocks N`: what is computed is to the bit what slots in one piece give; a pool serves rows of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.backends import choose
from kvdsl.runtime.blocks import BlockState
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.storage import slot_state
from kvdsl.runtime.torch_backend import TorchBackend
from kvdsl.runtime.undo import UndoLog
from tests.hf import zoo

HEADS, DIM = 2, 16
PADDING = (0, 13, 29)
"""Of rows of 40 tokens."""

GIVEN: dict[str, dict[str, float]] = {
    "full": {},
    "h2o": {"budget": 12},
    "roco": {"budget": 0.4},  # each row keeps another number
    "tova": {"budget": 12},
    "vatp_scissorhands": {"budget": 12, "sinks": 2, "history": 5},
    "lazy_streaming": {"budget": 12, "R": 9, "sigma": 3, "delta": 2},
    "snapkv": {"budget": 34},
    "adakv": {"budget": 34},
    "sparcas": {"tokens": 9, "dims": 4},
    "quest": {"tokens": 32},
    "capped": {"budget": 12},
    "agreeing": {"budget": 12},
}
WRITTEN = {
    "capped": "param budget = 12\nscore sum(attn)\ncap hard",
    "agreeing": "param budget = 12\nscore sum(attn)\nvictims shared by heads",
}


def title(name: str) -> str:
    return "".join(word.title() for word in name.split("_"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blocks")
    for name, body in WRITTEN.items():
        lines = "".join(f"  {line}\n" for line in body.splitlines())
        (made / f"{name}.kv").write_text(f'kv 1\n\npolicy {title(name)} {{\n  """A policy of the tests."""\n{lines}}}\n')
    return made


def classes(folder: Path, name: str, size: int) -> tuple[Any, Any]:
    """The policy, and the same in blocks."""
    if name in WRITTEN:
        plain, parent = kvdsl.load(folder / f"{name}.kv"), title(name)
    else:
        plain = kvdsl.load(name)
        parent = plain.spec.name
    file = folder / f"{name}_blocks{size}.kv"
    statement = f"storage blocks {size}"
    file.write_text(
        f'kv 1\nimport "{name}.kv"\n\npolicy {title(name)}Blocks{size} extends {parent} {{\n  """In blocks."""\n  {statement}\n}}\n'
    )
    return plain, kvdsl.load(file)


class Run:
    """Rows of different lengths: a prompt, and tokens after it, some of them padding."""

    def __init__(self, spec: PolicySpec, given: dict[str, float]) -> None:
        self.state, self.backend = slot_state(spec, given, layer=2, layers=4), TorchBackend()
        self.rope = Rope(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
        real = torch.arange(40) >= torch.tensor(PADDING)[:, None]
        self.out = [self.backend.prefill(self.state, self.call(40, 0, real))]
        self.state.decoding = True

    def call(self, tokens: int, seed: int, real: Tensor | None = None) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        rows = len(self.state.seen) if self.state.allocated else len(PADDING)
        key, value = torch.randn(2, rows, HEADS, tokens, DIM, generator=make)
        query = torch.randn(rows, HEADS * 2, tokens, DIM, generator=make)
        return AttentionCall(query, key, value, real, 0.25, rope=self.rope)

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            real = None if seed % 3 else torch.arange(len(self.state.seen))[:, None] != seed % 2
            self.out.append(self.backend.decode(self.state, self.call(1, seed, real)))


def assert_same(blocks: SlotState, plain: SlotState) -> None:
    live = plain.position >= 0
    for name in ("position", "columns", "seen", "rank", "sketch"):
        if name in plain.TENSORS:
            assert torch.equal(getattr(blocks, name).nan_to_num(7.0), getattr(plain, name).nan_to_num(7.0)), name
    assert torch.equal(blocks.keys[live], plain.keys[live])
    assert torch.equal(blocks.values[live], plain.values[live])


def check_pool(state: SlotState) -> None:
    """Every block in use is one row's, and no other block is."""
    assert isinstance(state, BlockState)
    held = state.table[state.table >= 0]
    assert len(held.unique()) == len(held)
    assert torch.equal(state.table >= 0, state.used)
    assert int(state.used.sum()) <= len(state.key_pool)


@pytest.mark.parametrize(("name", "size"), [*((name, 5) for name in GIVEN), ("h2o", 1), ("roco", 16), ("tova", 100)])
def test_blocks_are_in_place_to_the_bit(folder: Path, name: str, size: int) -> None:
    plain, blocks = (Run(made.spec, GIVEN[name]) for made in classes(folder, name, size))
    assert isinstance(blocks.state, BlockState)
    for seed in range(1, 16):
        plain.steps(seed)
        blocks.steps(seed)
        check_pool(blocks.state)
    assert all(torch.equal(found, expected) for found, expected in zip(blocks.out, plain.out, strict=True))
    assert_same(blocks.state, plain.state)


def test_rows_take_what_they_use(folder: Path) -> None:
    """A row of 40 tokens, one of 27 and one of 11, in blocks of 5: not three times the longest."""
    plain, blocks = (Run(made.spec, {}) for made in classes(folder, "full", 5))
    state = blocks.state
    assert isinstance(state, BlockState)
    assert state.used.sum(1).tolist() == [8, 6, 3]
    assert len(state.key_pool) == 17
    assert state.bytes() < plain.state.bytes() / 10  # which has room for 1,024 tokens a row
    blocks.steps(*range(1, 60))
    assert len(state.key_pool) <= 1.5 * int(state.used.sum())


def test_blocks_that_are_empty_serve_another_row(folder: Path) -> None:
    """Pruned from 20 tokens to 12, a row gives blocks back; the pool grows no more."""
    given = {"budget": 12.0, "R": 9.0}
    blocks = Run(classes(folder, "lazy_streaming", 4)[1].spec, given)
    state, sizes, used = blocks.state, [], []
    assert isinstance(state, BlockState)
    for seed in range(1, 50):
        blocks.steps(seed)
        sizes.append(len(state.key_pool))
        used.append(int(state.used.sum()))
    assert min(used[20:]) < max(used[20:])
    assert sizes[30] == sizes[-1] < 3 * -(-state.slots // 4) + 8


def test_a_token_is_written_at_block_and_offset(folder: Path) -> None:
    """EQUIP, figure 18: one row of one block a head changes, and nothing else."""
    blocks = Run(classes(folder, "h2o", 5)[1].spec, {"budget": 12})
    blocks.steps(1, 2)
    state = blocks.state
    assert isinstance(state, BlockState)
    before, table, slot = state.key_pool.clone(), state.table.clone(), (state.position < 0).int().argmax(-1)
    call = blocks.call(1, 7)
    blocks.backend.decode(state, call)
    changed = (state.key_pool != before).any(-1).nonzero()
    expected = [
        [int(table[row, slot[row, head] // 5]), head, int(slot[row, head]) % 5] for row in range(3) for head in range(2)
    ]
    assert sorted(changed.tolist()) == sorted(expected)
    for row, head in ((0, 1), (2, 0)):
        block, at = table[row, slot[row, head] // 5], slot[row, head] % 5
        assert torch.equal(state.key_pool[block, head, at], call.key[row, head, 0])


@pytest.mark.parametrize("rows", [[2, 2, 0], [1], [0, 0, 1, 1, 2, 2]])
def test_rows_move(folder: Path, rows: list[int]) -> None:
    plain, blocks = (Run(made.spec, {"budget": 12}) for made in classes(folder, "h2o", 5))
    for run in (plain, blocks):
        run.steps(1, 2)
        run.state.select_rows(torch.tensor(rows))
        run.steps(4, 5)
    assert_same(blocks.state, plain.state)
    check_pool(blocks.state)


@pytest.mark.parametrize("name", ["lazy_streaming", "full"])
def test_steps_are_taken_back(folder: Path, name: str) -> None:
    plain, blocks = (Run(made.spec, GIVEN[name]) for made in classes(folder, name, 4))
    log = UndoLog(30)
    for seed in range(1, 25):
        log.note(blocks.state)
        blocks.steps(seed)
    log.take_back(blocks.state, 20)
    check_pool(blocks.state)
    blocks.steps(50, 51, 52)
    plain.steps(1, 2, 3, 4, 50, 51, 52)
    assert_same(blocks.state, plain.state)


def test_in_a_model(folder: Path) -> None:
    plain, blocks = classes(folder, "h2o", 8)
    model, rows = zoo.model("llama"), zoo.prompt(2, 14)
    inputs = zoo.left_padded([rows[0], rows[1, :8]])
    ours, theirs = blocks(model, budget=10, backend="torch"), plain(model, budget=10, backend="torch")
    for how in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 20, "do_sample": False, **how}
        found = model.generate(**inputs, **options, past_key_values=ours)
        assert torch.equal(found, model.generate(**inputs, **options, past_key_values=theirs))
        assert all(torch.equal(ours.positions(layer), theirs.positions(layer)) for layer in ours.managed)
        ours.reset()
        theirs.reset()


def test_who_serves_blocks(folder: Path) -> None:
    spec = classes(folder, "h2o", 8)[1].spec
    with pytest.raises(KvdslError, match=r"no C\+\+ kernels \(`kvdsl explain"):
        choose(spec, "cpu", torch.device("cpu"), torch.float32)
    with pytest.warns(UserWarning, match="runs on the torch backend"):
        assert choose(spec, "auto", torch.device("cpu"), torch.float32).name == "torch"
