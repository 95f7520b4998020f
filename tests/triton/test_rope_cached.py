"""`rope="cached"` in Triton's interpreter: the kernels turn keys in registers, and keep no halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdsl.runtime.rope import Pairing
from tests.runtime.test_rope_cached import Run
from tests.runtime.test_rope_cached import specs as specs  # the fixture: EQUIP_H2O, and the same that keeps nothing

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]


@pytest.mark.parametrize(
    ("pairing", "dtype"), [("half", torch.float32), ("interleaved", torch.float32), ("half", torch.bfloat16)]
)
def test_cached_is_fused(specs: tuple[Any, Any], pairing: Pairing, dtype: torch.dtype) -> None:
    """To the bit, and near the torch backend, whose halves a step on another backend drops."""
    cached, fused = (Run(spec, "triton", pairing, dtype) for spec in specs)
    by_torch = Run(specs[0], "torch", pairing, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for seed in range(1, 4):
        out = cached.step(seed)
        assert torch.equal(out, fused.step(seed))
        assert (out - by_torch.step(seed)).abs().max() < tolerance
    assert not cached.state.half_keys.numel() and by_torch.state.half_keys.numel()
    by_torch.backend = cached.backend
    by_torch.step(4)
    assert not by_torch.state.half_keys.numel()
    assert not (cached.state.position - cached.state.rank)[cached.state.position >= 0].eq(0).all(), "nothing was ever turned"
