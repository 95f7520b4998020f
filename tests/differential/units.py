"""Many policies in one C++ translation unit: building each alone would take longer than running it.

Flags are those of a cache, but for the optimiser's effort, and warnings are errors.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvdsl.build.cxx import EXACT, INCLUDE, compiler, driver_objects, flags
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.spec import PolicySpec

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_ENTRY = re.compile(r"int KVDSL_ENTRY\(\w+?(?:_(f32|bf16|f16))?\)\([^{]*\{[^}]*\}\n")


def build(sources: Mapping[str, tuple[str, PolicySpec, torch.dtype]], effort: str = "-O1") -> dict[str, CpuBackend]:
    """Compile policies together, each for one dtype.

    Args:
        sources: `kernels_cpu.cpp`, the spec and the dtype, by the policy's stem.

    Returns:
        A backend for each.

    Raises:
        RuntimeError: if the compiler has anything to say.
    """
    with tempfile.TemporaryDirectory(prefix="kvdsl-units-") as folder:
        source, library = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        source.write_text("".join(_part(stem, text, SUFFIX[dtype]) for stem, (text, _, dtype) in sources.items()))
        files = [str(source), *map(str, driver_objects())]
        told = [effort if flag.startswith("-O") else flag for flag in flags()]
        strict = ["-Werror"] if "g++" in Path(compiler()[0]).name.replace("clang++", "") else []  # clang warns of more
        command = [*compiler(), *told, *EXACT, "-shared", *strict, f"-I{INCLUDE}", *files, "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{', '.join(sources)}: {done.stderr[:3000]}")
        loaded = ctypes.CDLL(str(library))
        return {
            stem: _backend(loaded, stem, replace(spec, cpu_source=source), dtype)
            for stem, (_, spec, dtype) in sources.items()
        }


def _part(stem: str, text: str, suffix: str) -> str:
    """One policy, without the entry points of other dtypes."""

    def wanted(entry: re.Match[str]) -> str:
        return entry[0] if entry[1] in (None, suffix) else ""

    return f"#undef KVDSL_ENTRY\n#define KVDSL_ENTRY(name) {stem}_##name\n{_ENTRY.sub(wanted, text)}\n"


def _backend(library: Any, stem: str, spec: PolicySpec, dtype: torch.dtype) -> CpuBackend:
    with patch("kvdsl.runtime.cpu.backend._library", return_value=_Named(library, stem)):
        return CpuBackend(spec, torch.device("cpu"), dtype)


class _Named:
    """A library in which one policy's functions have the names that they have in a library of its own."""

    def __init__(self, library: Any, stem: str) -> None:
        self._library, self._stem = library, stem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name.replace("kvdsl_", f"{self._stem}_", 1))
