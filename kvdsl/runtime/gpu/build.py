"""Ahead-of-time compilation of kernels, also for GPUs that this machine lacks, with their resource usage."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdsl.build import Row
from kvdsl.errors import KvdslError
from kvdsl.memory import dtypes_of
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.backend import chooses_pages, interpreted
from kvdsl.runtime.gpu.kernels import kernels_of
from kvdsl.runtime.gpu.launch import check_release, precision_of, tool
from kvdsl.runtime.gpu.layout import give_back, take
from kvdsl.runtime.gpu.report import Workload, taken
from kvdsl.runtime.gpu.sizes import (
    ALONE_OPTIONS,
    CHOOSE_OPTIONS,
    COMPARED,
    GIVE_BACK_OPTIONS,
    LOOK_OPTIONS,
    OBSERVE_OPTIONS,
    SETTLE_OPTIONS,
    SETTLED_AT_ONCE,
    TAKE_OPTIONS,
    VOTED_AT_ONCE,
    Sizes,
    turns_few,
)
from kvdsl.runtime.rope import Rope

DTYPES = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}
"""Model dtypes: Triton's dtype, and bytes per element."""

SPLITS, PIECES, CHOOSERS, SKETCHED = 32, 4, 16, 16
"""What compilation assumes: splits, programs of `settle` and of `choose` per KV head, and dims of a sketch."""

STRIDES = ("query_row", "query_head", "query_token", "key_row", "key_head", "key_slot")
"""Stride arguments of `observe`: multiples of the head size."""

OF_STEPS = ("slots", "per_split", "per_piece", "width")
"""Arguments of a decode step's kernels that are multiples of 16, like blocks of slots and sketches."""

OF_PROMPTS = ("over_slots", "observe")
"""Kernels over a prompt's tokens, in any number. A decode step's slots are a multiple of 16 (`kvdsl.runtime.state.slots`)."""

_OF_THE_MODEL = frozenset(("query", "new_key", "new_value", "keys", "values", "out", "sinks", "sketch_keys", "page_bounds"))
"""Arguments in the model's dtype."""

