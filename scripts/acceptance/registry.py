"""What a criterion is, and what the criteria share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PASS, FAIL, OPEN = "pass", "fail", "open"


class NotMeasured(Exception):
    """A criterion that cannot be measured here or now, and why."""


Measured = tuple[Any, str, bool]
"""The value, the bound in words, and whether it holds."""


@dataclass(frozen=True)
class Criterion:
    """One bullet of an issue, or a part of it."""

    issue: int
    name: str
    measure: Callable[[], Measured]


CRITERIA: list[Criterion] = []


def criterion(issue: int, name: str) -> Callable[[Callable[[], Measured]], Callable[[], Measured]]:
    """Register a function that measures something."""

    def register(measure: Callable[[], Measured]) -> Callable[[], Measured]:
        CRITERIA.append(Criterion(issue, name, measure))
        return measure

    return register


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
    begun = time.perf_counter()
    try:
        value, bound, ok = one.measure()
        verdict = PASS if ok else FAIL
    except NotMeasured as reason:
        value, bound, verdict = str(reason), "", OPEN
    except Exception as error:
        value, bound, verdict = f"{type(error).__name__}: {str(error).strip()[:300]}", "", FAIL
    return Result(one.issue, one.name, value, bound, verdict, round(time.perf_counter() - begun, 1))


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


# -- tests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """How tests ended."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


@dataclass(frozen=True)
class Case:
    """A test with its module, how it ended, and what it recorded."""

    name: str
    outcome: str
    recorded: tuple[tuple[str, str], ...]


@lru_cache
def test_cases(path: str) -> tuple[Case, ...]:
    """Every test under a path, slow ones included; the whole suite is run once only."""
    if path != SUITE and _whole_suite_ran:
        module = path.removesuffix(".py").replace("/", ".") + "."
        return tuple(case for case in test_cases(SUITE) if case.name.startswith(module))
    if not (REPO / path).exists():
        raise NotMeasured(f"there is no {path}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", path, timeout=3600)
        if not report.exists():
            raise RuntimeError(f"pytest {path} made no report: {done.stdout[-300:]}")
        found = tuple(_cases(ET.parse(report).getroot().iter("testcase")))
    if path == SUITE:
        _whole_suite_ran.append(True)
    return found


SUITE = "tests"
_whole_suite_ran: list[bool] = []


def _cases(found: Iterable[ET.Element]) -> Iterable[Case]:
    for case in found:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        recorded = tuple((one.get("name", ""), one.get("value", "")) for one in case.iter("property"))
        yield Case(f"{case.get('classname')}.{case.get('name')}", outcome, recorded)


def tests(path: str, named: str = "") -> Counts:
    """How the tests under a path ended whose names hold one of `named` (words, divided by |)."""
    words = named.split("|")
    outcomes = [case.outcome for case in test_cases(path) if any(word in case.name for word in words)]
    return Counts(*(outcomes.count(kind) for kind in ("passed", "failed", "skipped")))


def interpreted(*paths: str) -> Counts:
    """How the tests of kernels under these paths ended in Triton's interpreter, which needs a process of their own."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, env={"TRITON_INTERPRET": "1"}, timeout=3600)
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout[-300:])}
    return Counts(found.get("passed", 0), found.get("failed", 0) + found.get("error", 0), found.get("skipped", 0))


def all_pass(counts: Counts, least: int = 1) -> Measured:
    """Tests of which at least `least` passed and none failed."""
    return str(counts), f">= {least} passed, 0 failed", counts.passed >= least and counts.failed == 0
