"""The environment of a result: the `environment` object of every `--json` output."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvdsl.abi import VERSION


def environment(*, dtype: str | None = None, seed: int | None = None) -> dict[str, Any]:
    """Return versions and machine. torch is described only if it is imported already, because most commands do not need it.

    Args:
        dtype, seed: of the computation, if any.
    """
    return {
        "kvdsl": VERSION,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "triton": version("triton"),
        "cpu": processor(),
        "threads": _threads(),
        "gpu": _gpu(),
        "dtype": dtype,
        "seed": seed,
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, without importing it; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_WIDEST = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Linux names of instruction sets that matter for speed, the widest first, and their usual names."""


def processor() -> str:
    """Return the processor's name and, on Linux, its widest instructions, because some makers use one name for all models."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
        has = told.get("flags", "").split()
        return ", ".join([told["model name"], *(name for flag, name in _WIDEST.items() if flag in has)][:2])
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torch() -> Any:
    return sys.modules.get("torch")


def _threads() -> int:
    torch = _torch()
    return cores() if torch is None else int(torch.get_num_threads())


def _gpu() -> str | None:
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())
