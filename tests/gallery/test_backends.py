"""The gallery, and what was found, on the backends: who stays is who stays in the interpreter, also padded, in half precision, in chats."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from kvdsl.compiler import analyse, find_policy, package
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.passes.fold import fold
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl.shipped import found_policies, gallery_policies
from tests.differential.traces import Trace, run_policy, spec_of
from tests.differential.units import build
from tests.gallery.formulas import METHODS
from tests.gallery.reusing import REUSING
from tests.quick import few

pytestmark = pytest.mark.nightly

STEMS = [path.stem for path in gallery_policies() + found_policies()]
SMALL: dict[str, dict[str, float]] = {
    "adakv_kvpress": {"budget": 8, "window": 3},
    "arkvale": {"tokens": 64},
    "cake": {"budget": 8, "window": 3},
    "compactor": {"budget": 8, "sinks": 2, "recent": 2, "chunk": 4},
    "criticaladakv": {"budget": 8, "window": 2},
    "double_sparsity": {"tokens": 6, "dims": 2},
    "keydiff_blocks": {"budget": 8, "block": 4},
    "locret": {"budget": 8, "chunk": 4, "stabilizers": 2},
    "fast_kvzip": {"budget": 8, "sinks": 2, "window": 2},
    "kvzip": {"budget": 8, "sinks": 2},
    "layer_budgets": {"budget": 40},
    "lava": {"budget": 8, "window": 3},
    "zigzagkv": {"budget": 8, "window": 3},
    "lm_infinite": {"budget": 8, "sinks": 2},
    "moba": {"page": 4, "chosen": 2},
    "oracle_topk": {"tokens": 6},
    "pyramidkv_kvpress": {"budget": 8, "window": 2, "beta": 3},
    "rocketkv": {"budget": 34, "tokens": 32, "dims": 2},
    "sparq": {"tokens": 6, "dims": 2, "recent": 2},
}
"""Params of those that no formula gives any."""

TRACES = (
    Trace(prompt=37, steps=8, batch=2, padding=3, layers=(1,), dtype=torch.bfloat16, rope="interleaved", seed=2),
    Trace(prompt=36, steps=5, group=4, layers=(3,), later=7, inputs="peaky", seed=3),
    Trace(prompt=37, steps=5, batch=2, padding=3, chunks=2, head_dim=40, later=7, kv_dtype="int4", seed=4),
)


@cache
def small(stem: str) -> Policy:
    """The policy with params of a size at which a few tokens are too many."""
    known_sizes = METHODS | REUSING
    params = known_sizes[stem].given if stem in known_sizes else SMALL.get(stem, {"budget": 8})
    known = {param.name for param in analyse(find_policy(stem)).policy.params}
    settings = {name: str(value) for name, value in params.items() if name in known}
    return fold(analyse(find_policy(stem), settings=settings).policy)


def through(stem: str, trace: Trace) -> Trace:
    """The trace, through several layers where these share a budget, or a choice."""
    policy = small(stem)
    return replace(trace, layers=(0, 1, 2)) if policy.across_layers is not None or policy.reuses else trace


@pytest.mark.parametrize("trace", few(TRACES, TRACES[0]), ids=str)
@pytest.mark.parametrize("stem", STEMS)
def test_torch(stem: str, trace: Trace) -> None:
    found = run_policy(small(stem), TorchBackend(), through(stem, trace))
    assert not found.failures, found.failures[0]
    assert found.steps and not found.refused


@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_cpp(trace: Trace) -> None:
    """All that have kernels, in one unit: building each alone would take minutes."""
    files = {stem: package(small(stem), print_policy(small(stem))) for stem in STEMS}
    fused = [stem for stem in STEMS if "kernels_cpu.cpp" in files[stem]]
    assert len(fused) >= 36
    specs = {stem: spec_of(small(stem), files[stem]).laid_out(kv_dtype=trace.kv_dtype) for stem in fused}
    backends = build({stem: (files[stem]["kernels_cpu.cpp"], specs[stem], trace.dtype) for stem in fused})
    for stem in fused:
        found = run_policy(small(stem), backends[stem], through(stem, trace), spec=specs[stem])
        assert not found.failures, f"{stem}: {trace}\n{found.failures[0]}"
        assert found.steps and not found.refused
