"""What compiled kernels make of a GPU, from their machine code alone. No GPU measures anything here.

The report says how many warps a scheduler has, how many round trips to memory a warp waits for, and lists every innermost loop:
instructions per slot, widths of loads, round trips and bytes in flight, and for a decode step of a given shape the least time to read the
data. That time is a lower bound, not a forecast.
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
from kvdsl.runtime.gpu.loops import Code, Loop
from kvdsl.runtime.gpu.select import COUNTED
from kvdsl.runtime.gpu.sizes import Sizes, choosers


@dataclass(frozen=True)
class Chip:
    """One GPU of an architecture.

    Attributes:
        name: product name. processors: multiprocessors, each with four schedulers. gigahertz: their clock.
        terabytes: memory bandwidth, TB/s.
        registers: per multiprocessor, 32 bits each. shared: bytes of shared memory per multiprocessor. reserved: bytes of it that the
            system reserves per program. warps: most resident warps per multiprocessor.
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
"""From the vendors' data sheets, with the highest clock."""

_SCHEDULERS = 4
_REGISTERS_AT_ONCE = 8
"""GPUs allocate a thread's registers in multiples of this."""


@dataclass(frozen=True)
class Workload:
    """The decode step that estimates assume: rows, KV heads per row, slots per KV head."""

    batch: int = 8
    kv_heads: int = 8
    slots: int = 4096


@dataclass(frozen=True)
class LoopRow:
    """One innermost loop of a kernel.

    Attributes:
        kernel, loop: names of both. times: number of identical loops.
        per_slot: warp instructions per slot, or in a prompt's kernels per score (a slot, a query, a query head).
        loads: loads per thread and iteration, as count x bits, such as 16x128.
        products, barriers: matrix products and barriers per iteration.
        trips: round trips to memory that a warp waits for per iteration; None for AMD.
        in_flight: bytes that a multiprocessor's programs ask for per round trip; None also for a loop that waits for none.
        read_us: the least microseconds to read this loop's data, over the step's slots. None for prompts' kernels, and for loops of
            `choose` over candidates, whose number is unknown.
    """

    kernel: str
    loop: str
    times: int
    per_slot: float
    loads: str
    products: int
    barriers: int
    trips: float | None
    in_flight: int | None
    read_us: float | None


@dataclass(frozen=True)
class Taken:
    """A kernel's resource usage on a multiprocessor.

    Attributes:
        programs: resident programs per multiprocessor, if there are enough.
        warps: those per scheduler in the step; for a prompt's kernels as many as fit.
        chain: round trips to memory that a warp waits for which passes every instruction once, so with every branch taken; None for AMD.
        buffers: pipelined tiles in shared memory, such as 1x64x128xbf16. loops: its innermost loops.
    """

    programs: int
    warps: float
    chain: int | None
    buffers: list[str]
    loops: list[LoopRow]


def taken(kernel: str, compiled: Any, registers: int, shape: dict[str, int], step: Workload, target: str) -> Taken:
    """Return the report of one compiled kernel.

    Args:
        registers: per thread. shape: the kernel's constants.

    Raises:
        KvdslError: if `CHIPS` lacks the target.
    """
    if target not in CHIPS:
        raise KvdslError(f"--report knows {', '.join(CHIPS)}, not {target}")
    chip, meta, code = CHIPS[target], compiled.metadata, code_of(compiled)
    most = resident(chip, registers, meta.shared, meta.num_warps, meta.warp_size)
    grid = None if "SLOTS" in shape else _grid(kernel, shape, step, chip)
    there = most if grid is None else min(most, -(-grid // chip.processors))
    rows = [_loop_row(kernel, loop, times, shape, meta, step, chip, there) for loop, times in _counted(code.loops)]
    return Taken(most, there * meta.num_warps / _SCHEDULERS, code.chain, _buffers(compiled.asm["ttgir"]), rows)


def resident(chip: Chip, registers: int, shared: int, warps: int, lanes: int) -> int:
    """Return how many programs fit on a multiprocessor, by registers, shared memory and warps."""
    each = -(-registers // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE * lanes * warps
    return min(chip.registers // each, chip.shared // (shared + chip.reserved or 1), chip.warps // warps)


def _grid(kernel: str, shape: dict[str, int], step: Workload, chip: Chip) -> int:
    """Return the programs of a decode step's kernel."""
    heads, sizes = step.batch * step.kv_heads, Sizes(shape["G"], shape["D"], shape["E"], 2)
    splits, _ = sizes.splits(step.slots)
    if kernel == "settle" and shape.get("SPREADS"):
        return heads * (sizes.pieces(step.slots, heads, chip.processors)[0] + 1)
    if kernel == "choose":
        return heads * choosers(step.slots, heads, chip.processors, shape["BLOCK"])
    if kernel == "give_back":
        return step.batch * -(-step.slots // shape["SIZE"])
    return {
        "attend": heads * splits,
        "look": heads * splits,
        "vote": step.batch * splits,
        "agree": step.batch,
        "take": 1,
    }.get(kernel, heads)


def _loop_row(
    kernel: str, loop: Loop, times: int, shape: dict[str, int], meta: Any, step: Workload, chip: Chip, there: int
) -> LoopRow:
    """Return a loop's row; `there`: programs on a multiprocessor."""
    round_of, loaded, read_us = _round(loop, shape), loop.loaded(meta.num_warps * meta.warp_size), None
    if "SLOTS" not in shape and (kernel != "choose" or loop.name.startswith(_OF_ALL_SLOTS)):
        rounds = step.slots / round_of * step.batch * step.kv_heads
        read_us = round(loaded * rounds / chip.terabytes / 1e6, 2)
    loads = ", ".join(f"{count}x{bits}" for bits, count in loop.loads.items())
    per_slot = round(loop.instructions * meta.num_warps / round_of, 3)
    in_flight = round(there * loaded / loop.trips) if loop.trips else None
    return LoopRow(kernel, loop.name, times, per_slot, loads, loop.products, loop.barriers, loop.trips, in_flight, read_us)


def _round(loop: Loop, shape: dict[str, int]) -> int:
    """Return slots per iteration. In prompts' kernels return scores: of one query head in the loop over heads, otherwise of the group."""
    if loop.name.startswith("count_levels"):
        return int(COUNTED.value)
    if "SLOTS" not in shape:
        return shape["BLOCK"]
    heads = 1 if loop.name.startswith("weights") else shape["G"]
    return shape["SLOTS"] * shape["QUERIES"] * heads


_OF_ALL_SLOTS = ("narrow", "clear")
"""Loops of `choose` over all slots of a head; its programs share them."""


def _counted(found: list[Loop]) -> Iterator[tuple[Loop, int]]:
    """Yield each distinct loop with its number of occurrences, in order of first occurrence."""
    return ((loop, found.count(loop)) for n, loop in enumerate(found) if loop not in found[:n])


def code_of(compiled: Any) -> Code:
    """Return what the kernel's disassembly says."""
    if "amdgcn" in compiled.asm:
        return loops.code(compiled.asm["amdgcn"], loops.AMD)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [tool("nvdisasm"), "-g", "-c", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return loops.code(told, loops.NVIDIA)


def _buffers(ttgir: str) -> list[str]:
    """Return the pipelined tiles in shared memory: buffers x shape x dtype."""
    return re.findall(r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+x\d+x\d+x\w+)", ttgir)
