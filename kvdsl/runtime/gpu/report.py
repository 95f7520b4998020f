"""What compiled kernels would do on a GPU, estimated from their machine code alone: a GPU may say otherwise.

Of every innermost loop: instructions a slot, how wide its loads are, and for a step of a given shape how long a chip would take at
least to issue its instructions and to read what it asks for. Latencies, caches and launches are left out, so the greater of the two
is a floor, not a forecast.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.runtime.gpu import loops
from kvdsl.runtime.gpu.launch import tool
from kvdsl.runtime.gpu.loops import Loop
from kvdsl.runtime.gpu.select import COUNTED
from kvdsl.runtime.gpu.sizes import Sizes, choosers


@dataclass(frozen=True)
class Chip:
    """One GPU of an architecture.

    Attributes:
        name: which. processors: multiprocessors, each with four schedulers. gigahertz: of their clock.
        terabytes: a second, from memory.
        registers: of a multiprocessor, 32 bits each. shared: bytes of shared memory of it. reserved: bytes of that which each program
            takes besides its own. warps: that it holds at most.
    """

    name: str
    processors: int
    gigahertz: float
    terabytes: float
    registers: int
    shared: int
    reserved: int
    warps: int


CHIPS = {
    "cuda:80": Chip("A100 80 GB", 108, 1.41, 2.04, 65536, 164 << 10, 1 << 10, 64),
    "cuda:90": Chip("H100 SXM", 132, 1.98, 3.35, 65536, 228 << 10, 1 << 10, 64),
    "cuda:100": Chip("B200", 148, 1.97, 8.0, 65536, 228 << 10, 1 << 10, 64),
    "hip:gfx90a": Chip("MI250X, a half", 110, 1.7, 1.6, 131072, 64 << 10, 0, 32),
    "hip:gfx942": Chip("MI300X", 304, 2.1, 5.3, 131072, 64 << 10, 0, 32),
}
"""As their makers' data sheets have them, with the highest clock."""

_SCHEDULERS = 4
_REGISTERS_AT_ONCE = 8
"""A thread's registers are given out in multiples of this."""


@dataclass(frozen=True)
class Workload:
    """The step that times are estimated for: rows, KV heads of each, slots of each of those."""

    batch: int = 8
    kv_heads: int = 8
    slots: int = 4096


@dataclass(frozen=True)
class LoopRow:
    """One innermost loop of a kernel.

    Attributes:
        kernel, loop: where. times: how many loops are alike.
        per_slot: instructions of a warp for each slot, or in a prompt's kernels for each score (a slot, a query, a query head).
        loads: how many loads of how many bits a thread has in a round, as 16x128.
        products, barriers: of matrices, and of a program's warps, in a round.
        issue_us, read_us: the least time for the step's slots to issue this loop's instructions, and to read what it asks for;
            nothing is said of prompts' kernels, and of what `choose` does with candidates, who may be few or all.
    """

    kernel: str
    loop: str
    times: int
    per_slot: float
    loads: str
    products: int
    barriers: int
    issue_us: float | None
    read_us: float | None


@dataclass(frozen=True)
class Taken:
    """What a kernel takes of a multiprocessor.

    Attributes:
        programs: how many of its programs a multiprocessor holds. buffers: of its tiles in shared memory, as 1x64x128xbf16.
        loops: its innermost loops.
    """

    programs: int
    buffers: list[str]
    loops: list[LoopRow]


def taken(kernel: str, compiled: Any, registers: int, shape: dict[str, int], step: Workload, target: str) -> Taken:
    """The report of one compiled kernel.

    Args:
        registers: of a thread. shape: the kernel's constants.

    Raises:
        KvdslError: if nothing is known of the target.
    """
    if target not in CHIPS:
        raise KvdslError(f"--report knows {', '.join(CHIPS)}, not {target}")
    chip, meta = CHIPS[target], compiled.metadata
    rows = [_loop_row(kernel, loop, times, shape, meta, step, chip) for loop, times in _counted(_loops(compiled))]
    programs = _programs(chip, registers, meta.shared, meta.num_warps, meta.warp_size)
    return Taken(programs, _buffers(compiled.asm["ttgir"]), rows)


