"""Keys and values in fewer bits, in Triton's interpreter: against the reference interpreter, and against the bytes that torch stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.state.undo import UndoLog
from tests.differential.cases import Case, compare
from tests.differential.test_kv_dtype import PACKED, drawn
from tests.differential.test_random import load, random_case
from tests.differential.traces import run_policy
from tests.quick import few
from tests.runtime.test_blocks import Run, assert_same, folder
from tests.runtime.test_kv_dtype import made

from .interpreter import defined, with_kernels

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("small_blocks")

SMALL = {"budget": 12, "prompt": 20, "steps": 5, "kv_heads": 1}
CASES = {
    "groups of dims": Case("roco", head_dim=64, value_dim=48, group=2, **SMALL),
    "padding": Case("roco", head_dim=80, batch=2, padding=3, sinks=True, softcap=5.0, **SMALL),
    "infinite": Case("tova", head_dim=32, inputs="inf", seed=44, **SMALL),
    "not finite, in part": Case("tova", head_dim=80, inputs="nan", seed=7, **SMALL),
    "compact": Case("streaming_llm", head_dim=64, rope="half", **SMALL),
    "compact, pairs side by side": Case("streaming_llm", head_dim=32, rope="interleaved", **SMALL),
    "pages": replace(random_case("quest", 101), steps=4),
    "a sketch": replace(random_case("sparcas", 101), steps=4),
    "a sketch of what is left": replace(random_case("roco_sparcas", 101), steps=4),
    "compact, in part": Case("streaming_llm", head_dim=80, rope="partial", inputs="nan", **SMALL),
}


@pytest.mark.parametrize("kv_dtype", [*PACKED, "int8/int4"])
@pytest.mark.parametrize("name", few(CASES, "groups of dims", "compact"))
def test_shipped_policies(name: str, kv_dtype: str) -> None:
    case = replace(CASES[name], kv_dtype=kv_dtype, dtype=torch.float32)
    tally = compare(*load(case.policy), "triton", case)
    assert tally.steps and not tally.failures


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(5_000, 5_800, 100))
def test_random_policies(first: int, tmp_path: Path) -> None:
    served = 0
    for number in range(first, first + 8):
        policy, trace = drawn(number)
        spec = with_kernels(policy, tmp_path)
        if spec is None:
            continue
        trace, served = defined(trace), served + 1
        spec = spec.laid_out(kv_dtype=trace.kv_dtype)
        found = run_policy(policy, TritonBackend(spec, torch.device("cpu"), trace.dtype), trace, spec=spec)
        assert not found.failures, f"{number}\n{print_policy(policy)}\n{trace}\n{found.failures[:3]}"
    assert served


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("name", ["full", "roco", "staged"])
def test_torch_stores_the_same_bytes(folder: Path, name: str, kv_dtype: str) -> None:
    """In place and in blocks, also while a cache grows, and of rows that change places, as beams do."""
    runs = [
        made(folder, name, kv_dtype, *where)
        for where in (("torch",), ("triton",), ("torch", "blocks:5"), ("triton", "blocks:5"))
    ]
    order = torch.tensor([2, 0, 0])
    for run in runs:
        run.steps(1, 2, 3)
        run.state.select_rows(order)
        run.steps(4, 5)
    for theirs, ours in (runs[:2], runs[2:]):
        live = theirs.state.position >= 0
        assert torch.equal(theirs.state.position, ours.state.position)
        for mine, other in zip(rows_of(ours), rows_of(theirs), strict=True):
            assert mine.dtype == torch.uint8 and torch.equal(mine[live], other[live])


def rows_of(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a run, as bytes, by slot."""
    layout, slots = run.state.layout, run.state.slots
    return layout.keys(slots), layout.values(slots)


def test_steps_are_taken_back_to_the_bit(folder: Path) -> None:
    run, straight = (made(folder, "roco", "int4", "triton") for _ in range(2))
    log = UndoLog(5)
    for seed in (1, 2):
        log.note(run.state)
        run.steps(seed)
    log.take_back(run.state, 1)
    straight.steps(1)
    assert_same(run.state, straight.state)
    for one in (run, straight):
        one.steps(3)
    assert torch.equal(run.out[-1], straight.out[-1])
