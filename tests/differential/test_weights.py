"""Weights on what is attended to, on torch beside the interpreter: by group and by query head, with sinks of a model, padded, compact."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.compiler import package
from kvdsl.interp import Call, Interpreter, resolve
from kvdsl.ir.printer import print_policy
from kvdsl.runtime.torch.backend import TorchBackend
from tests.diagnostics.expect import policy
from tests.differential.traces import Trace, run_policy
from tests.quick import few

POLICIES = {
    "by key": ("select where norm2(k) > 2 or age < 3 weight norm2(v)",),
    "of a group": ("group max", "select top 7 by dot(q, k) weight exp(-scaling * dot(q, k))"),
    "of a query head": ("group each", "select where random() < 0.6 weight where(dot(q, k) > 0, 2, 0.5)"),
    "of some layers": ("select top 5 by position weight age + 1 in layers 2..",),
    "that evicts": (
        "param budget = 9",
        "score sum(attn)",
        "select where random() < 0.7 weight 1 / (age + 1)",
        "keep first 2",
    ),
    "at ranks": ("param budget = 9", "score sum(attn)", "positions compact", "select top 5 by -age weight position + 1"),
    "without a share": ("select where age < 9 weight where(age % 3 == 1, -1, 1 / (age % 3))",),
}
TRACES = (
    Trace(prompt=21, steps=8, batch=2, padding=3, layers=(1, 3), seed=4),
    Trace(prompt=19, steps=6, group=4, layers=(3,), sinks=True, inputs="peaky", later=5, seed=5),
)


@pytest.mark.parametrize("trace", few(TRACES, TRACES[0]), ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_torch(name: str, trace: Trace) -> None:
    found = run_policy(policy(*POLICIES[name]), TorchBackend(), trace)
    assert not found.failures, found.failures[0]
    assert found.steps and not found.refused


def test_a_weight_counts_as_so_many_tokens() -> None:
    """A token of weight 3 is as three of its kind; one whose weight is no positive number is as none."""
    weighed = policy("select where position >= 0 weight where(position == 1, 3, where(position == 2, -1, 1))")
    plain = policy("select where position >= 0")
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(2, 4)), rng.normal(size=(4, 4)), rng.normal(size=(4, 4))

    def out(machine: Interpreter, rows: list[int]) -> np.ndarray:
        head = machine.empty(4, 4)
        machine.prefill(head, np.zeros((len(rows) - 1, 2, 4)), k[rows[:-1]], v[rows[:-1]])
        return machine.decode(head, q, k[rows[-1]], v[rows[-1]]).out

    one, other = (Interpreter(found, resolve(found, {}, prompt=3), Call(scaling=0.5)) for found in (weighed, plain))
    np.testing.assert_allclose(out(one, [0, 1, 2, 3]), out(other, [0, 1, 1, 1, 3]))


def test_what_has_no_kernels_says_why() -> None:
    found = policy("select top 5 by dot(q, k) weight age + 1")
    files = package(found, print_policy(found))
    assert "kernels_torch.py" in files and "kernels_cpu.cpp" not in files and "kernels_triton.py" not in files
