"""`scripts/gpu.py` at toy size, on a machine that lacks whatever a bare GPU machine may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = ("click", "jinja2", "lark", "pydantic", "platformdirs", "rich", "transformers")

BARE = f"""
import importlib.util, runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(name)

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {MISSING} else find(name, *rest)
sys.meta_path.insert(0, Missing())
sys.argv = ["gpu.py", *sys.argv[1:]]
runpy.run_path({str(ROOT / "scripts" / "gpu.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_toy_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BARE, "--toy", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numerics against float64: right" in done.stdout
    results = json.loads((tmp_path / "interpreter" / "decode.json").read_text())
    rows = results["rows"]
    generated = {
        path.parent.name for path in (ROOT / "generated").glob("*/cache.py")
    }  # the exemplars, and what was made here
    assert {"roco", "streaming_llm", "equip_blocks", "sparcas"} <= generated
    decoded = [name for name in ("roco", "h2o", "tova", "streaming_llm", "equip_blocks") if name in generated]
    assert [(row["policy"], row["backend"]) for row in rows] == [(name, "triton") for name in decoded]
    assert ("without h2o" in done.stdout) == ("h2o" not in generated)
    assert all(row["ms"] > 0 and row["copy_gbps"] > 0 for row in rows)
    assert [(row["policy"], row["backend"]) for row in results["selecting"]] == [("sparcas", "triton")]
    assert all(row["ms"] > 0 and row["dense_ms"] > 0 and row["vs_best_dense"] > 0 for row in results["selecting"])
    prompts = json.loads((tmp_path / "interpreter" / "prefill.json").read_text())["rows"]
    assert [row["policy"] for row in prompts] == [name for name in decoded if name != "streaming_llm"]
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in prompts)


def test_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
