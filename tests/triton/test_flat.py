"""Heads of different lengths in one flat array: the kernels find them there."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.test_flat import assert_same, pair

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]


def test_heads_of_different_lengths() -> None:
    flat, padded = pair("triton")
    for run in (flat, padded):
        run.steps(1, 2, 3)
        run.state.select_rows(torch.tensor([1, 0]))
        run.steps(4, 5)
    assert_same(flat, padded)
