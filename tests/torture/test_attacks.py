"""The attacks on builds in their quick form; `make torture` carries them out in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's processes and file systems")
@pytest.mark.parametrize(
    "name", ["killed builds", "builders killed", "damaged files", "may not grow", "compilers that are none"]
)
def test_builds_survive(tmp_path: Path, name: str) -> None:
    """In a process of its own, which forks before it computes anything."""
    out = tmp_path / "torture.json"
    command = [sys.executable, "-m", "scripts.torture", "--only", name, "--count", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(row["survived"] == row["tried"] == 2 for row in json.loads(out.read_text())["attacks"])
