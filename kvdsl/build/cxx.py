"""Build C++ into shared libraries, once.

The code that all policies share, the driver, is compiled into objects once; a policy's own build then takes a fraction of a second.
The name of a build is a digest of its inputs: source, headers, flags, compiler and processor. `kvdsl.build.store` keeps it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from kvdsl.abi import VERSION
from kvdsl.build import announces, cache_folder
from kvdsl.build.store import entry
from kvdsl.errors import KvdslError

INCLUDE = Path(__file__).parent.parent / "runtime" / "cpu" / "include"
DRIVER = Path(__file__).parent.parent / "runtime" / "cpu" / "src"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra",
)  # fmt: skip
EXACT = ("-ffp-contract=off",)
"""For all but the driver: each operation of a policy is rounded, as in every other backend."""
_COMPILERS = ("g++", "clang++", "c++")


def compiler() -> list[str]:
    """Return the command of the C++ compiler: `$CXX` (which may have arguments), else the first of the usual names.

    Raises:
        KvdslError: if there is none.
    """
    named = _words("CXX")
    for name in named[:1] or _COMPILERS:
        path = shutil.which(name)
        if path:
            return [path, *named[1:]]
    tried = " ".join(named) or ", ".join(_COMPILERS)
    raise KvdslError(f"no C++ compiler found (tried {tried}); install g++ or clang++, or set CXX")


def flags() -> list[str]:
    """Return the flags of every build, then `$KVDSL_CXXFLAGS`: for example `-march=x86-64-v3` for older machines.

    Raises:
        KvdslError: if that cannot be read.
    """
    return [*FLAGS, *_words("KVDSL_CXXFLAGS")]


def _words(variable: str) -> list[str]:
    """Split an environment variable like a shell."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        other = _OTHER if variable == "CXX" else f"change {variable}"
        raise KvdslError(f"{variable} cannot be read (`{os.environ[variable]}`: {error}); {other}") from error


