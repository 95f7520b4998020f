"""`storage="blocks:N"`: what is computed is to the bit what slots in one piece give; a pool serves rows of different lengths."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state import blocks
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog
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
    "staged": {"budget": 12},
}
WRITTEN = {
    "capped": "param budget = 12\nscore sum(attn * norm1(v)) + last(dot(q, k))\nslack 8\nmax_drop 8\ncap hard",
    "agreeing": "param budget = 12\nscore sum(attn)\nvictims shared by heads",
    "staged": "param budget = 12\nscore sum(attn)\nslack 3\nmax_drop 3\ncap hard",
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


def policy(folder: Path, name: str) -> Any:
    return kvdsl.load(folder / f"{name}.kv" if name in WRITTEN else name)


class Run:
    """Rows of different lengths: a prompt, and tokens after it, some of them padding."""

    def __init__(
        self,
        spec: PolicySpec,
        given: dict[str, float],
        backend: str = "torch",
        prompt: int = 40,
        padding: tuple[int, ...] = PADDING,
    ) -> None:
        self.rows = len(padding)
        self.state = slot_state(spec, given, layer=2, layers=4)
        self.backend = choose(spec, backend, torch.device("cpu"), torch.float32)
        self.rope = Rope(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
        real = torch.arange(prompt) >= torch.tensor(padding)[:, None]
        self.out = [self.backend.prefill(self.state, self.call(prompt, 0, real))]

    def call(self, tokens: int, seed: int, real: Tensor | None = None) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        rows = len(self.state.seen) if self.state.allocated else self.rows
        key, value = torch.randn(2, rows, HEADS, tokens, DIM, generator=make)
        query = torch.randn(rows, HEADS * 2, tokens, DIM, generator=make)
        return AttentionCall(query, key, value, real, 0.25, rope=self.rope)

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            real = None if seed % 3 else torch.arange(len(self.state.seen))[:, None] != seed % 2
            self.out.append(self.backend.decode(self.state, self.call(1, seed, real)))


def runs(
    folder: Path, name: str, size: int, backend: str = "torch", given: dict[str, float] | None = None, **shape: Any
) -> tuple[Run, Run, Blocks]:
    """In one piece, in blocks of this size, and the layout of the latter."""
    given = GIVEN[name] if given is None else given
    spec = policy(folder, name).spec
    made = tuple(Run(spec.laid_out(storage), given, backend, **shape) for storage in ("in_place", f"blocks:{size}"))
    layout = made[1].state.layout
    assert isinstance(layout, Blocks)
    return made[0], made[1], layout


def assert_same(blocks: SlotState, plain: SlotState) -> None:
    live = plain.position >= 0
    for name in ("position", "columns", "seen", "rank", "sketch"):
        if name in plain.declared:
            assert torch.equal(getattr(blocks, name).nan_to_num(7.0), getattr(plain, name).nan_to_num(7.0)), name
    assert torch.equal(blocks.keys[live], plain.keys[live])
    assert torch.equal(blocks.values[live], plain.values[live])


def used(state: SlotState) -> Tensor:
    """Which blocks every row uses, bool [batch, blocks of a row]."""
    assert isinstance(state.layout, Blocks)
    return state.layout.used(state.position)


def check_pool(state: SlotState) -> None:
    """Every block in use is one row's, and no other block is."""
    assert isinstance(state.layout, Blocks)
    held = state.layout.table[state.layout.table >= 0]
    assert len(held.unique()) == len(held)
    assert torch.equal(state.layout.table >= 0, used(state))
    assert int(used(state).sum()) <= state.layout.blocks


