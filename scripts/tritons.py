#!/usr/bin/env python
"""Which releases of Triton compile the kernels, and which interpret them rightly: `python -m scripts.tritons`.

Each release is installed by itself into build/tritons, with the newest NumPy that its interpreter works with, and stands before the others
on the path of two runs: `kvdsl build` of policies that observe, turn keys and select, and tests in Triton's interpreter. For AMD Triton 3.3
and 3.4 need an LLD, ROCm's or another that TRITON_HIP_LLD_PATH names.
`--table` prints what results/gpu/tritons.json says as the table of docs/performance/gpus.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "gpu" / "tritons.json"
FOLDER = ROOT / "build" / "tritons"

RELEASES = ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
OLDER_NUMPY = "2.3.5"
"""From NumPy 2.4 on, an array of one number is no number, which Triton 3.6's interpreter, for one, takes it for; 3.7's does not."""

POLICIES = ("roco", "streaming_llm", "sparcas")
OFF = ("at_once",)
"""Kernels that no step launches yet."""

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
TESTS = ("tests/triton/test_policies.py", "-m", "not nightly", "-k", "random_traces")


def main() -> int:
    """Try releases, write what was found; 1 if a release neither compiles for every target nor interprets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES, help=f"[default: {' '.join(RELEASES)}]")
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows of the releases that are not tried are kept")
    parser.add_argument("--table", action="store_true", help="print the table of what is known")
    options = parser.parse_args()
    known = {row["triton"]: row for row in json.loads(options.out.read_text())} if options.out.exists() else {}
    for release in () if options.table else options.releases:
        known[release] = tried(release)
        print(json.dumps(known[release]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(ordered(known.values()), indent=1) + "\n")
    print(table(ordered(known.values())), end="")
    return 0


def tried(release: str) -> dict[str, Any]:
    """What a release does: kernels that it compiles for each target, bytes that spill at most, and how many tests pass."""
    path = [installed(f"triton=={release}"), ROOT, ROOT / "lab"]
    if before(release, "3.7"):
        path.insert(1, installed(f"numpy=={OLDER_NUMPY}"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_CACHE_DIR": str(FOLDER / "cache" / release),
    }
    targets = compiled(TARGETS, environment)
    numpy, passed, failed = interpreted(environment)
    return {"triton": release, "targets": targets, "numpy": numpy, "passed": passed, "failed": failed}


def installed(requirement: str) -> Path:
    """The folder into which it has been installed, by itself."""
    folder = FOLDER / requirement.replace("==", "-")
    if not folder.exists():
        part = folder.with_suffix(".part")
        words = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(part), requirement)
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        part.rename(folder)
    return folder


def before(release: str, other: str) -> bool:
    """Whether a release is older than another."""
    return _numbers(release) < _numbers(other)


def ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the oldest release to the newest."""
    return sorted(rows, key=lambda row: _numbers(row["triton"]))


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def compiled(targets: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """By target how many kernels were compiled, of how many something spills, and how many bytes at most; what was said if it fails."""
    own = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        command = [sys.executable, "-m", "kvdsl", "build", policy, "--target", ",".join(targets), "--json"]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
        if done.returncode and len(targets) == 1:
            return {targets[0]: {"error": said(done)}}
        if done.returncode:  # who is it?
            return {name: one for target in targets for name, one in compiled([target], environment).items()}
        rows += (row for row in json.loads(done.stdout)["rows"] if row.get("kernel") not in OFF)
    return {target: _counted([row["spills"] for row in rows if row["target"] == target]) for target in targets}


def _counted(spills: list[int]) -> dict[str, int]:
    return {"kernels": len(spills), "spilling": sum(n > 0 for n in spills), "most_spilled": max(spills)}


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a command that was asked for JSON."""
    try:
        return str(json.loads(done.stdout)["error"])[:300]
    except (ValueError, KeyError, TypeError):
        return (done.stderr or done.stdout).strip()[-300:]


def interpreted(environment: dict[str, str]) -> tuple[str, int, int]:
    """The version of NumPy; how many tests pass and fail in Triton's interpreter."""
    own = {**environment, "TRITON_INTERPRET": "1"}
    version = [sys.executable, "-c", "import numpy; print(numpy.__version__)"]
    numpy = subprocess.run(version, env=own, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *TESTS]
    told = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False).stdout
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", told.splitlines()[-1])}
    return numpy, found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of docs/performance/gpus.md."""
    head = ("Triton", *(f"`{target}`" for target in TARGETS), "interpreter: tests that pass", "with NumPy")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        cells = [_compiled(row["targets"][target]) for target in TARGETS]
        lines.append((row["triton"], *cells, f"{row['passed']} of {row['passed'] + row['failed']}", row["numpy"]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace(" --- ", "---")


def _compiled(found: dict[str, Any]) -> str:
    if "error" in found:
        return "no"
    spills = f"; {found['spilling']} spill, {found['most_spilled']} bytes at most" if found["spilling"] else ""
    return f"{found['kernels']} kernels{spills}"


if __name__ == "__main__":
    sys.exit(main())
