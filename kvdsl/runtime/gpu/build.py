"""Kernels compiled ahead of time, for GPUs that this machine need not have, and what they take of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.backend import interpreted, kernels_of
from kvdsl.runtime.gpu.sizes import ATTEND_OPTIONS, SETTLE_OPTIONS, Sizes

DEFAULT = Sizes(group=4, key_dim=128, value_dim=128, item=2)
"""The configuration that is compiled: bfloat16, four query heads a KV head, heads of 128."""

SPLITS = 32
"""Of a KV head in that configuration."""

_MODEL = "*bf16"
_TYPES = {
    **dict.fromkeys(("query", "new_key", "new_value", "keys", "values", "out", "sinks"), _MODEL),
    **dict.fromkeys(("part", "top", "total", "logits", "new_logits", "columns", "work"), "*fp32"),
    **dict.fromkeys(("position", "seen", "newest", "first_free", "held", "ring_rows"), "*i32"),
    **dict.fromkeys(("slots", "per_split", "splits", "window", "seed", "layer", "first_head"), "i32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
    "kept": "*i8",
    "real": "*i1",
    "numbers": "*fp64",
}
"""Of the kernels' arguments, in Triton's words."""


@dataclass(frozen=True)
class Row:
    """What one kernel takes of one target.

    Attributes:
        policy, kernel: `attend`, which policies share, or `settle`.
        registers: of a thread. shared_bytes: of a program. spills: bytes (on AMD registers) that do not
            fit in there.
        ms: how long compiling took; 0 if it had been done.
    """

    policy: str
    kernel: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spills: int | None
    ms: float


def parse_target(text: str) -> GPUTarget:
    """`cuda:90` or `hip:gfx942`.

    Raises:
        KvdslError: if it is neither.
    """
    backend, _, arch = text.partition(":")
    if backend == "cuda" and arch.isdigit():
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip" and re.fullmatch(r"gfx[0-9a-f]+", arch):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise KvdslError(f"`{text}` is no target: name a GPU as cuda:90 or hip:gfx942, or cpu")


def build(stem: str, source: Path, targets: dict[str, GPUTarget]) -> Iterator[Row]:
    """Compile a policy's kernels for every target.

    Args:
        stem: the policy's name for the report. source: its `kernels_triton.py`.

    Raises:
        KvdslError: in Triton's interpreter, which compiles nothing; or if Triton refuses a kernel.
    """
    if interpreted():
        raise KvdslError("TRITON_INTERPRET=1 asks for Triton's interpreter, which compiles nothing: unset it")
    settle = kernels_of(source).settle
    constants = {"LOGITS": "logits" in settle.arg_names, "DOT": tl.bfloat16, "SINKS": False}
    for name, target in targets.items():
        yield _row(stem, "attend", name, target, attend, DEFAULT.attend() | constants, ATTEND_OPTIONS)
    for name, target in targets.items():
        yield _row(stem, "settle", name, target, settle, DEFAULT.settle(SPLITS) | constants, SETTLE_OPTIONS)


def _row(
    stem: str, kernel: str, name: str, target: GPUTarget, function: Any, constants: dict[str, Any], options: dict[str, int]
) -> Row:
    begun = time.perf_counter()
    try:
        compiled = triton.compile(
            _source(function, constants), target=target, options={**options, "enable_fp_fusion": False}
        )
    except Exception as error:
        raise KvdslError(f"Triton {triton.__version__} cannot compile `{kernel}` of {stem} for {name}: {error}") from error
    ms = (time.perf_counter() - begun) * 1e3
    registers, spills = _nvidia(compiled) if target.backend == "cuda" else _amd(compiled)
    return Row(stem, kernel, name, registers, compiled.metadata.shared, spills, round(ms, 1))


def _source(function: Any, constants: dict[str, Any]) -> Any:
    """The kernel with the types of its arguments. Tensors begin at multiples of 16 bytes, as torch allocates them."""
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else _TYPES[name] for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    return ASTSource(function, signature, {name: x for name, x in constants.items() if name in names}, aligned)


def _nvidia(compiled: Any) -> tuple[int, int]:
    """Registers, and bytes of a thread's stack, of the binary itself. The kernels have no arrays: on a stack there are spills."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _found(r"REG:(\d+)", told), _found(r"STACK:(\d+)", told) + _found(r"LOCAL:(\d+)", told)


def _amd(compiled: Any) -> tuple[int, int]:
    """Registers and spilled registers, from the metadata of the object."""
    text = compiled.asm["amdgcn"]
    spills = _found(r"\.vgpr_spill_count:\s*(\d+)", text) + _found(r"\.sgpr_spill_count:\s*(\d+)", text)
    return _found(r"\.vgpr_count:\s*(\d+)", text), spills


def _found(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise KvdslError(f"the compiler's report has no `{pattern}`:\n{text[-2000:]}")
    return int(match[1])
