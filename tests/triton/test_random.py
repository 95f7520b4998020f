"""Random policies of which no kernel was ever written by hand, in Triton's interpreter, step-locked with the reference interpreter; see
`tests.differential.test_policies`, and `tests.differential.traces` for the rule. `scripts/fuzz/policies.py --backend triton` runs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.spec import PolicySpec
from tests.differential.random_policies import policy_of
from tests.differential.test_random import draws_seed
from tests.differential.traces import random_trace, run_policy

from .interpreter import defined, with_kernels

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]

FEW, MANY = 1, 16


def unlike_most(folder: Path) -> Iterator[tuple[str, Policy, PolicySpec]]:
    """Of the random policies those that only few shipped ones are like, as far as they have kernels."""
    for number in count():
        seed = f"{draws_seed()}-triton-{number}"
        policy = policy_of(seed, f"p{number}")
        if policy.positions != "compact" and policy.victims != "heads" and policy.storage != "blocks":
            continue
        spec = with_kernels(policy, folder)
        if spec is not None:
            yield seed, policy, spec


@pytest.mark.parametrize(("first", "last"), [(0, FEW), pytest.param(FEW, MANY, marks=pytest.mark.nightly)])
def test_the_kernels_do_what_the_interpreter_does(first: int, last: int, tmp_path: Path) -> None:
    for seed, policy, spec in islice(unlike_most(tmp_path), first, last):
        trace = defined(random_trace(policy, seed))
        one = run_policy(policy, TritonBackend(spec, torch.device("cpu"), trace.dtype), trace, spec=spec)
        assert not one.failures, f"{seed}\n{print_policy(policy)}\n{trace}\n{one.failures[0]}"
