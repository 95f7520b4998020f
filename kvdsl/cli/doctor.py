"""`kvdsl doctor`: what works here, and why the rest does not.

Imports only the standard library until it has something to probe, and guards every probe: it is there for broken installations.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvdsl.cli.common import CLEAN, FINDINGS, finish, json_option, print_json
from kvdsl.environment import cores, processor, version


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `ok` is None for plain facts."""

    group: str
    name: str
    ok: bool | None
    detail: str
    help: str | None = None


Probe = Callable[[], Iterator[Finding]]


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say what works on this machine, and why the rest does not.

    Looks at the versions of what kvdsl needs, the C++ compiler, the cache folders and the backends. The exit code is 1 if
    something is missing that kvdsl cannot do without.

    \b
    Examples:
      kvdsl doctor
      kvdsl doctor --json        for a bug report
    """
    findings = [finding for probe in PROBES for finding in _guarded(probe)]
    if as_json:
        print_json({"ok": _healthy(findings), "checks": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    finish(CLEAN if _healthy(findings) else FINDINGS)


def _healthy(findings: list[Finding]) -> bool:
    """The torch backend serves wherever torch does; without a C++ compiler kvdsl is slow, but it works."""
    needed = {"packages", "files"}
    return all(finding.ok is not False or finding.group not in needed for finding in findings)


def _guarded(probe: Probe) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:
        yield Finding(
            "doctor", probe.__name__.strip("_"), False, f"the check itself failed: {type(error).__name__}: {error}"
        )


def _print(findings: list[Finding]) -> None:
    marks = {True: click.style("ok", fg="green"), False: click.style("no", fg="red"), None: "  "}
    width = max(len(finding.name) for finding in findings)
    group = None
    for finding in findings:
        if finding.group != group:
            group = finding.group
            click.echo(f"\n{group}" if finding is not findings[0] else group)
        click.echo(f"  {marks[finding.ok]} {finding.name:<{width}}  {finding.detail}")
        if finding.help:
            click.echo(f"     {'':<{width}}  help: {finding.help}")


# -- probes ------------------------------------------------------------------------------------------------------------


def _machine() -> Iterator[Finding]:
    python = platform.python_version()
    new_enough = sys.version_info >= (3, 10)
    yield Finding("machine", "python", new_enough, f"{python} ({sys.executable})", None if new_enough else "3.10 or later")
    yield Finding("machine", "system", None, f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield Finding("machine", "processor", None, f"{processor()}, {cores()} cores for this process")
    yield Finding("machine", "vectors", None, _vectors())


def _vectors() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    known = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
    line = next((line for line in flags.splitlines() if line.startswith(("flags", "Features"))), "")
    words = set(line.split())
    return " ".join(name for name in known if name in words) or "none that kvdsl knows of"


_PACKAGES = ("click", "jinja2", "lark", "numpy", "platformdirs", "pydantic", "rich", "torch", "transformers")


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        found = version(name)
        detail = found or "not installed"
        yield Finding("packages", name, found is not None, detail, None if found else f"pip install {name}")
    yield Finding("packages", "triton", None, version("triton") or "not installed (nothing needs it in this version)")


def _files() -> Iterator[Finding]:
    from kvdsl.resources import resource

    for parts in (("grammar", "kv.lark"), ("templates",), ("policies",)):
        name = "/".join(parts)
        try:
            yield Finding("files", name, True, str(resource(*parts)))
        except FileNotFoundError as error:
            yield Finding("files", name, False, str(error), "reinstall kvdsl")


def _reference_model() -> Iterator[Finding]:
    from kvdsl.errors import KvdslError
    from kvdsl.lab import lab

    try:
        assets = lab("assets", "the reference model")
        folder = assets.reference_model_path()
        assets.check_digests(folder)
    except KvdslError as error:
        yield Finding("files", "reference model", None, str(error))
    else:
        yield Finding("files", "reference model", True, str(folder))


def _caches() -> Iterator[Finding]:
    from kvdsl.build.cache import cache_folder

    folder = cache_folder()
    problem = _unwritable(folder)
    hint = "set KVDSL_CACHE_DIR to a folder that can be written to" if problem else None
    yield Finding("caches", "kvdsl", problem is None, f"{folder}{f' ({problem})' if problem else ''}", hint)
    home = Path.home()
    others = {
        "triton": os.environ.get("TRITON_CACHE_DIR", str(home / ".triton" / "cache")),
        "hugging face": os.environ.get("HF_HOME", str(home / ".cache" / "huggingface")),
    }
    for name, path in others.items():
        yield Finding("caches", name, None, path)


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there, by trying it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


_PROGRAM = """
#include <cmath>
#include <omp.h>
extern "C" int kvdsl_probe() { return omp_get_max_threads(); }
"""


def _compiler() -> Iterator[Finding]:
    from kvdsl.build.cxx import FLAGS, compiler, compiler_version
    from kvdsl.errors import KvdslError

    try:
        command = compiler()
    except KvdslError as error:
        yield Finding("C++", "compiler", False, str(error), "without one the torch backend serves, which is slower")
        return
    yield Finding("C++", "compiler", True, f"{compiler_version(*command)} ({' '.join(command)})")
    problem = _build_problem([*command, *FLAGS])
    hint = "the compiler needs C++17, -march=native and OpenMP" if problem else None
    yield Finding("C++", "builds", problem is None, problem or "a test library with OpenMP", hint)


def _build_problem(command: list[str]) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="utf-8")
        arguments = [*command, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return next((line.strip() for line in done.stderr.splitlines() if "error" in line), "it failed without a word")


def _backends() -> Iterator[Finding]:
    from kvdsl.build.cache import cache_folder
    from kvdsl.build.cxx import compiler
    from kvdsl.errors import KvdslError

    try:
        import torch
    except ImportError as error:
        yield Finding("backends", "torch", False, f"torch cannot be imported: {error}", "pip install torch")
        return
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    yield Finding("backends", "torch", True, f"serves anywhere{gpu}")
    try:
        compiler()
        problem = _unwritable(cache_folder())
    except KvdslError as error:
        problem = str(error)
    yield Finding("backends", "cpu", problem is None, problem or "C++ kernels, fused and threaded")
    yield _triton(torch.cuda.is_available())


def _triton(gpu: bool) -> Finding:
    try:
        import triton
    except ImportError as error:
        return Finding("backends", "triton", False, f"Triton cannot be imported: {error}", "pip install triton")
    where = "serves here" if gpu else "compiles for GPUs (`kvdsl build`), of which there is none here"
    return Finding("backends", "triton", True, f"Triton {triton.__version__} {where}")


def _transformers() -> Iterator[Finding]:
    try:
        import kvdsl.runtime.hf  # noqa: F401
    except Exception as error:
        yield Finding(
            "backends", "transformers", False, f"the caches cannot be imported: {error}", "pip install -U transformers"
        )
    else:
        yield Finding("backends", "transformers", True, "generated caches can be imported")


PROBES: tuple[Probe, ...] = (_machine, _packages, _files, _reference_model, _caches, _compiler, _backends, _transformers)
"""In the order in which they are shown."""
