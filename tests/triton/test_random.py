"""Random policies of which no kernel was ever written by hand, in Triton's interpreter, step-locked with the reference interpreter; see
`tests.differential.test_policies`, and `tests.differential.traces` for the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from kvdsl.emit.package import package
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.spec import PolicySpec
from tests.differential.random_policies import policy_of
from tests.differential.test_random import commit_seed
from tests.differential.traces import random_trace, run_policy, spec_of

pytestmark = pytest.mark.usefixtures("small_blocks")

FEW, MANY = 1, 16
SOURCE = "kernels_triton.py"


def unlike_most(folder: Path) -> Iterator[tuple[str, Policy, PolicySpec]]:
    """Of the random policies those that only few shipped ones are like, as far as they have kernels."""
    for number in count():
        seed = f"{commit_seed()}-triton-{number}"
        policy = policy_of(seed, f"p{number}")
        if policy.positions != "compact" and policy.victims != "heads" and policy.storage != "blocks":
            continue
        files = package(policy, print_policy(policy))
        if SOURCE in files:
            source = folder / policy.stem / SOURCE
            source.parent.mkdir()
            source.write_text(files[SOURCE], encoding="utf-8")
            yield seed, policy, replace(spec_of(policy, files), triton_source=source)


@pytest.mark.parametrize(("first", "last"), [(0, FEW), pytest.param(FEW, MANY, marks=pytest.mark.slow)])
def test_the_kernels_do_what_the_interpreter_does(first: int, last: int, tmp_path: Path) -> None:
    for seed, policy, spec in islice(unlike_most(tmp_path), first, last):
        trace = random_trace(policy, seed)
        if trace.inputs == "inf":
            trace = replace(trace, inputs="nan")  # what remains of an infinite vector after a turn is not defined
        one = run_policy(policy, TritonBackend(spec, torch.device("cpu"), trace.dtype), trace, spec=spec)
        assert not one.failures, f"{seed}\n{print_policy(policy)}\n{trace}\n{one.failures[0]}"
