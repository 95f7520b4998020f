"""`rope="cached"`: rotated halves that are kept give what turning the keys anew gives, for half as much memory again.

To the bit on the torch backend; in C++ up to the order in which two products are added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Pairing, Rope
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog
from tests.quick import few

HEADS, DIM = 2, 24


@pytest.fixture(scope="session")
def specs() -> tuple[Any, Any]:
    """EQUIP_H2O that keeps rotated halves, and the same that turns keys whenever it reads them."""
    spec = kvdsl.load("equip_h2o").spec
    return spec.laid_out(rope="cached"), spec.laid_out(rope="fused")


class Run:
    """Two rows, one of them padded, and tokens after the prompt, some of them padding."""

    def __init__(
        self, spec: Any, backend: str = "torch", pairing: Pairing = "half", dtype: torch.dtype = torch.float32
    ) -> None:
        self.rope = Rope(100.0 ** -(torch.arange(8, dtype=torch.float64) / 8), pairing, 4)  # 16 of 24 dims
        self.state, self.dtype = SlotState(spec, {"budget": 12.0, "recent": 4.0}), dtype
        self.backend = choose(spec, backend, torch.device("cpu"), dtype)
        real = torch.arange(30) >= torch.tensor([[0], [7]])
        self.backend.prefill(self.state, self.call(30, 0, real))

    def call(self, tokens: int, seed: int, real: Tensor | None) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        key, value = torch.randn(2, 2, HEADS, tokens, DIM, generator=make).to(self.dtype)
        query = torch.randn(2, HEADS * 2, tokens, DIM, generator=make).to(self.dtype)
        return AttentionCall(query, key, value, real, 0.2, rope=self.rope)

    def step(self, seed: int) -> Tensor:
        return self.backend.decode(self.state, self.call(1, seed, torch.tensor([[True], [seed % 5 != 0]])))


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16, torch.float16], torch.float32), ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_cached_is_fused_to_the_bit(specs: tuple[Any, Any], pairing: Pairing, dtype: torch.dtype) -> None:
    cached, fused = (Run(spec, pairing=pairing, dtype=dtype) for spec in specs)
    for seed in range(1, 30):
        assert torch.equal(cached.step(seed), fused.step(seed))
        assert torch.equal(cached.state.position, fused.state.position)
        assert torch.equal(cached.state.half_keys, cached.rope.rotate_half(cached.state.keys))
    assert not (cached.state.position - cached.state.rank)[cached.state.position >= 0].eq(0).all(), "nothing was ever turned"


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16, torch.float16], torch.float32), ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_kernels_with_halves_and_without_agree(specs: tuple[Any, Any], pairing: Pairing, dtype: torch.dtype) -> None:
    """C++ with halves, C++ without, torch; what the kernel keeps are the halves of its keys, to the bit."""
    cached, fused = (Run(spec, "cpu", pairing, dtype) for spec in specs)
    by_torch = Run(specs[0], "torch", pairing, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for seed in range(1, 30):
        out = cached.step(seed)
        assert (out - fused.step(seed)).abs().max() < tolerance
        assert (out - by_torch.step(seed)).abs().max() < tolerance
    assert torch.equal(cached.state.half_keys, cached.rope.rotate_half(cached.state.keys))
    assert not (cached.state.position - cached.state.rank)[cached.state.position >= 0].eq(0).all(), "nothing was ever turned"


def test_the_kernel_reads_the_halves(specs: tuple[Any, Any]) -> None:
    """With halves that are no halves it gives something else: it does not turn keys as it reads them."""
    right, wrong = (Run(specs[0], "cpu") for _ in range(2))
    for seed in range(1, 10):
        right.step(seed)
        wrong.step(seed)
    wrong.state.half_keys.zero_()
    assert (right.step(20) - wrong.step(20)).abs().max() > 1e-2


def test_backends_may_take_turns(specs: tuple[Any, Any]) -> None:
    """They keep the same halves."""
    cached, fused = (Run(spec) for spec in specs)
    kernel, by_torch = choose(specs[0], "cpu", torch.device("cpu"), torch.float32), cached.backend
    for seed in range(1, 20):
        cached.backend = kernel if seed % 3 else by_torch
        assert (cached.step(seed) - fused.step(seed)).abs().max() < 1e-5


def test_what_it_takes(specs: tuple[Any, Any]) -> None:
    """The rotated dims of every key once more: half of keys and values, where all dims rotate."""
    cached, fused = (Run(spec) for spec in specs)
    cached.step(1)
    fused.step(1)
    assert cached.state.bytes() - fused.state.bytes() == cached.state.keys.nbytes * 16 // DIM


def test_halves_go_along_with_rows_and_back(specs: tuple[Any, Any]) -> None:
    cached, fused = (Run(spec) for spec in specs)
    logs = [UndoLog(20), UndoLog(20)]
    for run, log in zip((cached, fused), logs, strict=True):
        run.step(1)
        run.state.select_rows(torch.tensor([1, 0]))
        for seed in range(2, 9):
            log.note(run.state)
            run.step(seed)
        log.take_back(run.state, 5)
    for seed in range(20, 26):
        assert torch.equal(cached.step(seed), fused.step(seed))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_in_blocks_as_well(specs: tuple[Any, Any], backend: str) -> None:
    spec = specs[0].laid_out("blocks:4")
    blocks, plain = Run(spec, backend), Run(specs[0], backend)
    blocks.state = slot_state(spec, {"budget": 12.0, "recent": 4.0})
    blocks.backend.prefill(blocks.state, blocks.call(30, 0, torch.arange(30) >= torch.tensor([[0], [7]])))
    for seed in range(1, 15):
        assert torch.equal(blocks.step(seed), plain.step(seed))


def test_edition_1_states_the_default(tmp_path: Path) -> None:
    file = tmp_path / "halves.kv"
    file.write_text('kv 1\nimport equip_h2o\n\npolicy Halves extends EQUIP_H2O {\n  """Kept."""\n  rope cached\n}\n')
    found = kvdsl.load(file).spec
    assert found.rope_cached and not found.laid_out(rope="fused").rope_cached


def test_what_is_never_turned_has_no_halves() -> None:
    with pytest.raises(KvdslError, match=r"H2O uses positions in the text.*leave out `rope`"):
        kvdsl.load("h2o", rope="cached")
    assert kvdsl.load("h2o", rope="fused") is kvdsl.load("h2o")
    with pytest.raises(KvdslError, match="`rope` is 'kept'; use `fused` or `cached`"):
        kvdsl.load("equip_h2o", rope="kept")
