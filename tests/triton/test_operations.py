"""The contract of the table of operations, in Triton's interpreter; see `tests.differential.test_operations`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.backend import TritonBackend
from tests.differential.operations import TRACE, all_operations
from tests.differential.traces import run_policy

from .interpreter import with_kernels

pytestmark = pytest.mark.usefixtures("small_blocks")

OPERATIONS = dict(all_operations())
FAST = ("std over slots", "ema over queries", "var over the last N queries", "a tensor in a budget")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OPERATIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_do_what_the_interpreter_does(name: str, tmp_path: Path) -> None:
    policy = OPERATIONS[name]
    spec = with_kernels(policy, tmp_path)
    if spec is None:
        return  # it says why: tests/differential/test_operations.py
    one = run_policy(policy, TritonBackend(spec, torch.device("cpu"), TRACE.dtype), TRACE, spec=spec)
    assert not one.failures, f"{print_policy(policy)}\n{one.failures[0]}"
