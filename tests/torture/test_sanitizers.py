"""The C++ under sanitizers, and whether they are on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.torture import sanitizers
from scripts.torture._policies import POLICIES
from scripts.torture.registry import NotHere
from scripts.torture.sanitizers import ADDRESS, THREADS, Sanitizer

OUTSIDE = 'extern "C" int run(int i) { int x[4] = {1, 2, 3, 4}; volatile int* p = x; return p[i]; }\n'
TOGETHER = """extern "C" int run(int n) {
  int count = 0;
#pragma omp parallel for num_threads(3) REDUCTION
  for (int i = 0; i < n; ++i) count += i;
  return count;
}
"""
SHAPES = 16
"""Of a policy; `make torture` draws three times as many, of every shipped policy."""

SOME = [
    "roco", "scissorhands", "snapkv", "pyramidkv", "adakv", "lazy_streaming", "equip_h2o", "scissorhands_window", "vatp_code",
    "quest", "sparcas", "roco_sparcas", *sanitizers.BLOCKS, *POLICIES,
]  # fmt: skip
"""Between them they have every rule of columns, rings, pools, shared budgets, turned keys, staged eviction, and selection; the others'
kernels are parts of theirs.
"""

GROUPS = [SOME[start::4] for start in range(4)]

SANITIZERS = pytest.mark.parametrize("sanitizer", [ADDRESS, THREADS], ids=["address", "threads"])


def environment(sanitizer: Sanitizer, *team: str) -> dict[str, str]:
    """One cache folder for all tests, because the driver takes longest to build. Sanitizers look on before loops are vectorised."""
    try:
        found = sanitizers.sanitized(sanitizer, Path(os.environ["KVDSL_CACHE_DIR"]) / "sanitized", *team)
        return found | {"KVDSL_CXXFLAGS": "-O1"}
    except NotHere as reason:
        pytest.skip(str(reason))


def run(sanitizer: Sanitizer, source: str, number: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A library's `run`, in a process of its own."""
    around, file, library = environment(sanitizer), folder / "source.cpp", folder / "library.so"
    file.write_text(source, encoding="utf-8")
    subprocess.run([*around["CXX"].split(), "-fopenmp", "-shared", "-fPIC", str(file), "-o", str(library)], check=True)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).run({number}))"
    return subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True, check=False)


def test_a_read_outside_of_an_array_ends_the_process(tmp_path: Path) -> None:
    done = run(ADDRESS, OUTSIDE, 5, tmp_path)
    assert done.returncode != 0
    assert any(words in sanitizers.report_of(ADDRESS, done.stderr) for words in ADDRESS.says)


def test_threads_that_write_to_one_place_end_the_process(tmp_path: Path) -> None:
    done = run(THREADS, TOGETHER.replace("REDUCTION", ""), 100, tmp_path)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in sanitizers.report_of(THREADS, done.stderr)


def test_threads_that_add_up_at_the_end_do_not(tmp_path: Path) -> None:
    done = run(THREADS, TOGETHER.replace("REDUCTION", "reduction(+ : count)"), 100, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{sum(range(100))}\n"), done.stderr


def test_kernels_whose_threads_do_not_wait_for_each_other_are_reported() -> None:
    """So it is seen that threads do share a head, and that nothing else orders what they do to it."""
    (one,) = sanitizers.reports(THREADS, ["roco"], environment(THREADS, "-DWITHOUT_BARRIERS"), shapes=SHAPES)
    assert one[0] == "roco"
    assert "ThreadSanitizer: data race" in one[1]


@SANITIZERS
@pytest.mark.parametrize("policies", GROUPS, ids=lambda some: Path(some[0]).stem)
def test_policies_run_without_a_report(policies: list[str], sanitizer: Sanitizer) -> None:
    reports = sanitizers.reports(sanitizer, policies, environment(sanitizer), shapes=SHAPES)
    assert dict(reports) == dict.fromkeys(policies, "")
