"""`kvdsl doctor`: what works on this machine, and what does not.

Imports only the standard library before the probes, and guards every probe, because it runs on broken installations.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import CLEAN, FINDINGS, finish, json_option, print_json
from kvdsl.environment import cores, processor, version


@dataclass(frozen=True)
class Finding:
    """The result of one probe.

    Attributes:
        ok: None for plain facts.
        needed: whether kvdsl cannot work without it, so that the command fails.
    """

    group: str
    name: str
    ok: bool | None
    detail: str
    help: str | None = None
    needed: bool = True


Probe = Callable[[], Iterator[Finding]]


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show what works on this machine, and what does not.

    Checks the versions of required packages, the C++ compiler, the cache folders and the backends; builds the kernels of a first use,
    and compares the backends on a small model. The exit code is 1 if a check fails or a requirement is missing. Without a C++ compiler
    kvdsl is slower, but works.

    \b
    Examples:
      kvdsl doctor
      kvdsl doctor --json        for a bug report
    """
    with click.progressbar(PROBES, label="looking", file=sys.stderr, hidden=not sys.stderr.isatty()) as probes:
        findings = [finding for probe in probes for finding in _guarded(probe)]
    if as_json:
        print_json({"ok": _healthy(findings), "checks": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    finish(CLEAN if _healthy(findings) else FINDINGS)


def _healthy(findings: list[Finding]) -> bool:
    return all(finding.ok is not False or not finding.needed for finding in findings)


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
    return " ".join(name for name in known if name in words) or "none that kvdsl uses"


_PACKAGES = (
    "click",
    "filelock",
    "jinja2",
    "lark",
    "numpy",
    "platformdirs",
    "pydantic",
    "pygments",
    "rich",
    "torch",
    "transformers",
)


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        found = version(name)
        detail = found or "not installed"
        yield Finding("packages", name, found is not None, detail, None if found else f"pip install {name}")
    yield Finding("packages", "triton", None, version("triton") or "not installed (only GPUs need it)")
    yield Finding("packages", "vllm", None, _vllm())


def _vllm() -> str:
    from kvdsl.integrations.vllm.launch import installed
    from kvdsl.integrations.vllm.releases import RELEASES, tested

    found = installed()
    if found is None:
        return "not installed (only `kvdsl serve` needs it)"
    return found if tested(found) else f"{found}, which kvdsl was not tested with; tested are {', '.join(RELEASES)}"


def _files() -> Iterator[Finding]:
    from kvdsl.files import resource

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
    from kvdsl.build import cache_folder

    folder = cache_folder()
    problem = _unwritable(folder)
    hint = "set KVDSL_CACHE_DIR to a writable folder" if problem else None
    yield Finding("caches", "kvdsl", problem is None, f"{folder}{f' ({problem})' if problem else ''}", hint)
    home = Path.home()
    others = {
        "triton": os.environ.get("TRITON_CACHE_DIR", str(home / ".triton" / "cache")),
        "hugging face": os.environ.get("HF_HOME", str(home / ".cache" / "huggingface")),
    }
    for name, path in others.items():
        yield Finding("caches", name, None, path)


def _unwritable(folder: Path) -> str | None:
    """Try to write there; return the error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


_PROGRAM = """
#include <cmath>
#include <omp.h>
#include <kvdsl/decode.hpp>
extern "C" int kvdsl_probe() { return omp_get_max_threads(); }
"""


def _compiler() -> Iterator[Finding]:
    from kvdsl.build.cxx import compiler, compiler_version
    from kvdsl.errors import KvdslError

    try:
        command = compiler()
    except KvdslError as error:
        hint = "without one the slower torch backend runs"
        yield Finding("C++", "compiler", False, str(error), hint, needed=False)
        return
    yield Finding("C++", "compiler", True, f"{compiler_version(*command)} ({' '.join(command)})")
    if problem := _build_problem():
        hint = "the compiler must support C++17, -march=native and OpenMP; CXX selects another one"
        yield Finding("C++", "builds", False, problem, hint)
    else:
        yield Finding("C++", "builds", True, "a test library with OpenMP, and runs it")


def _build_problem() -> str | None:
    """Return why a policy's library cannot be built and run here; None if it can."""
    import ctypes

    from kvdsl.build.cxx import build_library
    from kvdsl.errors import KvdslError

    with tempfile.TemporaryDirectory(prefix="kvdsl-doctor-") as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(_PROGRAM, encoding="utf-8")
        try:
            build_library([source], library)
            threads = ctypes.CDLL(str(library)).kvdsl_probe()
        except (KvdslError, OSError, AttributeError) as error:
            return str(error)
    return None if threads > 0 else "OpenMP reports no threads"


def _backends() -> Iterator[Finding]:
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
    except KvdslError as error:
        yield Finding("backends", "cpu", False, str(error), needed=False)
    else:
        problem = _decode_problem()
        yield Finding(
            "backends", "cpu", problem is None, problem or "C++ kernels, fused and threaded: a test decodes like torch"
        )
    yield _triton(torch.cuda.is_available())


def _decode_problem() -> str | None:
    """Return why a policy's C++ kernels do not give a small random model the torch backend's logits; None if they do."""
    import torch
    import transformers

    import kvdsl
    from kvdsl.errors import KvdslError
    from kvdsl.runtime.hf.versions import with_cache

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))  # ready for inference, without dropout
        tokens, logits = torch.randint(64, (1, 32)), {}
        steps = (tokens[:, :24], *tokens[:, 24:].unbind(1))
        try:
            roco: Any = kvdsl.load("roco")
            for backend in ("cpu", "torch"):
                cache = roco(model, budget=16, backend=backend)
                logits[backend] = torch.cat([model(step.view(1, -1), **with_cache(cache)).logits for step in steps], dim=1)
        except KvdslError as error:
            return str(error)
    apart = (logits["cpu"] - logits["torch"]).abs().max().item()
    return None if apart < 1e-3 else f"the logits of a test differ by {apart:.2g} from those of the torch backend"


def _triton(gpu: bool) -> Finding:
    try:
        import triton
    except ImportError as error:
        hint = "pip install triton"
        return Finding("backends", "triton", False, f"Triton cannot be imported: {error}", hint, needed=gpu)
    where = "runs here" if gpu else "compiles for GPUs (`kvdsl build`), but there is none here"
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
"""The probes, in the order of the output."""
