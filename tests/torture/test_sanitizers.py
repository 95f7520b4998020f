"""The C++ under sanitizers, and whether they are on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.torture import sanitizers
from scripts.torture.registry import NotHere

OUTSIDE = 'extern "C" int read(int i) { int x[4] = {1, 2, 3, 4}; volatile int* p = x; return p[i]; }\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    try:
        return sanitizers.sanitized(tmp_path)
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
def test_every_policy_runs_without_a_report(environment: dict[str, str]) -> None:
    counts = sanitizers.address.run(1, 26, lambda: None)
    assert counts.survived == counts.tried == 26, counts.notes
