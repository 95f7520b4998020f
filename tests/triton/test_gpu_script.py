"""`scripts/gpu` at toy size, on a machine that lacks whatever a bare GPU machine may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdsl.runtime.gpu import sizes
from scripts.gpu import in_place, variants
from scripts.gpu.__main__ import _stage
from scripts.gpu.setting import STAGES

pytestmark = pytest.mark.nightly

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


STUBBED = """
import sys
if "resource_tracker" not in " ".join(sys.orig_argv):  # the process of Python's own that needs no GPU
    from tests.triton.dry_gpu import install
    install()
"""


def toy(folder: Path, stages: str, missing: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """Stages at toy sizes, in processes that find none of these packages."""
    (folder / "sitecustomize.py").write_text(LACKING.format(missing=missing))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder), "OUT": str(folder / "out")}
    command = [sys.executable, "-m", "scripts.gpu", "--toy", "--stage", stages, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def lines(folder: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / f"{stage}.jsonl").read_text().splitlines()]


def dry(folder: Path, stages: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Stages at toy sizes as they go on a GPU, which is a stub: with graphs, events and a device's memory."""
    (folder / "sitecustomize.py").write_text(STUBBED)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "lab")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OUT": str(folder / "out"), **variables}
    command = [sys.executable, "-m", "scripts.gpu", "--toy", "--stage", stages, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_all_stages_as_on_a_gpu(tmp_path: Path) -> None:
    done = dry(tmp_path, "compile,right,kernels,model", "--policies", "roco")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {lines(tmp_path, stage)[0]["gpu"] for stage in ("compile", "right", "kernels", "model")} == {"a stub"}
    checks = lines(tmp_path, "right")[1:]
    assert {"numerics: roco", "graph: roco", "rows: roco", "generate: roco", "compute-sanitizer"} <= {
        line["check"] for line in checks
    }
    assert not any(line["wrong"] for line in checks)
    timed = lines(tmp_path, "kernels")[1:]
    assert {"sdpa", "flash", "cudnn", "flex", "roco"} <= {line["policy"] for line in timed if line["kind"] == "decode"}
    (roco,) = (line for line in timed if line["kind"] == "decode" and line["policy"] == "roco")
    assert roco["ms"] > 0 and roco["eager_ms"] > 0 and roco["of_best"] > 0
    (prompt,) = (line for line in timed if line["kind"] == "prompt" and line["policy"] == "roco")
    assert prompt["attend_ms"] + prompt["observe_ms"] > 0 and prompt["peak_bytes"] == 0
    tried = [line for line in timed if "variant" in line]
    assert len(tried) == 3 and all(line["ms"] > 0 for line in tried)
    assert {"static", "dynamic", "roco"} <= {
        line["cache"] for line in lines(tmp_path, "model")[1:] if line.get("peak_bytes") == 0
    }


def test_what_is_raced_in_place_as_on_a_gpu(tmp_path: Path) -> None:
    done = dry(tmp_path, "in_place", "--policies", "streaming_llm")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = lines(tmp_path, "in_place")[1:]
    assert (row["policy"], row["batch"], row["cache"]) == ("streaming_llm", 2, 16) and "error" not in row
    assert all(row[f"{way}{how}ms"] > 0 for way in ("", "shift_", "published_") for how in ("", "eager_"))
    assert all(f"{how}over_{way}" in row for way in ("shift", "published") for how in ("", "eager_"))
    assert "| streaming_llm | 2 | 16 |" in done.stdout, "the table"


def test_a_graph_that_does_nothing_is_found(tmp_path: Path) -> None:
    done = dry(tmp_path, "right", "--policies", "roco", IDLE_GRAPHS="1")
    assert done.returncode == 1 and "not well: right" in done.stdout
    assert [line["check"] for line in lines(tmp_path, "right")[1:] if line["wrong"]] == ["graph: roco", "rows: roco"]


@pytest.mark.parametrize("variant", variants.STEPS + variants.PROMPTS, ids=lambda variant: variant.name)
def test_variants_hold_meanwhile(variant: variants.Variant) -> None:
    before = {name: dict(x) if isinstance(x, dict) else x for name, x in vars(sizes).items() if name.isupper()}
    with variants.meanwhile(variant):
        assert all(getattr(sizes, name) == number for name, number in variant.numbers.items())
        assert all(getattr(sizes, name).items() >= options.items() for name, options in variant.options.items())
    assert before == {name: x for name, x in vars(sizes).items() if name.isupper()}


def test_kernels_are_compiled_without_transformers(tmp_path: Path) -> None:
    done = toy(tmp_path, "compile", (*COMPILER, "transformers"))
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.parent.name for path in (ROOT / "generated").glob("*/cache.py")}  # the exemplars, and what was made here
    head, *compiled = lines(tmp_path, "compile")
    assert head["gpu"] == "interpreter" and "transformers" not in head
    assert {"roco", "streaming_llm", "equip_blocks", "sparcas"} <= {line["policy"] for line in compiled} <= made
    assert not any(line.get("error") for line in compiled)


def test_kernels_run_without_transformers(tmp_path: Path) -> None:
    """Those of a policy that selects; as on a GPU, RoCo's run above."""
    done = toy(tmp_path, "right,kernels", (*COMPILER, "transformers"), "--policies", "sparcas")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = lines(tmp_path, "right")[1:]
    assert {"numerics: sparcas", "prompts: sparcas", "graph: sparcas", "rows: sparcas"} <= {line["check"] for line in checks}
    assert not any(line["wrong"] for line in checks)
    timed = lines(tmp_path, "kernels")[1:]
    assert {"select", "prompt"} <= {line["kind"] for line in timed}
    assert all(line["ms"] > 0 for line in timed)
    assert {line["policy"] for line in timed if line["kind"] == "select"} == {"sparcas"}


def test_whole_models_without_the_compiler(tmp_path: Path) -> None:
    done = toy(tmp_path, "model,in_place", COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = lines(tmp_path, "model")[1:]
    assert {"static", "dynamic", "roco", "streaming_llm"} <= {line["cache"] for line in runs}
    assert all(line["ttft_s"] > 0 for line in runs)
    assert sum("tokens_per_s" in line for line in runs) == len(runs) / 2, "first tokens of all come first"
    raced = lines(tmp_path, "in_place")[1:]
    assert "streaming_llm" in {line["policy"] for line in raced} and all(line["eager_over_shift"] > 0 for line in raced)


def test_both_in_graphs_or_neither() -> None:
    """Published H2O has no graph; and where one way's capture failed, its time is compared with nothing."""
    row = {"ms": 2.0, "eager_ms": 9.0, "shift_ms": 3.0, "shift_eager_ms": 10.0, "published_eager_ms": 18.0}
    assert in_place.compared(row) == {"over_shift": 1.5, "eager_over_shift": 1.111, "eager_over_published": 2.0}
    del row["ms"]
    assert in_place.compared(row) == {"eager_over_shift": 1.111, "eager_over_published": 2.0}


def test_all_stages_end_within_half_an_hour() -> None:
    assert sum(STAGES.values()) < 30 * 60


def test_a_stage_that_hangs_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    assert not _stage("right", 0, ["--toy"])
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
    assert "there is no stage wrong; there are compile, right, kernels, model, in_place" in done.stderr
