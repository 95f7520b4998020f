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

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdsl.errors import KvdslError
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.backend import interpreted, kernels_of
from kvdsl.runtime.gpu.layout import give_back, take
from kvdsl.runtime.gpu.sizes import (
    ATTEND_OPTIONS,
    CHOOSE_OPTIONS,
    GIVE_BACK_OPTIONS,
    LOOK_OPTIONS,
    OBSERVE_OPTIONS,
    SETTLE_OPTIONS,
    TAKE_OPTIONS,
    Sizes,
)
from kvdsl.runtime.rope import Rope

DEFAULT = Sizes(group=4, key_dim=128, value_dim=128, item=2)
"""The configuration that is compiled: bfloat16, four query heads a KV head, heads of 128."""

SPLITS = 32
"""Of a KV head in that configuration."""

SKETCHED = 16
"""Dims of a sketch there."""

SLOTS_OF_A_BLOCK = 16
"""Under `storage blocks` there."""

WHOLLY = Rope(torch.zeros(DEFAULT.key_dim // 2), "half")
"""Under compact positions all of a key turns there, its first half with its second."""

STRIDES = tuple(
    f"{tensor}_{dim}"
    for tensor, dims in (("query", ("row", "head", "token")), ("key", ("row", "head", "slot")))
    for dim in dims
)
"""Of `observe`'s arguments; multiples of a head's size."""

OF_PROMPTS = ("over_slots", "observe")
"""Kernels whose slots are a prompt's tokens, however many; in a step they are a multiple of 16 (`kvdsl.runtime.state.slots`)."""

_MODEL = "*bf16"
_TYPES = {
    **dict.fromkeys(
        ("query", "new_key", "new_value", "keys", "values", "out", "sinks", "sketch_keys", "page_bounds", "half_keys"),
        _MODEL,
    ),
    **dict.fromkeys(
        ("part", "top", "total", "logits", "new_logits", "columns", "constants", "work", "lse", "reduced", "angles"), "*fp32"
    ),
    **dict.fromkeys(("position", "seen", "newest", "first_free", "held", "ring_rows", "sketch", "prompt", "copied"), "*i32"),
    **dict.fromkeys(("grades", "chosen", "found", "joins"), "*i32"),
    **dict.fromkeys(("rank", "length", "gaps", "wanted", "owned", "free"), "*i32"),
    **dict.fromkeys(("first_new", "first_asked", "behind", "order", "live_slots"), "*i32"),
    **dict.fromkeys(
        ("slots", "heads", "per_split", "splits", "window", "seed", "layer", "first_head", "width", "pages"), "i32"
    ),
    **dict.fromkeys(("tokens", "batch", "blocks", *STRIDES), "i32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
    **dict.fromkeys(("first_rows", "table"), "*i64"),
    "kept": "*i8",
    "taken": "*i8",
    "real": "*i1",
    "numbers": "*fp64",
}
"""Of the kernels' arguments, in Triton's words."""


@dataclass(frozen=True)
class Row:
    """What one kernel takes of one target.

    Attributes:
        policy, kernel: `attend`, which policies share, or `settle`; where a query attends to a selection `look` and `choose`, too,
            under a hard cap `make_room`, `agree` where heads do, and `take` and `give_back` where slots lie in blocks; for prompts
            `observe`, and `over_slots` before it where values over slots are reduced.
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
    kernels = kernels_of(source)
    arguments = kernels.settle.arg_names
    selects, block = "SELECTS" in arguments, SLOTS_OF_A_BLOCK if "table" in arguments else 0
    constants = {"LOGITS": "logits" in arguments, "DOT": tl.bfloat16, "SINKS": False, "SELECTS": selects}
    constants |= {"PADDED": False, "CAPPED": False, "BEFORE": False, "SIZE": block, "HALVES": "half_keys" in arguments}
    rope = WHOLLY if "rank" in arguments else None
    absent = {"sinks", "order"} | ({"rank", "length", "angles"} if rope is None else set())
    absent |= (set() if block else {"table"}) | (set() if constants["HALVES"] else {"half_keys"})
    constants |= dict.fromkeys(absent)
    width = SKETCHED if "W_PAD" in arguments else 0
    wanted = [
        ("attend", attend, DEFAULT.attend(rope), ATTEND_OPTIONS),
        ("settle", kernels.settle, DEFAULT.settle(SPLITS, width, rope), SETTLE_OPTIONS),
    ]
    if block:
        wanted.insert(1, ("take", take, DEFAULT.take(SPLITS), TAKE_OPTIONS))
    if selects:
        wanted[:0] = [
            ("look", kernels.look, DEFAULT.look(width or DEFAULT.key_dim, in_blocks=block > 0), LOOK_OPTIONS),
            ("choose", kernels.choose, DEFAULT.choose(SPLITS, pages="pages" in arguments), CHOOSE_OPTIONS),
        ]
    if hasattr(kernels, "make_room"):
        wanted.insert(0, ("make_room", kernels.make_room, DEFAULT.settle(SPLITS), SETTLE_OPTIONS))
    if hasattr(kernels, "agree"):
        wanted.append(("agree", kernels.agree, DEFAULT.settle(SPLITS), SETTLE_OPTIONS))
    if block:
        wanted.append(("give_back", give_back, DEFAULT.give_back(block), GIVE_BACK_OPTIONS))
    for kernel, sizes in (("over_slots", DEFAULT.over_slots()), ("observe", DEFAULT.observe())):
        if hasattr(kernels, kernel):
            wanted.append((kernel, getattr(kernels, kernel), sizes, OBSERVE_OPTIONS))
    for kernel, function, sizes, options in wanted:
        for name, target in targets.items():
            yield _row(stem, kernel, name, target, function, sizes | constants, options)


def _row(
    stem: str, kernel: str, name: str, target: GPUTarget, function: Any, constants: dict[str, Any], options: dict[str, int]
) -> Row:
    begun = time.perf_counter()
    try:
        compiled = triton.compile(
            _source(function, constants, STRIDES if kernel in OF_PROMPTS else ("slots",)),
            target=target,
            options={**options, "enable_fp_fusion": False},
        )
    except Exception as error:
        raise KvdslError(f"Triton {triton.__version__} cannot compile `{kernel}` of {stem} for {name}: {error}") from error
    ms = (time.perf_counter() - begun) * 1e3
    registers, spills = _nvidia(compiled) if target.backend == "cuda" else _amd(compiled)
    return Row(stem, kernel, name, registers, compiled.metadata.shared, spills, round(ms, 1))


def _source(function: Any, constants: dict[str, Any], multiples: tuple[str, ...]) -> Any:
    """The kernel with the types of its arguments. Tensors begin at multiples of 16 bytes, as torch allocates them.

    Args:
        multiples: numbers among them that are multiples of 16.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else _TYPES[name] for name in names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(names)
        if signature[name].startswith("*") or name in multiples
    }
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
    """Registers, and bytes of a thread's scratch memory, from the metadata of the object. Scalars that find a place in another
    vector register, as they do, are in none of that memory.
    """
    text = compiled.asm["amdgcn"]
    return _found(r"\.vgpr_count:\s*(\d+)", text), _found(r"\.private_segment_fixed_size:\s*(\d+)", text)


def _found(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise KvdslError(f"the compiler's report has no `{pattern}`:\n{text[-2000:]}")
    return int(match[1])