@lru_cache
def compiler_version(*command: str) -> str:
    """Return the first line of `--version`."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError:  # there is no such program; the build reports it
        return "unknown"
    said = (done.stdout or done.stderr).strip()
    return said.splitlines()[0] if said else "unknown"


@lru_cache
def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@lru_cache
def _runtime() -> bytes:
    """Return a digest of the headers and the driver, computed once per process."""
    digest = hashlib.sha256()
    for file in sorted((*INCLUDE.rglob("*.hpp"), *DRIVER.glob("*.?pp"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


def kernel_library(source: Path, name: str) -> Path:
    """Return the library of a policy's kernels, building it unless it is cached; a build is announced on standard error.

    Args:
        source: a file that includes `<kvdsl/decode.hpp>`.
        name: its name in messages and the file's name.

    Raises:
        KvdslError: without a compiler or a writable cache folder, or if the compiler refuses the source.
    """
    return _library(source, name, driven=True)


def shared_library(source: Path, name: str) -> Path:
    """Return the library of a source that is not linked with the driver; it may include its headers."""
    return _library(source, name, driven=False)


def open_library(build: Callable[[], Path], name: str) -> ctypes.CDLL:
    """Open a library, rebuilding it once if it cannot be loaded, as from the cache folder of another machine.

    Args:
        build: returns its file, building it if it is missing.
        name: its name in messages.

    Raises:
        KvdslError: if it still cannot be loaded, and what `build` raises.
    """
    path = build()
    try:
        return _opened(path)
    except OSError:
        with suppress(OSError):
            path.unlink()
    try:
        return _opened(build())
    except OSError as error:
        raise KvdslError(f"the C++ kernels of `{name}` cannot be loaded ({error}); set KVDSL_CACHE_DIR elsewhere") from error


@lru_cache
def _opened(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def driver_objects() -> list[Path]:
    """Return the driver's object files, building them unless they are cached.

    Raises:
        KvdslError: as in `kernel_library`.
    """
    sources = sorted(DRIVER.glob("*.cpp"))
    command = [*compiler(), *flags(), "-c"]

    def make(folder: Path) -> None:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda source: _compile(command, [source], folder / f"{source.stem}.o"), sources))

    folder = entry(_place("driver"), "driver", make)
    return [folder / f"{source.stem}.o" for source in sources]


def _library(source: Path, name: str, driven: bool) -> Path:
    def make(folder: Path) -> None:
        started = time.perf_counter()
        if announces():
            print(
                f"kvdsl: building the C++ kernels of `{name}`, which takes some seconds, once", file=sys.stderr, flush=True
            )
        objects = driver_objects() if driven else []
        build_library([source, *objects], folder / f"{name}.so")
        taken = time.perf_counter() - started
        if announces():
            print(f"kvdsl: built the C++ kernels of `{name}` in {taken:.1f} s, once, into {place.parent}", file=sys.stderr)

    place = _place(name, source.read_text(encoding="utf-8"))
    return entry(place, name, make) / f"{name}.so"


def _place(name: str, source: str = "") -> Path:
    """Return the cache entry for a build of the runtime, and possibly a source."""
    cxx = compiler()
    digest = hashlib.sha256(_runtime())
    for part in (source, " ".join((*cxx, *flags(), *EXACT)), compiler_version(*cxx), _processor(), VERSION):
        digest.update(part.encode() + b"\0")
    return cache_folder() / "cpu" / f"{name}-{digest.hexdigest()[:16]}"


def build_library(sources: list[Path], library: Path) -> None:
    """Build a library of sources and objects.

    Raises:
        KvdslError: without a compiler, or if it fails or writes nothing.
        OSError: if the folder cannot be written to.
    """
    _compile([*compiler(), *flags(), *EXACT, "-shared"], sources, library)


def _compile(command: list[str], sources: list[Path], made: Path) -> None:
    """Run the compiler. Its temporary files are next to the output."""
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=made.parent) as temporary:
        command = [*command, f"-I{INCLUDE}", f"-I{DRIVER}", *map(str, sources), "-o", str(made)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, "TMPDIR": temporary},
            )
        except OSError as error:
            raise KvdslError(f"the C++ compiler {command[0]} cannot be run ({error.strerror}); {_OTHER}") from error
    if done.returncode:
        raise KvdslError(_failure(command, done, made))
    if not made.is_file():
        raise KvdslError(f"the C++ compiler {command[0]} reports success, but wrote no file; {_OTHER}")
    if _cut_short(made):
        raise KvdslError(
            f"the C++ compiler {command[0]} reports success, but wrote an incomplete file; is the disk full? else {_OTHER}"
        )


_OTHER = "set CXX to another one"


def _cut_short(made: Path) -> bool:
    """Return whether an ELF file ends before its section table, which linkers write last; loading it could kill the process."""
    with open(made, "rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\2\1" or len(header) < 64:  # 64 bits, little-endian
        return False
    offset, size, count = (*struct.unpack_from("<Q", header, 40), *struct.unpack_from("<HH", header, 58))
    return bool(made.stat().st_size < offset + size * count)


def _failure(command: list[str], done: subprocess.CompletedProcess[str], made: Path) -> str:
    """Return the message for a failed compiler. Its full output goes to a log in the cache folder, if there is room."""
    output = done.stderr.strip() or done.stdout.strip()
    first = (
        next((line.strip() for line in output.splitlines() if "error" in line.lower()), None) or output.partition("\n")[0]
    )
    message = f"the C++ compiler failed: {first or f'{command[0]} ended with {done.returncode} without output'}"
    if "No space left" in output or "File size limit" in output:
        return f"{message}; free some space at {cache_folder()}, or set KVDSL_CACHE_DIR to a folder on another disk"
    log = cache_folder() / "cpu" / f"{made.stem}.log"
    try:
        log.write_text(" ".join(command) + "\n\n" + output, encoding="utf-8")
    except OSError:
        return f"{message}; {' '.join(command)} shows the full output"
    return f"{message}; the command and its full output are in {log}"
