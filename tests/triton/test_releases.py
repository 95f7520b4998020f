"""Which releases of Triton serve: `scripts/tritons.py`, and what is said of its results."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvdsl.errors import KvdslError
from kvdsl.runtime.gpu.backend import kernels_of
from kvdsl.runtime.gpu.build import Shape, launched, parse_target
from kvdsl.runtime.gpu.launch import check_release
from scripts import tritons
from tests.differential.test_random import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", ["3.3.0", "3.9.0", "3.10.1", "4.0.0+git1234"])
def test_releases_that_serve(release: str) -> None:
    check_release(release)


@pytest.mark.parametrize("release", ["2.3.1", "3.2.0"])
def test_releases_that_do_not(release: str) -> None:
    with pytest.raises(KvdslError, match=f"needs Triton 3.3 or later .*{release}"):
        check_release(release)


def test_the_table_is_what_was_found() -> None:
    rows = json.loads(tritons.RESULTS.read_text())
    assert tritons.table(rows) in (ROOT / "docs" / "performance" / "gpus.md").read_text()
    assert all("error" not in row["targets"]["cuda:90"] and row["passed"] and not row["failed"] for row in rows)


def test_the_table_is_of_todays_kernels() -> None:
    rows = json.loads(tritons.RESULTS.read_text())
    sources = [load(policy)[1].triton_source for policy in tritons.POLICIES]
    kernels = [one[0] for source in sources for one in launched(kernels_of(source), Shape(), parse_target("cuda:90"))]
    count = sum(kernel not in tritons.OFF for kernel in kernels)
    assert {row["targets"]["cuda:90"]["kernels"] for row in rows} == {count}


def test_a_release_that_fails_for_one_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each is asked by itself, and what was said stands in its row."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        targets = command[command.index("--target") + 1].split(",")
        if "hip:gfx942" in targets:
            return subprocess.CompletedProcess(command, 2, json.dumps({"error": "no linker"}), "")
        rows = [{"target": target, "spills": n * 8} for target in targets for n in range(2)]
        return subprocess.CompletedProcess(command, 0, json.dumps({"rows": rows}), "")

    monkeypatch.setattr(subprocess, "run", run)
    found = tritons.compiled(("cuda:90", "hip:gfx942"), {})
    count = len(tritons.POLICIES)
    assert found == {
        "cuda:90": {"kernels": 2 * count, "spilling": count, "most_spilled": 8},
        "hip:gfx942": {"error": "no linker"},
    }


@pytest.mark.nightly
def test_the_release_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One policy: `test_build` compiles every one."""
    monkeypatch.setattr(tritons, "POLICIES", ("streaming_llm",))
    found = tritons.compiled(("cuda:90", "hip:gfx942"), dict(os.environ))
    turning = found["cuda:90"]  # StreamingLLM's `attend`, see `test_build.allowed`
    assert turning["spilling"] <= 1 and turning["most_spilled"] <= 40
    assert found["hip:gfx942"] == {"kernels": turning["kernels"], "spilling": 0, "most_spilled": 0}
