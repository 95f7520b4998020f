"""Random policies: the checker takes what the strategy makes, and every backend does what the interpreter does.

`scripts/fuzz/policies.py` runs many more. A policy that ever failed is in test_found_bugs.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvdsl.compiler import analyse, package
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.passes.fold import fold
from kvdsl.runtime.torch import settle as settling
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl.runtime.torch.columns import Columns
from kvdsl.runtime.torch.visible import Visible
from kvdsl.source import SourceFile
from scripts.fuzz import policies as fuzz
from tests.quick import few

from .random_policies import policies, policy_of
from .random_texts import policy_with_score
from .tensors import BESIDE
from .test_random import draws_seed
from .traces import RANDOM_INPUTS, Tally, Trace, random_trace, run_policy, spec_of
from .units import build

pytestmark = pytest.mark.nightly

CHUNKS, PER_CHUNK = 4, 45
UNITS, PER_UNIT = 2, 20
NEAR_SHARE = 0.05  # of so few policies; the long run's share, which is reported, is a tenth of it


def quickly(examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@seed(draws_seed())
@quickly(150)
@given(policies())
def test_the_checker_accepts_them_and_reads_them_back(policy: Policy) -> None:
    again = analyse(SourceFile("p.kv", print_policy(policy), BESIDE))
    assert again.ok, [found.message for found in again.diagnostics]
    assert fold(again.policy) == policy


@pytest.mark.parametrize("chunk", few(range(CHUNKS), 0))
def test_torch_does_what_the_interpreter_does(chunk: int, record_property: pytest.RecordProperty) -> None:
    total = Tally()

    @seed(draws_seed() + chunk)
    @quickly(PER_CHUNK)
    @given(policies(), st.integers(0, 10**6))
    def run(policy: Policy, number: int) -> None:
        trace = random_trace(policy, str(number))
        one = run_policy(policy, TorchBackend(), trace)
        assert not one.failures, f"{print_policy(policy)}\n{trace}\n{one.failures[0]}"
        if trace.inputs in RANDOM_INPUTS:
            total.add(one)

    run()
    served(total)
    record_property("head_steps", total.steps)
    record_property("near", total.near)


@pytest.mark.parametrize("unit", few(range(UNITS), 0))
def test_the_fused_kernels_do_what_the_interpreter_does(unit: int) -> None:
    """What has no fused kernel is left out here: torch serves it."""
    seeds = [f"{draws_seed()}-{unit}-{number}" for number in range(2 * PER_UNIT)]
    made = {f"p{number}": policy_of(text, f"p{number}", fused=True) for number, text in enumerate(seeds)}
    traces = {stem: random_trace(policy, f"{draws_seed()}-{stem}") for stem, policy in made.items()}
    files = {stem: package(policy, print_policy(policy)) for stem, policy in made.items()}
    fused = [stem for stem in made if "kernels_cpu.cpp" in files[stem]][:PER_UNIT]
    assert len(fused) == PER_UNIT
    specs = {stem: spec_of(made[stem], files[stem]) for stem in fused}
    backends = build({stem: (files[stem]["kernels_cpu.cpp"], specs[stem], traces[stem].dtype) for stem in fused})
    total = Tally()
    for stem in fused:
        one = run_policy(made[stem], backends[stem], traces[stem], spec=specs[stem])
        assert not one.failures, f"{print_policy(made[stem])}\n{traces[stem]}\n{one.failures[0]}"
        total.add(one)
    served(total)


def test_what_the_checker_accepts_is_served() -> None:
    """Scores as one would type them, most of which are refused; the other random policies are legal by construction."""
    trace, total = Trace(prompt=7, steps=4, batch=2, padding=2, seed=3), Tally()
    for number in range(100):
        policy = policy_with_score(f"{draws_seed()}-{number}")
        one = run_policy(policy, TorchBackend(), trace)
        assert not one.failures, f"{print_policy(policy)}\n{one.failures[0]}"
        total.add(one)
    served(total)


def served(total: Tally) -> None:
    """Most traces are run: a cache refuses few of them, for what a policy protects."""
    assert total.steps > 0
    assert total.refused <= total.traces / 4, f"{total.refused} of {total.traces} are refused"


def test_the_long_run_takes_what_reads_a_file() -> None:
    """The script goes the way that a file takes; a tensor's lies beside its policy."""
    drawn = (fuzz.drawn(0, number) for number in range(100))
    policy = next(policy for policy in drawn if policy.tensors)
    assert "torch" in fuzz.Compiled.of(policy, "0", "model").claimed


# -- the comparison itself ---------------------------------------------------------------------------------------------


def _oldest_for_last(columns: Columns, name: str, x: torch.Tensor) -> None:
    Columns.max(columns, name, x)


def _mean_of_one_more(visible: Visible, op: str, x: torch.Tensor, **axes: Any) -> torch.Tensor:
    found = REAL_OVER_SLOTS(visible, op, x, **axes)
    return found * 0.999 if op == "mean" else found


def _newer_leaves_first(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return REAL_GRADE(x, 10**6 - position)


def _protects_one_fewer(protection: settling.Protection, by: Any, count: Any) -> None:
    REAL_TOP(protection, by, count - 1)


REAL_OVER_SLOTS, REAL_GRADE, REAL_TOP = Visible.over, settling.grade, settling.Protection.top

PLANTED: dict[str, tuple[object, str, Any]] = {
    "a column by another rule": (Columns, "last", _oldest_for_last),
    "a mean that is off by a thousandth": (Visible, "over", _mean_of_one_more),
    "ties the other way": (settling, "grade", _newer_leaves_first),
    "one token less protected": (settling.Protection, "top", _protects_one_fewer),
}


SAYS = {"a mean that is off by a thousandth": r"mean\(.* over slots"}
"""What a policy must say for a bug to show in it, where few do."""


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are too wide would excuse anything."""
    monkeypatch.setattr(*PLANTED[name])
    for number in range(400):
        policy = policy_of(f"planted-{number}")
        if not re.search(SAYS.get(name, ""), print_policy(policy)):
            continue  # it cannot show
        if run_policy(policy, TorchBackend(), random_trace(policy, f"planted-{number}")).failures:
            return
    pytest.fail("nothing was found")


def test_the_interpreter_lies_within_its_bounds() -> None:
    """Its own steps beside what arithmetic allows them; most of them have one outcome only."""
    total = Tally()
    for number in range(20):
        policy = policy_of(f"{draws_seed()}-{number}")
        trace = random_trace(policy, f"{draws_seed()}-{number}")
        if trace.inputs in RANDOM_INPUTS:
            total.add(run_policy(policy, TorchBackend(), trace, check=True))
    assert not total.failures, f"KVDSL_TEST_SEED={draws_seed()}\n" + "\n".join(total.failures)
    if draws_seed() == 0:  # of 20 policies drawn anew a single one may be near a boundary at every step
        assert total.undecided < 0.5 * total.checked
        assert total.near <= NEAR_SHARE * total.steps, f"{total.near} of {total.steps} head-steps were near a boundary"
