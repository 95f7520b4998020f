"""Blocks in the kernels, in Triton's interpreter: keys and values are found through the tables, which two launches keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.undo import UndoLog
from tests.runtime.test_blocks import Run, assert_same, check_pool, runs
from tests.runtime.test_blocks import folder as folder  # the fixture

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]

GIVEN: dict[str, dict[str, float]] = {
    "full": {},  # the pool grows
    "roco": {"budget": 0.6},  # each row keeps another number
    "tova": {"budget": 6},
    "lazy_streaming": {"budget": 6, "R": 5, "sigma": 2, "delta": 1},  # compact; several leave at once
    "staged": {"budget": 4},  # room is made before a token comes
    "agreeing": {"budget": 6},
    "adakv": {"budget": 34},  # heads share a budget
    "sparcas": {"tokens": 4, "dims": 4},
    "quest": {"tokens": 16},
}


def small(folder: Path, name: str, size: int, backend: str = "triton") -> tuple[Run, Run, Blocks]:
    """Rows of 12 and 7 tokens."""
    return runs(folder, name, size, backend, GIVEN[name], prompt=12, padding=(0, 5))


@pytest.mark.parametrize(
    ("name", "size", "steps"),
    [
        *(("full", 5, 4), ("roco", 1, 4), ("roco", 16, 3), ("tova", 100, 2), ("lazy_streaming", 3, 6), ("staged", 2, 4)),
        *(("agreeing", 5, 3), ("adakv", 5, 2), ("sparcas", 5, 3), ("quest", 7, 3)),
    ],
)
def test_blocks_are_in_place_to_the_bit(folder: Path, name: str, size: int, steps: int) -> None:
    plain, blocks, _ = small(folder, name, size)
    for seed in range(1, steps + 1):
        plain.steps(seed)
        blocks.steps(seed)
        check_pool(blocks.state)
    assert all(torch.equal(found, expected) for found, expected in zip(blocks.out, plain.out, strict=True))
    assert_same(blocks.state, plain.state)


def test_tables_are_those_of_the_torch_backend(folder: Path) -> None:
    """A row takes the lowest free block, and gives it back when it is empty, for any other."""
    (_, ours, by_triton), (_, theirs, by_torch) = (small(folder, "staged", 1, name) for name in ("triton", "torch"))
    tables = set()
    for seed in (1, 2, 4, 5, 7, 8):  # without padding, for which torch looks for places, too
        ours.steps(seed)
        theirs.steps(seed)
        assert torch.equal(by_triton.table, by_torch.table)
        tables.add(tuple(by_triton.table.flatten().tolist()))
    assert len(tables) > 2, "no block has come or gone"


def test_several_tokens_at_once_then_other_rows_and_steps_back(folder: Path) -> None:
    plain, blocks, _ = small(folder, "staged", 2)
    for run in (plain, blocks):
        run.out.append(run.backend.decode(run.state, run.call(3, 7)))
        run.state.select_rows(torch.tensor([1, 1, 0]))
    log = UndoLog(4)
    for seed in (1, 2):
        log.note(blocks.state)
        blocks.steps(seed)
    log.take_back(blocks.state, 2)
    check_pool(blocks.state)
    plain.steps(5)
    blocks.steps(5)
    assert_same(blocks.state, plain.state)
