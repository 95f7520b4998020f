"""Keys and values in fewer bits: every backend that reads them against the interpreter, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvdsl.compiler import package
from kvdsl.interp.rounding import rounded
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.memory import KV_DTYPES, vector_bytes
from kvdsl.runtime.state.packed import dims_of, pack, unpack
from kvdsl.runtime.torch.backend import TorchBackend
from tests.quick import few

from .inputs import INPUTS
from .random_policies import policy_of
from .test_random import PAIRS, draws_seed, random_case, run
from .traces import Trace, in_fewer_bits, random_trace, run_policy, spec_of
from .units import build

PACKED = KV_DTYPES[1:]
DIMS = (2, 6, 8, 24, 32, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("inputs", few(sorted(INPUTS), "normal", "nan", "inf"))
def test_bytes_hold_what_the_interpreter_rounds_to(kv_dtype: str, inputs: str) -> None:
    """To the bit, at every size and scale; and as many bytes as is said."""
    rng = np.random.default_rng(3)
    for dims in DIMS:
        for scale in (1.0, 1e-3, 1e30, 1e-30, 1e-38):
            x = (INPUTS[inputs](rng, (40, dims)) * np.exp(rng.standard_normal(dims)) * scale).astype(np.float32)
            rows = pack(torch.from_numpy(x), kv_dtype)
            assert rows.dtype == torch.uint8 and rows.shape == (40, vector_bytes(kv_dtype, dims))
            assert dims_of(rows.shape[1], kv_dtype) == dims
            expected = rounded(x.astype(np.float64), kv_dtype)
            assert np.array_equal(unpack(rows, kv_dtype).double().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.0065), ("fp8", 0.027), ("int4", 0.088)])
def test_how_far_numbers_are_rounded(kv_dtype: str, most: float) -> None:
    """Of normal numbers; with a large dim in each vector, int4 stays as good, since it spreads that one over all others."""
    x = np.random.default_rng(0).standard_normal((2_000, 64))
    apart = [
        np.sqrt(np.mean((rounded(y, kv_dtype) - y) ** 2) / np.mean(y**2))
        for y in (x, x * np.where(np.arange(64) == 5, 9, 1))
    ]
    assert most * 0.9 < apart[0] < most
    if kv_dtype == "int4":
        assert apart[1] < 1.1 * apart[0]


@pytest.mark.parametrize("kv_dtype", [*PACKED, "int8/int4"])
@pytest.mark.parametrize(
    ("policy", "backend"),
    few(PAIRS, ("roco", "torch"), ("roco", "cpu"), ("streaming_llm", "cpu"), ("quest", "cpu"), ("sparcas", "cpu")),
)
def test_shipped_policies(policy: str, backend: str, kv_dtype: str) -> None:
    cases = [replace(random_case(policy, number), kv_dtype=kv_dtype, dtype=torch.float32) for number in range(40, 44)]
    tally = run(backend, cases)
    assert not tally.failures and tally.steps


def drawn(number: int, *, fused: bool = False) -> tuple[Policy, Trace]:
    """A random policy and a trace of a cache in a random `kv_dtype`."""
    policy = policy_of(f"bits-{draws_seed()}-{number}", f"p{number}", fused=fused)
    return in_fewer_bits(policy, random_trace(policy, str(number)))


@pytest.mark.parametrize("unit", few(range(4)))
def test_random_policies_in_cpp(unit: int) -> None:
    made = {policy.stem: (policy, trace) for policy, trace in (drawn(1_000 * unit + n, fused=True) for n in range(60))}
    files = {stem: package(policy, print_policy(policy)) for stem, (policy, _) in made.items()}
    stems = [stem for stem in files if "kernels_cpu.cpp" in files[stem]][:20]
    assert len(stems) == 20
    specs = {stem: spec_of(made[stem][0], files[stem]).laid_out(kv_dtype=made[stem][1].kv_dtype) for stem in stems}
    backends = build({stem: (files[stem]["kernels_cpu.cpp"], specs[stem], torch.float32) for stem in stems})
    for stem in stems:
        policy, trace = made[stem]
        found = run_policy(policy, backends[stem], trace, spec=specs[stem])
        assert not found.failures, f"{print_policy(policy)}\n{trace}\n{found.failures[:3]}"


@pytest.mark.parametrize("first", few(range(0, 300, 20), 0))
def test_random_policies(first: int) -> None:
    for number in range(first, first + 20):
        policy, trace = drawn(number)
        found = run_policy(policy, TorchBackend(), trace)
        assert not found.failures, f"{number}: {trace}: {found.failures[:3]}"
