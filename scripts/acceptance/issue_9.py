"""The papers' tables and figures, and pictures of what policies do."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from acceptance.registry import REPO, Measured, NotMeasured, all_pass, criterion, kvdsl_json, tests

PAPERS = ("roco", "vatp", "sparcas", "equip", "lazy")
MINUTES = 20

# -- papers ------------------------------------------------------------------------------------------------------------


def _known() -> tuple[str, ...]:
    from kvdsl_lab.reproduce import PAPERS as known

    return tuple(name for name in PAPERS if name in known)


@criterion(9, "`kvdsl reproduce` knows all five papers")
def _all_papers() -> Measured:
    known = _known()
    return ", ".join(known), ", ".join(PAPERS), known == PAPERS


@lru_cache
def _quick(paper: str) -> tuple[dict[str, Any], list[str]]:
    """What a quick run gave, and the files that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        found = kvdsl_json("reproduce", paper, "--quick", "--out", folder)
        return found, sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))


def _written(paper: str) -> None:
    @criterion(9, f"reproduce {paper} --quick: tables and figures, the files beside them, seconds")
    def _() -> Measured:
        if paper not in _known():
            raise NotMeasured(f"`kvdsl reproduce` does not know {paper} yet")
        found, files = _quick(paper)
        wanted = {f"{paper}{suffix}" for suffix in (".json", ".md", ".tex")}
        wanted |= {figure for part in found["experiments"] for figure in part["figures"]}
        full = all(part["rows"] for part in found["experiments"])
        value = f"{len(found['experiments'])} experiments, {len(files)} files, {found['seconds']:.0f} s"
        return value, "every one has rows and its files", full and found["finished"] and wanted <= set(files)


for _paper in PAPERS:
    _written(_paper)


@criterion(9, "all quick runs together, minutes")
def _minutes() -> Measured:
    missing = set(PAPERS) - set(_known())
    if missing:
        raise NotMeasured(f"`kvdsl reproduce` does not know {', '.join(sorted(missing))} yet")
    minutes = sum(_quick(paper)[0]["seconds"] for paper in PAPERS) / 60
    return round(minutes, 1), f"< {MINUTES}", minutes < MINUTES


@criterion(9, "a killed run loses one cell, and goes on")
def _resumed() -> Measured:
    return all_pass(tests("tests/reproduce/test_framework.py", "killed_run|measures_nothing_again"), 2)


def _claims(paper: str) -> None:
    @criterion(9, f"{paper}: the paper's claims on the reference model, at full sizes (committed result)")
    def _() -> Measured:
        path = REPO / "results" / f"{paper}.json"
        if not path.exists():
            raise NotMeasured(f"run kvdsl reproduce {paper}, and commit results/{paper}.*")
        found = json.loads(path.read_text(encoding="utf-8"))
        claims = [one["holds"] for part in found["experiments"] for one in part["findings"]]
        held, failed = claims.count(True), claims.count(False)
        told = f"{held} hold, {failed} do not, {claims.count(None)} open"
        return told, "each is stated, at full sizes", bool(claims) and found["finished"] and not found["setup"]["quick"]


for _paper in PAPERS:
    _claims(_paper)

# -- measurements ------------------------------------------------------------------------------------------------------


@criterion(9, "figure 2's consistency is that of a brute-force simulation, figure 3's deviation NumPy's")
def _measures() -> Measured:
    return all_pass(tests("tests/eval/test_attention_measures.py", "brute_force|numpy|models_own"), 6)


@criterion(9, "MAS is the most consistent score on the reference model (3 budgets, 128 tokens)")
def _mas() -> Measured:
    found = kvdsl_json("eval", "consistency", "--length", "128", "--stretches", "1", "--budgets", "0.3,0.45,0.6")
    others = [f"mas above {name}" for name in ("ltas", "aas", "aqas")]
    value = ", ".join(f"{claim}: {found['findings'][claim]['held']} of 3" for claim in others)
    return value, "all", all(found["findings"][claim]["holds"] for claim in others)


# -- pictures ----------------------------------------------------------------------------------------------------------


@criterion(9, "kvdsl trace: the page's data are what cache.positions said, step by step; nothing is fetched")
def _trace() -> Measured:
    return all_pass(tests("tests/eval/test_trace.py"), 8)


@criterion(9, "kvdsl trace in a headless browser")
def _browser() -> Measured:
    if not (any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))) and shutil.which("chromedriver")):
        raise NotMeasured("needs chromium and chromedriver; the page's script is run by node in tests/eval/test_trace.py")
    return all_pass(tests("tests/eval/test_trace_browser.py"), 3)


# -- others' tasks and packages ----------------------------------------------------------------------------------------


@criterion(9, "LongBench and RULER from local files, with the official metrics")
def _benchmarks() -> Measured:
    return all_pass(tests("tests/eval/test_benchmarks.py"), 8)


@criterion(9, "lm_eval through any kvdsl cache: stock numbers where all fits, others under a small budget")
def _lm_eval() -> Measured:
    if importlib.util.find_spec("lm_eval") is None:
        raise NotMeasured("lm_eval is not installed; `make test-lm-eval` installs it")
    return all_pass(tests("tests/eval/test_lm_eval.py"), 12)


def _peers(what: str, name: str) -> None:
    @criterion(9, f"{what} against kvpress at the same policy, budget, model and run (committed result)")
    def _() -> Measured:
        path = REPO / "benchmarks" / "results" / "cpu" / name
        if not path.exists():
            raise NotMeasured(f"make peers, and commit build/{name} as {path.relative_to(REPO)}")
        found = json.loads(path.read_text(encoding="utf-8"))
        compared = [row for row in found["rows"] if row["by"] == "kvpress" and "tpot_vs_kvdsl" in row]
        told = (REPO / "docs" / "performance.md").read_text(encoding="utf-8")
        unnamed = [one for one in found["beaten"] if f"`{one}`" not in told]
        value = f"kvpress takes less in {len(found['beaten'])} of {len(compared)}; of {len(unnamed)} no cause is named"
        return value, "0, or docs/performance.md names the cause", bool(compared) and not unnamed


_peers("TPOT", "peers.json")
_peers("peak memory", "peers_memory.json")


@criterion(9, "a .kv policy as a press of kvpress keeps what its own cache keeps, in kvpress's pipeline too")
def _press() -> Measured:
    python = REPO / ".venv" / "peers" / "bin" / "python"
    if not python.exists():
        raise NotMeasured("make peers makes the environment that kvpress needs")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integrations/test_kvpress.py"]
    variables = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=900, check=False)
    return done.stdout.strip().splitlines()[-1], "all pass", done.returncode == 0
