"""The contract of the table of operations, in Triton's interpreter; see `tests.differential.test_operations`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu import ops
from kvdsl.runtime.gpu.backend import TritonBackend
from tests.differential.operations import TRACE, WITHOUT_KERNELS, all_operations, trace_of
from tests.differential.traces import run_policy

from .interpreter import heads_for, with_kernels

pytestmark = pytest.mark.usefixtures("small_blocks")


@triton.jit
def _tanh(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, ops.tanh(tl.load(x + i)))


@triton.jit
def _acos(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, ops.acos(tl.load(x + i)))


def test_acos_is_right_to_two_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-1, 1, 8187), torch.tensor([1e-30, -0.0, 1.5, -1.5, float("nan")])])
    out = torch.empty_like(x)
    _acos[(1,)](x, out, N=len(x))
    exact = x.double().acos()
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double().clamp(min=1e-30)
    assert out[-3:].isnan().all()
    assert ((out.double() - exact).abs() / unit)[:-3].max() < 2


def test_tanh_is_right_to_five_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(0, 1, 2048), torch.logspace(-30, 1.5, 2048)])
    x = torch.cat([x, -x])
    out = torch.empty_like(x)
    _tanh[(1,)](x, out, N=len(x))
    exact = x.double().tanh()
    assert float(((out - exact).abs() / exact.abs().clamp(min=1e-300)).max()) <= 5 * 2**-24
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    _tanh[(1,)](ends, out, N=4)
    assert out[:2].tolist() == [1, -1] and out[2].isnan() and out[3] == 0


@triton.jit
def _count_power(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, ops.count_power(tl.load(x + i), tl.load(y + i)))


def test_a_power_that_is_a_whole_number_is_one_in_a_count() -> None:
    """Of which a floor is taken: by logarithms the root of 256 is 15.999999999999998."""
    numbers = [(float(n * n), 0.5) for n in range(1, 400)] + [(float(n), 3.0) for n in range(-50, 50)]
    numbers += [(2.0, float(n)) for n in range(-20, 40)] + [(0.0, 2.0), (0.0, 0.0), (10.0, 9.0)]
    others = [(2.0, 0.5), (3.0, -1.5), (0.999999, 40.0), (1e300, 2.0), (float("inf"), 1.0), (-2.0, 0.5), (0.0, -1.0)]
    numbers += others + [(1.0, 1.0)] * (1024 - len(numbers) - len(others))
    x, y = torch.tensor(numbers, dtype=torch.float64).T.contiguous()
    out = torch.empty_like(x)
    _count_power[(1,)](x, y, out, N=len(numbers))
    exact = x.pow(y)
    whole = exact == exact.floor()
    assert torch.equal(out[whole], exact[whole]) and int(whole.sum()) > 500
    torch.testing.assert_close(out, exact, rtol=1e-14, atol=0, equal_nan=True)
    assert out[~whole & exact.isfinite()].frac().count_nonzero() == int((~whole & exact.isfinite()).sum())


OPERATIONS = dict(all_operations())
FAST = ("std over slots", "max_pool", "ema over queries", "var over the last N queries", "a tensor in a budget")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in OPERATIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_do_what_the_interpreter_does(name: str, tmp_path: Path) -> None:
    policy = OPERATIONS[name]
    spec = with_kernels(policy, tmp_path)
    assert (spec is None) == (name in WITHOUT_KERNELS["triton"])
    if spec is None:
        return  # it says why: tests/differential/test_operations.py
    trace = replace(trace_of(policy), kv_heads=heads_for(policy))
    one = run_policy(policy, TritonBackend(spec, torch.device("cpu"), TRACE.dtype), trace, spec=spec)
    assert one.steps
    assert not one.failures, f"{print_policy(policy)}\n{one.failures[0]}"
