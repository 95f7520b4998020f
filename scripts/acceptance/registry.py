"""What a criterion is, and what the criteria share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PASS, FAIL, OPEN, HELD = "pass", "fail", "open", "held"


class NotMeasured(Exception):
    """A criterion that cannot be measured here or now, and why."""


Measured = tuple[Any, str, bool]
"""The value, the bound in words, and whether it holds."""


@dataclass(frozen=True)
class Criterion:
    """One bullet of an issue, or a part of it.

    Attributes:
        measure: None where tests hold it.
        tests: those tests, as `FOLDER/FILE.py::NAME` below tests/.
    """

    issue: int
    name: str
    measure: Callable[[], Measured] | None = None
    tests: tuple[str, ...] = ()


CRITERIA: list[Criterion] = []


def criterion(issue: int, name: str) -> Callable[[Callable[[], Measured]], Callable[[], Measured]]:
    """Register a function that measures something."""

    def register(measure: Callable[[], Measured]) -> Callable[[], Measured]:
        CRITERIA.append(Criterion(issue, name, measure))
        return measure

    return register


def held(issue: int, name: str, *tests: str) -> None:
    """Register what tests hold: `make test`, `make test-nightly` and CI say whether it does."""
    CRITERIA.append(Criterion(issue, name, tests=tests))


@dataclass(frozen=True)
class Result:
    """What measuring a criterion gave."""

    issue: int
    name: str
    value: Any
    bound: str
    verdict: str
    seconds: float


def judge(one: Criterion) -> Result:
    """Measure a criterion; whatever goes wrong is its value."""
    if one.measure is None:
        absent = [test for test in one.tests if not exists(test)]
        value = f"there is no {', '.join(absent)}" if absent else ", ".join(f"tests/{test}" for test in one.tests)
        return Result(one.issue, one.name, value, "tests", FAIL if absent else HELD, 0.0)
    begun = time.perf_counter()
    try:
        value, bound, ok = one.measure()
        verdict = PASS if ok else FAIL
    except NotMeasured as reason:
        value, bound, verdict = str(reason), "", OPEN
    except Exception as error:
        value, bound, verdict = f"{type(error).__name__}: {str(error).strip()[:300]}", "", FAIL
    return Result(one.issue, one.name, value, bound, verdict, round(time.perf_counter() - begun, 1))


def exists(test: str) -> bool:
    """Whether there is such a test, or such a file of tests."""
    name, _, function = test.partition("::")
    path = REPO / "tests" / name
    return path.exists() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


# -- bounds ------------------------------------------------------------------------------------------------------------


def at_least(value: float, bound: float) -> Measured:
    """The value and whether it reaches the bound."""
    return value, f">= {bound:g}", value >= bound


def below(value: float, bound: float, unit: str = "") -> Measured:
    """The value and whether it stays under the bound."""
    return value, f"< {bound:g}{unit}", value < bound


# -- commands ----------------------------------------------------------------------------------------------------------


def run(*words: str, env: dict[str, str] | None = None, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """A Python command line in the repository's root."""
    command = [sys.executable, *words]
    variables = {**os.environ, **(env or {})}
    return subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=timeout, check=False)


def kvdsl_json(*words: str) -> dict[str, Any]:
    """What a `kvdsl ... --json` command printed."""
    done = run("-m", "kvdsl", *words, "--json")
    if done.returncode:
        raise RuntimeError(f"kvdsl {' '.join(words)} exited with {done.returncode}: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def median_seconds(*words: str, repeats: int = 5) -> float:
    """How long a command takes, start to end."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        done = run(*words)
        times.append(time.perf_counter() - begun)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}: {done.stderr.strip()[-300:]}")
    return round(sorted(times)[repeats // 2], 3)
