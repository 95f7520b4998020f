"""The C++ under gcc's AddressSanitizer and UndefinedBehaviorSanitizer: every shipped policy and layout, at odd sizes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvdsl.compiler import shipped_policies
from scripts.torture.registry import Counts, NotHere, Progress, attack

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
BLOCKS = ("benchmarks/policies/equip_blocks.kv", "benchmarks/policies/roco_blocks.kv")
PATIENCE = 1800.0
"""Seconds for a policy, whose kernels have to be built first; the driver is built once, with the first."""


@attack(
    "address and undefined behaviour", "a policy at two dozen shapes; the first report ends its process", count=26, quick=2
)
def address(seed: int, count: int, progress: Progress) -> Counts:
    """As many policies as asked for, in an order of the seed's."""
    drawn = policies()
    random.Random(seed).shuffle(drawn)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="kvdsl-sanitized-") as cache:
        environment = sanitized(Path(cache))
        for policy in drawn[:count]:
            with counts.trial(policy):
                check(policy, environment)
            progress()
    return counts


def policies() -> list[str]:
    """The files of what is run: every shipped policy, and two in blocks."""
    return [*map(str, sorted(shipped_policies())), *BLOCKS]


def check(policy: str, environment: dict[str, str]) -> None:
    """Run a policy at all shapes in a process of its own, which must end without a report."""
    command = [sys.executable, "-m", "scripts.torture._sanitized", policy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0 and "runs" in done.stdout, report_of(done.stderr)


def sanitized(cache: Path) -> dict[str, str]:
    """The environment of a process that builds and runs C++ with sanitizers; Python itself is not built with them.

    Raises:
        NotHere: without g++, or without its sanitizers.
    """
    gcc = shutil.which("g++")
    if gcc is None:
        raise NotHere("no g++")
    found = [
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    missing = [path for path in found if not os.path.isabs(path)]
    if missing:
        raise NotHere(f"g++ has no {' and no '.join(missing)}")
    return os.environ | {
        "CXX": f"{gcc} {FLAGS}", "LD_PRELOAD": " ".join(found), "KVDSL_CACHE_DIR": str(cache),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",  # leaks: Python's own are many
    }  # fmt: skip


def report_of(said: str) -> str:
    """The sanitizer's own line, or the last that was said."""
    lines = said.strip().splitlines() or ["no word"]
    return next((line for line in lines if "runtime error" in line or "ERROR: AddressSanitizer" in line), lines[-1])
