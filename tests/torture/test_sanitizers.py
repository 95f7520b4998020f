"""The C++ under sanitizers, and whether they are on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.torture import sanitizers
from scripts.torture.registry import NotHere

OUTSIDE = 'extern "C" int read(int i) { int x[4] = {1, 2, 3, 4}; volatile int* p = x; return p[i]; }\n'


@pytest.fixture
def environment() -> dict[str, str]:
    """One cache folder for all of them, because the driver takes longest to build."""
    try:
        return sanitizers.sanitized(Path(os.environ["KVDSL_CACHE_DIR"]) / "sanitized")
    except NotHere as reason:
        pytest.skip(str(reason))


def test_a_read_outside_of_an_array_ends_the_process(environment: dict[str, str], tmp_path: Path) -> None:
    source, library = tmp_path / "outside.cpp", tmp_path / "outside.so"
    source.write_text(OUTSIDE, encoding="utf-8")
    subprocess.run([*environment["CXX"].split(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).read(5)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "runtime error" in sanitizers.report_of(done.stderr) or "AddressSanitizer" in sanitizers.report_of(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sanitizers.policies(), ids=lambda policy: Path(policy).stem)
def test_a_policy_runs_without_a_report(policy: str, environment: dict[str, str]) -> None:
    sanitizers.check(policy, environment)
