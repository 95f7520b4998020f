"""Build C++ into shared libraries, once.

What a policy's kernels have in common, the driver, is compiled into objects that all policies are linked with: a policy of its
own takes a fraction of a second. The name of what is built is a digest of everything that decides what is in it: the source, the
headers, the flags, the compiler and the processor. It is built in a private folder and published by one rename, so that
processes that build the same at the same time do not meet; the last one wins with the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from kvdsl import __version__
from kvdsl.build.cache import cache_folder, writable
from kvdsl.errors import KvdslError

INCLUDE = Path(__file__).parent.parent / "runtime" / "cpu" / "include"
DRIVER = Path(__file__).parent.parent / "runtime" / "cpu" / "src"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra",
)  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")


def compiler() -> list[str]:
    """The command of the C++ compiler: `$CXX` (which may have arguments), else the first of the usual names.

    Raises:
        KvdslError: if there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for name in named[:1] or _COMPILERS:
        path = shutil.which(name)
        if path:
            return [path, *named[1:]]
    tried = " ".join(named) or ", ".join(_COMPILERS)
    raise KvdslError(f"no C++ compiler found (tried {tried}); install g++ or clang++, or set CXX")


@lru_cache
def compiler_version(*command: str) -> str:
    """The first line of `--version`."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[0].strip() if done.stdout or done.stderr else "unknown"


@lru_cache
def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@lru_cache
def _runtime() -> bytes:
    """A digest of the headers and the driver: once a process, whatever is built."""
    digest = hashlib.sha256()
    for file in sorted((*INCLUDE.rglob("*.hpp"), *DRIVER.glob("*.?pp"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


def kernel_library(source: Path, name: str) -> Path:
    """The library of a policy's kernels, built now if it is not in the cache; building says so on standard error.

    Args:
        source: a file that includes `<kvdsl/decode.hpp>`.
        name: what it is, for the message and the file's name.

    Raises:
        KvdslError: without a compiler, without a writable cache folder, or if the compiler refuses the source.
    """
    return _library(source, name, driven=True)


def shared_library(source: Path, name: str) -> Path:
    """The same of a source that needs no driver."""
    return _library(source, name, driven=False)


def driver_objects() -> list[Path]:
    """The driver's object files, built now as far as they are not in the cache.

    Raises:
        KvdslError: as in `kernel_library`.
    """
    objects = {source: _cached(source, source.stem, ".o") for source in sorted(DRIVER.glob("*.cpp"))}
    missing = [source for source, made in objects.items() if not made.exists()]
    command = [*compiler(), *FLAGS, "-c"]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda source: _build(command, [source], objects[source]), missing))
    return list(objects.values())


def _library(source: Path, name: str, driven: bool) -> Path:
    library = _cached(source, name, ".so")
    if not library.exists():
        started = time.perf_counter()
        objects = driver_objects() if driven else []
        _build([*compiler(), *FLAGS, "-shared"], [source, *objects], library)
        taken = time.perf_counter() - started
        print(f"kvdsl: built the C++ kernels of `{name}` in {taken:.1f} s, once, into {library.parent}", file=sys.stderr)
    return library


def _cached(source: Path, name: str, suffix: str) -> Path:
    """Where in the cache lies what is built of a source."""
    cxx = compiler()
    digest = hashlib.sha256(_runtime())
    for part in (
        source.read_text(encoding="utf-8"),
        " ".join((*cxx, *FLAGS)),
        compiler_version(*cxx),
        _processor(),
        __version__,
    ):
        digest.update(part.encode() + b"\0")
    return cache_folder() / "cpu" / f"{name}-{digest.hexdigest()[:16]}{suffix}"


def _build(command: list[str], sources: list[Path], made: Path) -> None:
    folder = writable(made.parent)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as private:
        unpublished = Path(private) / made.name
        command = [*command, f"-I{INCLUDE}", *map(str, sources), "-o", str(unpublished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KvdslError(_refusal(command, done.stderr, folder / f"{made.name.rpartition('-')[0]}.log"))
        os.replace(unpublished, made)


def _refusal(command: list[str], output: str, log: Path) -> str:
    log.write_text(" ".join(command) + "\n\n" + output, encoding="utf-8")
    first = next((line for line in output.splitlines() if "error" in line), "no message")
    return f"the C++ compiler failed: {first.strip()}; the command and its whole output are in {log}"
