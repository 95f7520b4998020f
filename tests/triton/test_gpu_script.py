"""`scripts/gpu` at toy size, on a machine that lacks whatever a bare GPU machine may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.__main__ import _stage

ROOT = Path(__file__).parents[2]
COMPILER = ("click", "jinja2", "lark", "pydantic", "platformdirs", "rich")
LACKING = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)

_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {missing} else _find(name, *rest)
sys.meta_path.insert(0, Missing())
"""


def toy(folder: Path, stages: str, missing: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Stages at toy sizes, in processes that find none of these packages."""
    (folder / "sitecustomize.py").write_text(LACKING.format(missing=missing))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder), "OUT": str(folder / "out")}
    command = [sys.executable, "-m", "scripts.gpu", "--toy", "--stage", stages]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def lines(folder: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / f"{stage}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_kernels_without_transformers(tmp_path: Path) -> None:
    done = toy(tmp_path, "compile,right,kernels", (*COMPILER, "transformers"))
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.parent.name for path in (ROOT / "generated").glob("*/cache.py")}  # the exemplars, and what was made here
    head, *compiled = lines(tmp_path, "compile")
    assert head["gpu"] == "interpreter" and "transformers" not in head
    assert {"roco", "streaming_llm", "equip_blocks", "sparcas"} <= {line["policy"] for line in compiled} <= made
    assert not any(line.get("error") for line in compiled)
    checks = lines(tmp_path, "right")[1:]
    assert {"numerics: roco", "prompts: roco", "graph: roco", "numerics: sparcas"} <= {line["check"] for line in checks}
    assert not any(line["wrong"] for line in checks)
    timed = lines(tmp_path, "kernels")[1:]
    assert {line["kind"] for line in timed} == {"decode", "select", "prompt"}
    assert all(line["ms"] > 0 for line in timed)
    assert {line["policy"] for line in timed if line["kind"] == "decode"} >= {
        "sdpa",
        "roco",
        "streaming_llm",
        "equip_blocks",
    }
    assert {line["policy"] for line in timed if line["kind"] == "select"} == {"sparcas"}
    assert "| roco | 1 | 20 | 2 |" in done.stdout, "the tables"


@pytest.mark.slow
def test_whole_models_without_the_compiler(tmp_path: Path) -> None:
    done = toy(tmp_path, "model", COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = lines(tmp_path, "model")[1:]
    assert {"static", "dynamic", "roco", "streaming_llm"} <= {line["cache"] for line in runs}
    assert all(line["ttft_s"] > 0 and line["tokens_per_s"] > 0 for line in runs)


def test_a_stage_that_hangs_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert not _stage("right", 0, ["--toy"])
    assert time.monotonic() - begun < 60
    assert "stopped at its deadline" in capfd.readouterr().out


def test_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scripts.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    done = subprocess.run(
        [*command, "--stage", "wrong"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no stage wrong; there are compile, right, kernels, model" in done.stderr
