"""What a token has by itself is what the interpreter says, to the bit; and who stays is who stays on the other backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.differential.token_columns import ALONE, check, policy_of, repeated, spec_of
from tests.quick import few

SIZES = ((torch.float32, 7, 5), (torch.bfloat16, 80, 33))


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "key_dim", "value_dim"), few(SIZES, SIZES[0]), ids=str)
@pytest.mark.parametrize("name", [*ALONE, "vatp_h2o"])
def test_columns_are_the_interpreters_to_the_bit(
    name: str, dtype: torch.dtype, key_dim: int, value_dim: int, tmp_path: Path
) -> None:
    spec = spec_of(name, tmp_path)
    state = repeated(spec, "triton", dtype, key_dim, value_dim, steps=4)
    check(policy_of(name, tmp_path), state)
    if name in ALONE:
        others = repeated(spec, "torch", dtype, key_dim, value_dim, steps=4)
        assert torch.equal(state.position.sort(-1).values, others.position.sort(-1).values)