@pytest.mark.parametrize(
    ("backend", "name", "size"),
    [
        *(("torch", name, 5) for name in GIVEN),
        *(("torch", "h2o", 1), ("torch", "roco", 16), ("torch", "tova", 100)),
        *(("cpu", "full", 5), ("cpu", "full", 64), ("cpu", "roco", 1), ("cpu", "roco", 16), ("cpu", "roco", 100)),
        *(("cpu", "capped", 3), ("cpu", "sparcas", 5), ("cpu", "sparcas", 40)),
    ],
)
def test_blocks_are_in_place_to_the_bit(folder: Path, name: str, size: int, backend: str) -> None:
    plain, blocks, _ = runs(folder, name, size, backend)
    for seed in range(1, 16):
        plain.steps(seed)
        blocks.steps(seed)
        check_pool(blocks.state)
    assert all(torch.equal(found, expected) for found, expected in zip(blocks.out, plain.out, strict=True))
    assert_same(blocks.state, plain.state)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_rows_take_what_they_use(folder: Path, backend: str) -> None:
    """A row of 40 tokens, one of 27 and one of 11, in blocks of 5: not three times the longest."""
    plain, blocks, layout = runs(folder, "full", 5, backend)
    assert used(blocks.state).sum(1).tolist() == [8, 6, 3]
    assert layout.blocks == 17
    assert layout.key_pool.nbytes * 3 * 40 == plain.state.keys.nbytes * 17 * 5
    blocks.steps(*range(1, 60))
    assert layout.blocks <= 1.5 * int(used(blocks.state).sum())


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_blocks_that_are_empty_go_back(folder: Path, backend: str) -> None:
    """Pruned from 20 tokens to 12, a row gives blocks back, and takes others later."""
    _, blocks, layout = runs(folder, "capped", 1, backend)
    in_use, tables = [], set()
    for seed in range(1, 50):
        blocks.steps(seed)
        check_pool(blocks.state)
        in_use.append(int(used(blocks.state).sum()))
        tables.add(tuple(layout.table.flatten().tolist()))
    assert min(in_use[20:]) < max(in_use[20:])
    assert len(tables) > 5


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_bounded_pool_is_allocated_once(folder: Path, backend: str) -> None:
    """With what each row can need by its own budget, 40 % of 40, 27 and 11 tokens and one more: less than thrice the largest."""
    _, blocks, layout = runs(folder, "roco", 4, backend)
    addresses = [tensor.data_ptr() for tensor in blocks.state.tensors().values()]
    assert layout.blocks == -(-17 // 4) + -(-11 // 4) + -(-5 // 4)
    blocks.steps(*range(1, 40))
    assert [tensor.data_ptr() for tensor in blocks.state.tensors().values()] == addresses
    check_pool(blocks.state)


def test_several_tokens_at_once_find_blocks(folder: Path) -> None:
    """More of them than blocks are free: the pool of a cache that grows is enlarged beforehand."""
    plain, blocks, _ = runs(folder, "full", 5, "cpu")
    for run in (plain, blocks):
        run.out.append(run.backend.decode(run.state, run.call(33, 7)))
    assert torch.equal(plain.out[-1], blocks.out[-1])
    check_pool(blocks.state)


def test_heads_and_rows_take_blocks_at_once(folder: Path) -> None:
    """On several threads; blocks of one slot, so that all heads of a row need one at every token."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        plain, blocks, _ = runs(folder, "capped", 1, "cpu")
        for seed in range(1, 60):
            plain.steps(seed)
            blocks.steps(seed)
            check_pool(blocks.state)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found, expected) for found, expected in zip(blocks.out, plain.out, strict=True))


def test_a_kernel_without_a_free_block_says_so(folder: Path) -> None:
    _, blocks, layout = runs(folder, "full", 5, "cpu")
    layout.make_room = lambda *_: None  # type: ignore[method-assign]  # slots, and no blocks for them
    with pytest.raises(KvdslError, match=r"no block is free: .* `reset\(\)`"):
        blocks.backend.decode(blocks.state, blocks.call(9, 1))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_token_is_written_at_block_and_offset(folder: Path, backend: str) -> None:
    """EQUIP, figure 18: one row of one block a head changes, and nothing else."""
    _, blocks, layout = runs(folder, "roco", 5, backend)
    blocks.steps(1, 2)
    before, table, slot = layout.key_pool.clone(), layout.table.clone(), (blocks.state.position < 0).int().argmax(-1)
    call = blocks.call(1, 7)
    blocks.backend.decode(blocks.state, call)
    changed = (layout.key_pool != before).any(-1).nonzero()
    expected = [
        [head, int(table[row, slot[row, head] // 5]), int(slot[row, head]) % 5] for row in range(3) for head in range(2)
    ]
    assert sorted(changed.tolist()) == sorted(expected)
    for row, head in ((0, 1), (2, 0)):
        block, at = table[row, slot[row, head] // 5], slot[row, head] % 5
        assert torch.equal(layout.key_pool[head, block, at], call.key[row, head, 0])


@pytest.mark.parametrize("rows", [[2, 2, 0], [1], [0, 0, 1, 1, 2, 2]])
def test_rows_move(folder: Path, rows: list[int]) -> None:
    plain, blocks, _ = runs(folder, "h2o", 5)
    for run in (plain, blocks):
        run.steps(1, 2)
        run.state.select_rows(torch.tensor(rows))
        run.steps(4, 5)
    assert_same(blocks.state, plain.state)
    check_pool(blocks.state)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["capped", "full"])
def test_steps_are_taken_back(folder: Path, name: str, backend: str) -> None:
    plain, blocks, _ = runs(folder, name, 4, backend)
    log = UndoLog(30)
    for seed in range(1, 25):
        log.note(blocks.state)
        blocks.steps(seed)
    log.take_back(blocks.state, 20)
    check_pool(blocks.state)
    blocks.steps(50, 51, 52)
    plain.steps(1, 2, 3, 4, 50, 51, 52)
    assert_same(blocks.state, plain.state)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_in_a_model(folder: Path, backend: str) -> None:
    roco = policy(folder, "roco")
    model, rows = zoo.model("llama"), zoo.prompt(2, 14)
    inputs = zoo.left_padded([rows[0], rows[1, :8]])
    ours, theirs = (roco(model, budget=10, storage=storage, backend=backend) for storage in ("blocks:8", "in_place"))
    for how in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 20, "do_sample": False, **how}
        found = model.generate(**inputs, **options, **with_cache(ours))
        assert torch.equal(found, model.generate(**inputs, **options, **with_cache(theirs)))
        assert all(torch.equal(ours.positions(layer), theirs.positions(layer)) for layer in ours.managed)
        ours.reset()
        theirs.reset()


def test_edition_1_states_the_default(tmp_path: Path) -> None:
    """`storage blocks N` says how a package's caches lie unless they are told; a size may read a param."""
    file = tmp_path / "paged.kv"
    lines = '  """In blocks."""\n  param block = 5\n  storage blocks 2 * block\n'
    file.write_text(f"kv 1\nimport h2o\n\npolicy Paged extends H2O {{\n{lines}}}\n")
    spec = kvdsl.load(file).spec
    for given, storage, size in (({}, None, 10), ({"block": 3}, None, 6), ({"block": 3}, "blocks:4", 4), ({}, "blocks", 12)):
        layout = Run(spec.laid_out(storage), {"budget": 11, **given}).state.layout
        assert isinstance(layout, Blocks) and layout.size == size  # no block is larger than all slots of a head
    assert not isinstance(Run(spec.laid_out("in_place"), {"budget": 11}).state.layout, Blocks)


@pytest.mark.parametrize(
    "storage", ["", "paged", "in_place:1", "blocks:", "blocks:0", "blocks:-1", "blocks:1.5", "blocks: 4", 16]
)
def test_what_storage_does_not_say(storage: Any) -> None:
    with pytest.raises(KvdslError, match=r"`storage` is .*; use `in_place`, `blocks`, or `blocks:16`"):
        kvdsl.load("h2o", storage=storage)


def test_a_full_row_needs_a_slot_for_the_new_token() -> None:
    """16 tokens fill a block; the next one is placed before any leaves."""
    position = torch.full((1, 1, 32), FREE, dtype=torch.int32)
    position[..., :16] = torch.arange(16)
    room = SimpleNamespace(most_by_head=lambda numbers, evicts: torch.tensor([[16.0]]))
    state: Any = SimpleNamespace(slots=32, position=position, numbers=None, evicts=True, room=room)
    assert blocks._most_blocks(state, 16).tolist() == [2]
