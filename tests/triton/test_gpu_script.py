"""`scripts/gpu` at toy size, on a machine that lacks whatever a bare GPU machine may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdsl.runtime.gpu import sizes
from scripts.gpu import cuts
from scripts.gpu.__main__ import _ran
from scripts.gpu.experiments import EXPERIMENTS, in_time
from scripts.gpu.setting import TOY, Setting

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


def started(folder: Path, site: str, names: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Experiments at toy sizes, in processes that begin with `site`."""
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "lab")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OUT": str(folder / "out"), **variables}
    command = [sys.executable, "-m", "scripts.gpu", "--toy", "--only", names, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each experiment found, by its name, from the one line that it left; the first fact is the machine."""
    lines = [json.loads(line) for line in (folder / "out" / "experiments.jsonl").read_text().splitlines()]
    assert all(line["question"] and line["deadline_s"] > 0 and line["exit"] == 0 for line in lines)
    return {line["experiment"]: line["found"] for line in lines}


def test_all_experiments_as_on_a_gpu(tmp_path: Path) -> None:
    """On a stub, with graphs and events; all but `language`, which would run hundreds of traces in Triton's interpreter."""
    names = [name for name in EXPERIMENTS if name != "language"]
    done = started(tmp_path, STUBBED, ",".join(names), "--policies", "roco,sparcas")
    assert done.returncode == 0, done.stdout + done.stderr
    told = found(tmp_path)
    assert list(told) == names
    assert {lines[0]["gpu"] for lines in told.values()} == {"a stub"}
    assert {"sdpa", "cudnn", "roco"} == {line["policy"] for line in told["step"][1:]}
    assert all(line["of_best"] > 0 for line in told["step"][1:] if line["policy"] == "roco")
    assert [line["policy"] for line in told["parts"][1:]] == ["roco", "sparcas"]
    assert [line["cut"] for line in told["cuts"][1:]] == [
        *(cut.name for cut in cuts.CUTS[: TOY.cuts]),
        "two launches",
        "one launch",
    ]
    assert all(line["ms"] > 0 and line.get("same_bits", True) for line in told["cuts"][1:])
    assert [line["policy"] for line in told["selection"][1:]] == ["sparcas"] and told["selection"][1]["vs_best_dense"] > 0
    assert told["lazily"][1]["of_plain"] > 0
    assert {"sdpa", "roco"} <= {line["policy"] for line in told["prompt"][1:]}
    checks = told["right"][1:]
    assert {"numerics: roco", "graph: roco", "rows: roco", "generate: roco"} <= {line["check"] for line in checks}
    assert not any(line["wrong"] for line in checks)


def test_a_graph_that_does_nothing_is_found(tmp_path: Path) -> None:
    done = started(tmp_path, STUBBED, "right", "--policies", "roco", IDLE_GRAPHS="1")
    assert done.returncode == 1 and "not well: right" in done.stdout
    checks = [json.loads(line) for line in (tmp_path / "out" / "right.jsonl").read_text().splitlines()][1:]
    assert [line["check"] for line in checks if line["wrong"]] == ["graph: roco", "rows: roco"]


def test_kernels_run_without_the_compiler_and_transformers(tmp_path: Path) -> None:
    site = LACKING.format(missing=(*COMPILER, "transformers", "vllm"))
    done = started(tmp_path, site, "step,parts,selection,right,language,served", "--policies", "roco,sparcas")
    assert done.returncode == 0, done.stdout + done.stderr
    told = found(tmp_path)
    assert "transformers" not in told["step"][0] and not told["served"][0]["vllm"] and len(told["language"]) == 1
    checks = told["right"][1:]
    assert {"numerics: sparcas", "prompts: sparcas", "rows: sparcas"} <= {line["check"] for line in checks}
    assert not any(line["wrong"] for line in checks)


def test_what_is_wanted_of_vllm_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that answers at once."""
    from scripts.gpu import served
    from scripts.gpu.setting import Lines

    asked: list[list[dict[str, Any]]] = []

    def engine(_: list[str], *, input: str, **__: Any) -> subprocess.CompletedProcess[str]:
        asked.append([json.loads(line) for line in input.splitlines()])
        return subprocess.CompletedProcess([], 0, "loading\n" + '@{"seconds": 2.0, "ttft_ms": 1.0}\n' * 2, "")

    monkeypatch.setattr(served, "find_spec", lambda _: True)
    monkeypatch.setattr(served.subprocess, "run", engine)
    setting, lines = Setting("cpu", TOY, (), tmp_path), Lines(tmp_path / "served.jsonl")
    assert served.run(setting, lines) == 0
    rows = [json.loads(line) for line in lines.path.read_text().splitlines()][1:]
    assert [(row["policy"], row["tokens_per_s"]) for row in rows] == [("full", 8.0), ("h2o", 8.0), ("full", 8.0)]
    assert [told["policy"] for told, *_ in asked] == [None, {"policy": "h2o", "budget": 16}, None]


@pytest.mark.parametrize("cut", cuts.CUTS, ids=lambda cut: cut.name)
def test_cuts_hold_meanwhile(cut: cuts.Cut) -> None:
    before = {name: dict(x) if isinstance(x, dict) else x for name, x in vars(sizes).items() if name.isupper()}
    with cuts.meanwhile(cut):
        assert all(getattr(sizes, name) == number for name, number in cut.numbers.items())
        assert all(getattr(sizes, name).items() >= options.items() for name, options in cut.options.items())
    assert before == {name: x for name, x in vars(sizes).items() if name.isupper()}


def test_all_experiments_fit_into_a_quarter_of_an_hour() -> None:
    assert sum(one.seconds for one in EXPERIMENTS.values()) <= 840
    assert in_time(list(EXPERIMENTS), 840) == list(EXPERIMENTS)
    assert in_time(list(EXPERIMENTS), 400)[:2] == ["served", "step"]


def test_an_experiment_that_hangs_is_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    setting = Setting("cpu", TOY, (), tmp_path)
    assert not _ran(replace(EXPERIMENTS["right"], seconds=0), setting, ["--toy"])
    assert "stopped at its deadline" in capfd.readouterr().out
    assert json.loads((tmp_path / "experiments.jsonl").read_text())["exit"] is None


def test_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scripts.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no GPU" in done.stderr
    done = subprocess.run(
        [*command, "--only", "wrong"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "there is no experiment wrong; there are step, parts" in done.stderr
    done = subprocess.run([*command, "--list"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "not written: 9, racecheck of a cooperative launch" in done.stdout