_TYPES = {
    name: kind
    for kind, names in {
        "*fp32": "part top total logits new_logits columns constants supplied work lse reduced angles slopes",
        "*i32": (
            "which position seen newest first_free held ring_rows sketch prompt copied grades levels candidates listed chosen found joins "
            "arrived victims at_ends rank length gaps wanted owned free first_new first_asked behind order live_slots meetings heads_met"
        ),
        "i32": (
            "slots heads per_split splits per_piece window seed layer first_head width pages tokens batch cache_rows blocks "
            + " ".join(STRIDES)
        ),
        "fp32": "scaling softcap",
        "*i64": "first_rows table lowest_found text_order",
        "*i8": "kept taken",
        "*i1": "real",
        "*fp64": "numbers",
    }.items()
    for name in names.split()
}
"""Triton types of the kernels' other arguments."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model and its cache that kernels are compiled for.

    Attributes:
        group: query heads per KV head. head_dim: size of a key and of a value. dtype: one of `DTYPES`.
        some_rows: whether a step serves some of the cache's rows, as in a serving engine (`kvdsl.runtime.gpu.rows`).
        block: slots per block; 0: contiguous slots.
        kv_dtype: the cache's. Unless it is `model`, kernels receive float32 vectors from a model of any dtype.
    """

    group: int = 4
    head_dim: int = 128
    dtype: str = "bf16"
    some_rows: bool = False
    block: int = 0
    kv_dtype: str = "model"

    @property
    def read(self) -> str:
        """The dtype of the vectors that kernels receive."""
        return self.dtype if self.kv_dtype == "model" else "fp32"

    @property
    def sizes(self) -> Sizes:
        """The sizes that determine the kernels' constants."""
        return Sizes(self.group, self.head_dim, self.head_dim, DTYPES[self.read][1])

    @property
    def rope(self) -> Rope:
        """The rotation under compact positions: all dims, the first half paired with the second."""
        return Rope(torch.zeros(self.head_dim // 2), "half")


def parse_target(text: str) -> GPUTarget:
    """Parse a target such as `cuda:90` or `hip:gfx942`.

    Raises:
        KvdslError: if the text is not such a target.
    """
    backend, _, arch = text.partition(":")
    if backend == "cuda" and arch.isdigit():
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip" and re.fullmatch(r"gfx[0-9a-f]+", arch):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise KvdslError(f"`{text}` is no target: name a GPU as cuda:90 or hip:gfx942, or cpu")


def build(
    stem: str, source: Path, targets: dict[str, GPUTarget], shape: Shape | None = None, step: Workload | None = None
) -> Iterator[Row]:
    """Compile a policy's kernels for every target. Yield one row per kernel and target.

    Args:
        stem: the policy's name in the report. source: its `kernels_triton.py`.
        shape: the model's; None: four query heads per KV head, head size 128, bfloat16.
        step: report on the machine code too, with time estimates for this step.

    Raises:
        KvdslError: in Triton's interpreter, which compiles nothing; if Triton is too old, or cannot compile a kernel.
    """
    check_release()
    if interpreted():
        raise KvdslError("TRITON_INTERPRET=1 asks for Triton's interpreter, which compiles nothing: unset it")
    shape = shape or Shape()
    wanted = [launched(kernels_of(source), shape, target) for target in targets.values()]
    for of_targets in zip(*wanted, strict=True):
        for (name, target), (kernel, function, constants, options) in zip(targets.items(), of_targets, strict=True):
            yield _row(stem, kernel, name, target, _Kernel(function, constants, shape.read), options, step)


def launched(kernels: Any, shape: Shape, target: GPUTarget) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Yield a policy's kernels in launch order: name, function, constants, options."""
    sizes = replace(shape.sizes, hopper=(target.backend, target.arch) == ("cuda", 90))
    selects = "look" in kernels.KERNELS
    block = shape.block
    rope = shape.rope if kernels.CONSTANTS["COMPACT"] else None
    packed = shape.kv_dtype != "model"
    few = turns_few(sizes, kernels.CONSTANTS["SLIDES"], packed)
    width = SKETCHED if kernels.CONSTANTS["SKETCHES"] else 0
    common = _common(kernels, shape, rope, few) | {
        "PRECISION": precision_of(shape.kv_dtype, nvidia=target.backend == "cuda"),
    }
    observes = sizes.observe_options(reduced=hasattr(kernels, "over_slots"))
    alone = sizes.settle(SPLITS, PIECES, alone=True)
    settles = SETTLE_OPTIONS if kernels.CONSTANTS["SPREADS"] else ALONE_OPTIONS
    found = [
        ("make_room", alone, ALONE_OPTIONS, True),
        ("look", sizes.look(width or shape.head_dim, in_blocks=block > 0, packed=packed), LOOK_OPTIONS, selects),
        ("vote", {"BLOCK": VOTED_AT_ONCE}, LOOK_OPTIONS, selects),
        ("choose", sizes.choose(SPLITS, CHOOSERS, pages=chooses_pages(kernels)), CHOOSE_OPTIONS, selects),
        (attend, sizes.attend(rope, few=few, packed=packed), sizes.attend_options, True),
        (take, sizes.take(SPLITS), TAKE_OPTIONS, block > 0),
        ("settle", sizes.settle(SPLITS, PIECES, width, rope, alone=not kernels.CONSTANTS["SPREADS"]), settles, True),
        ("at_once", sizes.at_once(SPLITS, rope, few=few), sizes.at_once_options(SPLITS), block == 0 and not packed),
        ("agree", alone, ALONE_OPTIONS, True),
        (give_back, sizes.give_back(block or 1), GIVE_BACK_OPTIONS, block > 0),
        ("over_slots", sizes.over_slots(), OBSERVE_OPTIONS, True),
        ("observe", sizes.observe(), observes, True),
        ("settle_prompt", {"BLOCK": SETTLED_AT_ONCE, "TILE": COMPARED, "D": shape.head_dim}, ALONE_OPTIONS, True),
    ]
    for function, own, options, needed in found:
        generated = getattr(kernels, function, None) if isinstance(function, str) else function
        if needed and generated is not None:
            yield generated.__name__, generated, own | common, options


def _common(kernels: Any, shape: Shape, rope: Rope | None, few: bool) -> dict[str, Any]:
    """Return the constants that all kernels share. Tensors that the policy lacks are None."""
    selects = "look" in kernels.KERNELS
    constants = kernels.CONSTANTS | {
        "DOT": DTYPES[shape.read][0],
        "SINKS": False,
        "BIASED": False,
        "RANKED": False,
        "SELECTS": selects,
        "DENSE": shape.block == 0 and not selects and shape.sizes.reads_ahead(None if few else rope),
        "SOME": shape.some_rows,
        "PADDED": False,
        "CAPPED": False,
        "BEFORE": False,
        "SIZE": shape.block,
        **dict(zip(("K_AS", "V_AS"), dtypes_of(shape.kv_dtype), strict=True)),
        "BESIDE": False,
    }
    wanted = {
        "sinks slopes order beside beside_lse": False,
        "which": shape.some_rows,
        "rank length angles": rope is not None,
        "sketch sketch_keys prompt": constants["SKETCHES"],
        "page_bounds": constants["BOUNDS"],
        "reduced": constants["REDUCTIONS"],
        "live_slots": constants["COUNTS"],
        "table": shape.block,
    }
    return constants | dict.fromkeys(name for names, there in wanted.items() if not there for name in names.split())


@dataclass(frozen=True)
class _Kernel:
    """A kernel and its constants; `dtype`: see `Shape.read`."""

    function: Any
    constants: dict[str, Any]
    dtype: str

    def source(self, multiples: tuple[str, ...]) -> Any:
        """Return the kernel with its argument types. torch aligns tensors to at least 16 bytes.

        Args:
            multiples: integer arguments that are multiples of 16.
        """
        names = self.function.arg_names
        signature = {name: "constexpr" if name in self.constants else self._type(name) for name in names}
        aligned = {
            (n,): [["tt.divisibility", 16]]
            for n, name in enumerate(names)
            if signature[name].startswith("*") or name in multiples
        }
        return ASTSource(self.function, signature, {name: x for name, x in self.constants.items() if name in names}, aligned)

    def _type(self, name: str) -> str:
        if name in ("keys", "values") and self.constants.get("K_AS", "model") != "model":
            return "*u8"
        return f"*{self.dtype}" if name in _OF_THE_MODEL else _TYPES[name]


def _row(
    stem: str, kernel: str, name: str, target: GPUTarget, what: _Kernel, options: dict[str, int], step: Workload | None
) -> Row:
    begun = time.perf_counter()
    try:
        compiled = triton.compile(
            what.source(STRIDES if kernel in OF_PROMPTS else OF_STEPS),
            target=target,
            options={**options, "enable_fp_fusion": False},
        )
    except Exception as error:
        said = error
        while said.__cause__ is not None:  # the innermost error comes from a function that the kernel calls
            said = said.__cause__  # type: ignore[assignment]
        raise KvdslError(f"Triton {triton.__version__} cannot compile `{kernel}` of {stem} for {name}: {said}") from error
    ms = (time.perf_counter() - begun) * 1e3
    registers, spills = _nvidia(compiled) if target.backend == "cuda" else _amd(compiled)
    told = None if step is None else taken(kernel, compiled, registers, spills, what.constants, step, name)
    return Row(stem, kernel, name, registers, compiled.metadata.shared, spills, round(ms, 1), told)


def _nvidia(compiled: Any) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, from the binary. The kernels have no local arrays, so the stack holds only spills."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [tool("cuobjdump"), "--dump-resource-usage", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _found(r"REG:(\d+)", told), _found(r"STACK:(\d+)", told) + _found(r"LOCAL:(\d+)", told)


def _amd(compiled: Any) -> tuple[int, int]:
    """Return vector registers and bytes of scratch memory per thread, from the object's metadata.

    Scalars that spill to vector registers use no scratch memory.
    """
    text = compiled.asm["amdgcn"]
    return _found(r"\.vgpr_count:\s*(\d+)", text), _found(r"\.private_segment_fixed_size:\s*(\d+)", text)


def _found(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise KvdslError(f"the compiler's report has no `{pattern}`:\n{text[-2000:]}")
    return int(match[1])
