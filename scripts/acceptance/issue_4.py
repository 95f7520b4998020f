"""The whole language, and every policy of the papers."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from acceptance.registry import REPO, Measured, NotMeasured, criterion, run

RESULTS = REPO / "benchmarks/results/fuzz"

# -- policies ----------------------------------------------------------------------------------------------------------


@criterion(4, "every policy compiles and generates with `kvdsl run` on the reference model")
def _runs() -> Measured:
    from kvdsl.compiler import shipped_policies

    stems, wrong = [path.stem for path in shipped_policies()], []
    for stem in stems:
        done = run("-m", "kvdsl", "run", "--policy", stem, "--max-new-tokens", "8", "--json")
        if done.returncode or json.loads(done.stdout)["new_tokens"] < 1:
            wrong.append(f"{stem}: exit {done.returncode}")
    return "; ".join(wrong) or f"{len(stems)} run", "all", not wrong


# -- random policies and inputs ----------------------------------------------------------------------------------------


@lru_cache
def _long_run(name: str) -> dict[str, Any]:
    """A long run's result, which is committed: it takes an hour."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise NotMeasured(f"there is no {path.relative_to(REPO)}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _differences(name: str, least: int) -> None:
    @criterion(4, f"a long run of random policies, {name}: policies, steps near a boundary, differences (committed result)")
    def _() -> Measured:
        found = _long_run(f"policies_{name}")
        value = (
            f"{found['policies']:,} policies, {found['natural_inputs']['near_share']:.2%} near, {found['failures']} differ"
        )
        return value, f">= {least:,}, 0 differ", found["policies"] >= least and found["failures"] == 0


_differences("torch", 50_000)
_differences("cpu", 3_000)


@criterion(4, "mutated inputs through check: inputs, failures, the slowest in seconds (committed result)")
def _inputs() -> Measured:
    found = _long_run("check")
    slowest = max(one["s"] for one in found["slowest"])
    return (
        f"{found['inputs']:,} inputs, {found['failed']} failures, {slowest:.2f} s",
        ">= 1,000,000, 0, <= 1 s",
        found["inputs"] >= 1_000_000 and found["failed"] == 0 and slowest <= 1,
    )