def _programs(chip: Chip, registers: int, shared: int, warps: int, lanes: int) -> int:
    """How many programs a multiprocessor holds: registers, shared memory and warps allow."""
    each = -(-registers // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE * lanes * warps
    return min(chip.registers // each, chip.shared // (shared + chip.reserved or 1), chip.warps // warps)


def _loop_row(kernel: str, loop: Loop, times: int, shape: dict[str, int], meta: Any, step: Workload, chip: Chip) -> LoopRow:
    round_of = _round(loop, shape)
    issue_us = read_us = None
    if "SLOTS" not in shape and (kernel != "choose" or loop.name.startswith(_OF_ALL_SLOTS)):
        heads = step.batch * step.kv_heads
        spread = _spread(kernel, loop, shape, step, chip)
        rounds = step.slots / round_of * heads
        cycles = loop.instructions * meta.num_warps * rounds / (spread * _SCHEDULERS)
        issue_us = round(cycles / chip.gigahertz / 1e3, 2)
        read_us = round(loop.loaded(meta.num_warps * meta.warp_size) * rounds / chip.terabytes / 1e6, 2)
    loads = ", ".join(f"{count}x{bits}" for bits, count in loop.loads.items())
    per_slot = round(loop.instructions * meta.num_warps / round_of, 3)
    return LoopRow(kernel, loop.name, times, per_slot, loads, loop.products, loop.barriers, issue_us, read_us)


def _spread(kernel: str, loop: Loop, shape: dict[str, int], step: Workload, chip: Chip) -> int:
    """Multiprocessors that share a step's rounds. What `settle` calls when the last of a head's programs has arrived, one program does."""
    if kernel in _SPLIT:
        return chip.processors
    heads, pieces = step.batch * step.kv_heads, 1
    if shape.get("SPREADS") and kernel == "settle" and loop.name.startswith("settle"):
        pieces, _ = Sizes(shape["G"], shape["D"], shape["E"], 2).pieces(step.slots, heads, chip.processors)
    if kernel == "choose":
        pieces = choosers(step.slots, heads, chip.processors, shape["BLOCK"])
    return min(heads * pieces, chip.processors)


def _round(loop: Loop, shape: dict[str, int]) -> int:
    """Slots of a round, and in prompts' kernels scores: of all heads of a group, unless the loop is the one over them."""
    if loop.name.startswith("count_levels"):
        return int(COUNTED.value)
    if "SLOTS" not in shape:
        return shape["BLOCK"]
    heads = 1 if loop.name.startswith("weights") else shape["G"]
    return shape["SLOTS"] * shape["QUERIES"] * heads


_SPLIT = ("attend", "look")
"""Kernels whose programs share a head's slots, and are as many as the chip has room for; of the others each has a head of its own,
but for `settle` and `choose`, where it may be shared.
"""

_OF_ALL_SLOTS = ("narrow", "clear")
"""Loops of `choose` over all of a head's slots, which its programs share."""


def _counted(found: list[Loop]) -> Iterator[tuple[Loop, int]]:
    """Loops that are alike once, in the order of the first."""
    return ((loop, found.count(loop)) for n, loop in enumerate(found) if loop not in found[:n])


def _loops(compiled: Any) -> list[Loop]:
    if "amdgcn" in compiled.asm:
        return loops.loops(compiled.asm["amdgcn"], loops.AMD)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [tool("nvdisasm"), "-g", "-c", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return loops.loops(told, loops.NVIDIA)


def _buffers(ttgir: str) -> list[str]:
    """Tiles in shared memory that a loop fills while it works on others: how many, and of what."""
    return re.findall(r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+x\d+x\d+x\w+)", ttgir)
