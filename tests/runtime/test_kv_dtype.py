"""The option `kv_dtype` in every layout, and under what is done to a cache between its steps: rows of bytes move as others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.memory import KV_DTYPES, vector_bytes
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog
from tests.quick import few

from .test_blocks import DIM, GIVEN, Run, assert_same, folder, policy

__all__ = ["folder"]

PACKED = KV_DTYPES[1:]


def made(where: Path, name: str, kv_dtype: str, backend: str, storage: str = "in_place") -> Run:
    return Run(policy(where, name).spec.laid_out(storage, kv_dtype=kv_dtype), GIVEN[name], backend)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kv_dtype", few(PACKED, "int4"))
@pytest.mark.parametrize("name", few(["full", "roco", "capped"], "roco"))
def test_blocks_are_in_place_to_the_bit(folder: Path, name: str, kv_dtype: str, backend: str) -> None:
    """Also while a cache grows, and where slots are given back."""
    plain, blocks = (made(folder, name, kv_dtype, backend, storage) for storage in ("in_place", "blocks:5"))
    assert isinstance(blocks.state.layout, Blocks)
    for seed in range(1, 16):
        plain.steps(seed)
        blocks.steps(seed)
    assert all(torch.equal(found, expected) for found, expected in zip(blocks.out, plain.out, strict=True))
    assert_same(blocks.state, plain.state)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kv_dtype", few(PACKED, "int8"))
def test_memory_is_really_less(folder: Path, kv_dtype: str, backend: str) -> None:
    one, other = (made(folder, "roco", dtype, backend) for dtype in (kv_dtype, "model"))
    for run in (one, other):
        run.steps(1, 2)
    rows = one.state.position.numel()
    assert one.state.layout.key_pool.nbytes == rows * vector_bytes(kv_dtype, DIM)
    assert other.state.bytes() - one.state.bytes() == 2 * rows * (4 * DIM - vector_bytes(kv_dtype, DIM))
    assert one.state.dims == other.state.dims == (DIM, DIM)
    for pool in (other.state.layout.key_pool, other.state.layout.value_pool):
        assert pool.dtype == torch.float32 and pool.numel() == rows * DIM, "without the option a cache takes what it took"


@pytest.mark.parametrize("storage", ["in_place", "blocks:5"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_steps_are_taken_back_to_the_bit(folder: Path, backend: str, storage: str) -> None:
    """What is stored, and so what comes next. Rounding anew what was rounded would give other bytes."""
    run, straight = (made(folder, "roco", "int4", backend, storage) for _ in range(2))
    log = UndoLog(20)
    for seed in range(1, 9):
        log.note(run.state)
        run.steps(seed)
    log.take_back(run.state, 5)
    straight.steps(1, 2, 3)
    assert_same(run.state, straight.state)
    for seed in range(20, 26):
        run.steps(seed)
        straight.steps(seed)
        assert torch.equal(run.out[-1], straight.out[-1])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_rows_change_places(folder: Path, backend: str) -> None:
    """As beams do."""
    run, straight = (made(folder, "roco", "int8", backend) for _ in range(2))
    order = torch.tensor([2, 0, 0])
    for one in (run, straight):
        one.steps(1, 2)
    before = straight.state.layout.key_pool.clone()
    run.state.select_rows(order)
    assert torch.equal(run.state.layout.key_pool, before[order])
    call = run.call(1, 4)
    out = run.backend.decode(run.state, call)
    twin = call._replace(**{name: getattr(call, name)[[1, 2, 0]] for name in ("query", "key", "value")})
    assert torch.equal(straight.backend.decode(straight.state, twin)[order[:2]], out[:2])


@pytest.mark.parametrize("kv_dtype", few(PACKED, "int4"))
def test_a_token_takes_anothers_place(folder: Path, kv_dtype: str) -> None:
    """`replace` of the kernels writes what torch writes."""
    runs = [made(folder, "roco", kv_dtype, backend) for backend in ("torch", "cpu")]
    for run in runs:
        slots = (run.state.position >= 0).int().argmax(-1, keepdim=True)
        run.backend.replace(run.state, slots, run.call(1, 5))  # type: ignore[attr-defined]
    assert torch.equal(runs[0].state.layout.key_pool, runs[1].state.layout.key_pool)
    assert torch.equal(runs[0].state.layout.value_pool, runs[1].state.layout.value_pool)


def test_several_prompts_keep_what_was_rounded_once(folder: Path) -> None:
    """The next prompt moves the bytes of what was cached, and does not round it again."""
    run = made(folder, "full", "int4", "torch")
    before = run.state.layout.key_pool.clone()
    run.backend.prefill(run.state, run.call(7, 3))
    live = run.state.position[..., : before.shape[2]] >= 0
    held = run.state.layout.key_pool[:, :, : before.shape[2]][live]
    old = {tuple(row) for row in before.flatten(0, 2).tolist()}
    assert sum(tuple(row) in old for row in held.tolist()) >= 40 + 27 + 11


def test_what_is_refused(folder: Path) -> None:
    spec = policy(folder, "roco").spec
    with pytest.raises(KvdslError, match=r"`kv_dtype` is 'int3'; use `model`, `int8`, `int4` or `fp8`"):
        spec.laid_out(kv_dtype="int3")
    with pytest.raises(KvdslError, match="leave out `rope`"):
        kvdsl.load("streaming_llm").spec.laid_out(rope="cached", kv_dtype="int8")
    odd = spec.laid_out(kv_dtype="int4")
    with pytest.raises(KvdslError, match="packs dims in pairs, and the model's vectors have 7; give `int8`"):
        SlotState(odd, {"budget": 4.0}).format.rows(*torch.zeros(2, 1, 1, 1, 7))
