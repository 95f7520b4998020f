"""Many policies in one C++ translation unit: building each alone would take longer than running it.

Flags are those of a cache, but for the optimiser's effort.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvdsl.build.cxx import FLAGS, INCLUDE, compiler
from kvdsl.runtime.cpu_backend import CpuBackend

ENTRIES = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16", torch.float16: "decode_f16"}


def build(sources: Mapping[str, tuple[str, torch.dtype]], effort: str = "-O1") -> dict[str, Any]:
    """Compile policies together, each for one dtype.

    Args:
        sources: `kernels_cpu.cpp` and the dtype, by the policy's stem.

    Returns:
        A backend for each.

    Raises:
        RuntimeError: if the compiler has anything to say.
    """
    with tempfile.TemporaryDirectory(prefix="kvdsl-units-") as folder:
        source, library = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        source.write_text("".join(_part(stem, text, ENTRIES[dtype]) for stem, (text, dtype) in sources.items()))
        flags = [effort if flag.startswith("-O") else flag for flag in FLAGS]
        command = [*compiler(), *flags, "-Werror", f"-I{INCLUDE}", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{', '.join(sources)}: {done.stderr[:3000]}")
        loaded = ctypes.CDLL(str(library))
    return {stem: _backend(getattr(loaded, f"{stem}_{ENTRIES[dtype]}")) for stem, (_, dtype) in sources.items()}


def _part(stem: str, text: str, entry: str) -> str:
    """One policy, without the entry points that nobody calls."""
    lines = [line for line in text.splitlines() if not any(f"KVDSL_ENTRY({other})" in line for other in _others(entry))]
    return "\n".join(["#undef KVDSL_ENTRY", f"#define KVDSL_ENTRY(name) {stem}_##name", *lines, ""])


def _others(entry: str) -> list[str]:
    return [other for other in ENTRIES.values() if other != entry]


def _backend(decode: Any) -> CpuBackend:
    """A backend for a function that is loaded already."""
    made = CpuBackend.__new__(CpuBackend)
    made._decode = decode
    return made
