"""The C++ for other compilers and other processors, by flags: it builds, and does what torch and the interpreter do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.build import cxx
from kvdsl.errors import KvdslError

ROOT = Path(__file__).parent.parent.parent
MACHINES = {
    "clang++": ("clang++", ""),
    "AVX2": ("g++", "-march=x86-64-v3"),
    "SSE2": ("g++", "-march=x86-64"),
}
TESTS = tuple(f"tests/differential/test_{name}.py" for name in ("statements", "token_columns", "selecting"))
"""Every statement, what is equal to the bit, and selection."""

LAYOUTS = "tests/runtime/test_blocks.py"
"""Blocks and slots in place, which are equal to the bit where g++ has built them; clang++ rounds a capped logit otherwise in each."""


def test_flags_of_ones_own_come_last_and_name_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cxx._place("driver")
    monkeypatch.setenv("KVDSL_CXXFLAGS", "-march=x86-64-v3 '-DNAME=two words'")
    assert cxx.flags()[-2:] == ["-march=x86-64-v3", "-DNAME=two words"]
    assert cxx._place("driver") != before
    monkeypatch.setenv("KVDSL_CXXFLAGS", "'-march")
    with pytest.raises(KvdslError, match=r"KVDSL_CXXFLAGS cannot be read .*; change KVDSL_CXXFLAGS"):
        cxx.flags()


@pytest.mark.parametrize("machine", MACHINES)
def test_the_cpp_tests_pass(machine: str, tmp_path: Path) -> None:
    compiler, flags = MACHINES[machine]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    if flags and os.uname().machine != "x86_64":
        pytest.skip(f"{flags} is for x86")
    if "v3" in flags and "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this machine's own instructions are those: every other test runs them")
    environment = os.environ | {"CXX": compiler, "KVDSL_CXXFLAGS": flags, "KVDSL_CACHE_DIR": str(tmp_path)}
    tests = TESTS if compiler == "clang++" else (*TESTS, LAYOUTS)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not nightly", "-p", "no:cacheprovider"]
    command += ["-k", "not test_torch_does_what_the_interpreter_does", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and list((tmp_path / "cpu").glob("driver-*"))
