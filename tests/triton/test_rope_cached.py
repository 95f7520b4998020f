"""Rotated halves in the kernels, in Triton's interpreter: `attend` reads what `settle` keeps, and says what turning the keys says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdsl.runtime.rope import Pairing
from kvdsl.runtime.state.undo import UndoLog
from tests.runtime.test_rope_cached import Run
from tests.runtime.test_rope_cached import specs as specs  # the fixture: EQUIP_H2O, and the same that keeps nothing

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]


@pytest.mark.parametrize(
    ("pairing", "dtype"), [("half", torch.float32), ("interleaved", torch.float32), ("half", torch.bfloat16)]
)
def test_cached_is_fused(specs: tuple[Any, Any], pairing: Pairing, dtype: torch.dtype) -> None:
    """With halves and without to the bit, and near the torch backend; what is kept are the halves of the keys."""
    cached, fused = (Run(spec, "triton", pairing, dtype) for spec in specs)
    by_torch = Run(specs[0], "torch", pairing, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for seed in range(1, 4):
        out = cached.step(seed)
        assert torch.equal(out, fused.step(seed))
        assert (out - by_torch.step(seed)).abs().max() < tolerance
    assert torch.equal(cached.state.half_keys, cached.rope.rotate_half(cached.state.keys))
    assert not (cached.state.position - cached.state.rank)[cached.state.position >= 0].eq(0).all(), "nothing was ever turned"


def test_the_kernel_reads_the_halves(specs: tuple[Any, Any]) -> None:
    """With halves that are no halves it gives something else; they are forgotten when a step is taken back, and made anew."""
    right, wrong = (Run(specs[0], "triton") for _ in range(2))
    log = UndoLog(1)
    log.note(wrong.state)
    wrong.state.half_keys.zero_()
    expected = right.step(1)
    assert (expected - wrong.step(1)).abs().max() > 1e-2
    log.take_back(wrong.state, 1)
    assert torch.equal(expected, wrong.step(1))
