"""The C++ under gcc's sanitizers: every shipped policy and layout, at odd sizes and on several threads."""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdsl.compiler import shipped_policies
from scripts.torture._policies import POLICIES
from scripts.torture.registry import Counts, NotHere, Progress, attack

BLOCKS = ("benchmarks/policies/equip_blocks.kv", "benchmarks/policies/roco_blocks.kv")
TEAM = Path(__file__).with_name("_team.cpp")
SHAPES, GROUP = 48, 10
"""Runs of each policy, and how many policies share a process."""

PATIENCE = 1800.0
"""Seconds for a policy, whose kernels have to be built first; the driver is built once, with the first."""


@dataclass(frozen=True)
class Sanitizer:
    """What looks on, and how.

    Attributes:
        flags: of the compiler.
        libraries: what has to be there before Python, which is not built with it.
        options: environment variables.
        threads: whether the kernels get threads that it can follow, in place of libgomp's.
        says: what a report of it has in its first line.
    """

    flags: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    threads: bool
    says: tuple[str, ...]


ADDRESS = Sanitizer(
    "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1",
    ("libasan.so", "libubsan.so"),
    {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},  # leaks: Python's own are many
    threads=False,
    says=("runtime error", "ERROR: AddressSanitizer"),
)
THREADS = Sanitizer(
    "-fsanitize=thread -g1",
    ("libtsan.so",),
    {"TSAN_OPTIONS": "halt_on_error=1"},
    threads=True,
    says=("WARNING: ThreadSanitizer",),
)


@attack("address and undefined behaviour", "a policy at drawn shapes; the first report ends its process", count=30, quick=2)
def address(seed: int, count: int, progress: Progress) -> Counts:
    return _look_on(ADDRESS, seed, count, progress)


@attack("threads", "the same on one to five threads: does anything but luck order what they do?", count=30, quick=2)
def threads(seed: int, count: int, progress: Progress) -> Counts:
    return _look_on(THREADS, seed, count, progress)


def _look_on(sanitizer: Sanitizer, seed: int, count: int, progress: Progress) -> Counts:
    """As many policies as asked for, in an order of the seed's."""
    drawn = policies()
    random.Random(seed).shuffle(drawn)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="kvdsl-sanitized-") as cache:
        environment = sanitized(sanitizer, Path(cache))
        for some in in_groups(drawn[:count]):
            for policy, report in reports(sanitizer, some, environment, seed):
                with counts.trial(policy):
                    assert not report, report
                progress()
    counts.note(f"{SHAPES} shapes of each")
    return counts


def policies() -> list[str]:
    """What is run: every shipped policy, two files in blocks, and what neither does."""
    return [*map(str, sorted(shipped_policies())), *BLOCKS, *POLICIES]


def in_groups(policies: list[str]) -> list[list[str]]:
    """Those that share a process, which takes longer to start than to run one of them."""
    return [policies[first : first + GROUP] for first in range(0, len(policies), GROUP)]


def reports(
    sanitizer: Sanitizer, policies: list[str], environment: dict[str, str], seed: int = 1, shapes: int = SHAPES
) -> Iterator[tuple[str, str]]:
    """Every policy with what was said of it, "" if nothing. A report ends the process; another goes on with the next policy."""
    command = [sys.executable, "-m", "scripts.torture._sanitized", "--seed", str(seed), "--shapes", str(shapes)]
    while policies:
        done = subprocess.run(
            [*command, *policies],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE * len(policies),
            check=False,
        )
        said = done.stdout.splitlines() or ["nothing was run"]
        well = [policy for policy in policies if f"{policy}: {shapes} runs" in said]
        bad = policies[len(well) :][:1] if done.returncode == 0 else [policies[min(len(well), len(policies) - 1)]]
        yield from ((policy, "") for policy in well if policy not in bad)
        yield from ((policy, f"{report_of(sanitizer, done.stderr)} ({said[-1]})") for policy in bad)
        policies = policies[len(well) + 1 :]


def sanitized(sanitizer: Sanitizer, cache: Path, *team: str) -> dict[str, str]:
    """The environment of a process that builds and runs C++ with a sanitizer.

    Args:
        cache: a folder for what is built.
        team: flags of the threads that stand in for libgomp's.

    Raises:
        NotHere: without g++ or its sanitizer, or where that cannot run.
    """
    gcc = shutil.which("g++")
    if gcc is None:
        raise NotHere("no g++")
    found = [
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in sanitizer.libraries
    ]
    missing = [path for path in found if not os.path.isabs(path)]
    if missing:
        raise NotHere(f"g++ has no {' and no '.join(missing)}")
    command = [gcc, *sanitizer.flags.split()]
    if sanitizer.threads:
        command.append(str(_team(command, cache, team)))
    environment = os.environ | sanitizer.options
    environment |= {"CXX": shlex.join(command), "LD_PRELOAD": " ".join(found), "KVDSL_CACHE_DIR": str(cache)}
    tried = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=False)
    if tried.returncode:  # addresses that ThreadSanitizer does not expect, on some kernels
        raise NotHere(f"{' and '.join(sanitizer.libraries)} cannot run: {report_of(sanitizer, tried.stderr)}")
    return environment


def _team(command: list[str], cache: Path, flags: tuple[str, ...]) -> Path:
    """The threads that stand in for libgomp's, compiled. On the compiler's command line they are linked with whatever it links."""
    digest = hashlib.sha256(TEAM.read_bytes() + " ".join((*command, *flags)).encode()).hexdigest()[:16]
    made = cache / f"team-{digest}.o"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            beside = Path(folder) / made.name
            subprocess.run([*command, *flags, "-std=c++17", "-O1", "-fPIC", "-c", str(TEAM), "-o", str(beside)], check=True)
            beside.replace(made)
    return made


def report_of(sanitizer: Sanitizer, said: str) -> str:
    """The sanitizer's own line, or the last that was said."""
    lines = said.strip().splitlines() or ["no word"]
    return next((line for line in lines if any(words in line for words in sanitizer.says)), lines[-1])
