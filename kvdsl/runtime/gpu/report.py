"""What compiled kernels make of a GPU, from their machine code alone. No GPU measures anything here.

The report says how many warps a scheduler has, how many round trips to memory a warp waits for, and lists every innermost loop:
instructions per slot, widths of loads, round trips and bytes in flight, and for a decode step of a given shape the least time to read the
data. That time is a lower bound, not a forecast. A forecast exists for `attend` on the one GPU that has run it.
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
    "cuda:90": Chip("H200", 132, 1.98, 4.8, 65536, 228 << 10, 1 << 10, 64),
    "cuda:100": Chip("B200", 148, 1.97, 8.0, 65536, 228 << 10, 1 << 10, 64),
    "hip:gfx90a": Chip("MI250X, a half", 110, 1.7, 1.6, 131072, 64 << 10, 0, 32),
    "hip:gfx942": Chip("MI300X", 304, 2.1, 5.3, 131072, 64 << 10, 0, 32),
}
"""From the vendors' data sheets, with the highest clock."""

_SCHEDULERS = 4
_REGISTERS_AT_ONCE = 8
"""GPUs allocate a thread's registers in multiples of this."""


@dataclass(frozen=True)
class Fitted:
    """Constants of the time that `attend` takes, made by `python -m scripts.gpu.fit`; see `terms`.

    Attributes:
        launch_us: of a launch. trip_us: of a round trip to memory. cycles, cycles_per_warp: of an instruction, and as many more for each
            warp of the scheduler. read: of the least time to read.
        median, worst: relative errors on measurements that were held out.
    """

    launch_us: float
    trip_us: float
    cycles: float
    cycles_per_warp: float
    read: float
    median: float
    worst: float

    def us(self, terms: tuple[float, ...]) -> float:
        """Return the estimated microseconds."""
        constants = (self.launch_us, self.trip_us, self.cycles, self.cycles_per_warp, self.read)
        return sum(constant * term for constant, term in zip(constants, terms, strict=True))


FITTED = {"cuda:90": Fitted(2.84, 0.263, 1.53, 0.591, 0.587, 0.099, 0.393)}
"""From an H200's times of 51 cuts of `attend` at three batch sizes."""

FEW_SPILLS = 64
"""Bytes per thread up to which the constants hold: kernels that spill more took up to 14× longer than others."""


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
        us: estimated microseconds of `attend` to all slots, where `FITTED` knows the target; None for other kernels.
    """

    programs: int
    warps: float
    chain: int | None
    buffers: list[str]
    loops: list[LoopRow]
    us: float | None = None


def taken(
    kernel: str, compiled: Any, registers: int, spills: int, shape: dict[str, int], step: Workload, target: str
) -> Taken:
    """Return the report of one compiled kernel.

    Args:
        registers: per thread. spills: bytes per thread. shape: the kernel's constants.

    Raises:
        KvdslError: if `CHIPS` lacks the target.
    """
    if target not in CHIPS:
        raise KvdslError(f"--report knows {', '.join(CHIPS)}, not {target}")
    chip, meta, code = CHIPS[target], compiled.metadata, code_of(compiled)
    most = resident(chip, registers, meta.shared, meta.num_warps, meta.warp_size)
    grid = None if "SLOTS" in shape else _grid(kernel, shape, step, chip)
    there = most if grid is None else min(most, -(-grid // chip.processors))
    found = code.loops[:1] if kernel == "attend" else code.loops  # a second loop of `attend` is for few slots
    rows = [_loop_row(kernel, loop, times, shape, meta, step, chip, there) for loop, times in _counted(found)]
    us = None
    if kernel == "attend" and target in FITTED and spills <= FEW_SPILLS and not shape["SELECTS"]:
        assert grid is not None and code.chain is not None
        loop = code.loops[0]
        iterations = -(-step.slots * step.batch * step.kv_heads // (grid * shape["BLOCK"]))
        us = FITTED[target].us(terms(chip, loop, code.instructions, code.chain, meta.num_warps, most, grid, iterations))
    warps = there * meta.num_warps / _SCHEDULERS
    return Taken(most, warps, code.chain, _buffers(compiled.asm["ttgir"]), rows, us and round(us, 1))


def terms(
    chip: Chip, loop: Loop, instructions: int, chain: int, warps: int, most: int, grid: int, iterations: int
) -> tuple[float, ...]:
    """Return what `Fitted`'s constants multiply.

    These are a launch, round trips, microseconds per cycle of an instruction, the same times the warps of a scheduler, and microseconds to
    read.

    Programs run in waves; one wave takes as long as one of its warps. Outside its loop half of the code runs: the split with the new token
    runs the rest.

    Args:
        instructions, chain: of the whole kernel, its loop once. warps: per program. most: resident programs. iterations: per program.
    """
    waves, there = -(-grid // (chip.processors * most)), min(most, -(-grid // chip.processors))
    trips = chain + (iterations - 1) * (loop.trips or 0.0)
    issued = (instructions - loop.instructions) / 2 + iterations * loop.instructions
    us = waves * issued / chip.gigahertz / 1e3
    read_us = loop.loaded(32 * warps) * iterations * grid / chip.terabytes / 1e6
    return 1.0, waves * trips, us, us * there * warps / _SCHEDULERS, read_us


def resident(chip: Chip, registers: int, shared: int, warps: int, lanes: int) -> int:
    """Return how many programs fit on a multiprocessor, by registers, shared memory and warps."""
    each = -(-registers // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE * lanes * warps
    return min(chip.registers // each, chip.shared // (shared + chip.reserved or 1), chip.warps // warps)


def _grid(kernel: str, shape: dict[str, int], step: Workload, chip: Chip) -> int:
    """Return the programs of a decode step's kernel."""
    heads = step.batch * step.kv_heads
    if kernel == "choose":
        return heads * choosers(step.slots, heads, chip.processors, shape["BLOCK"])
    if kernel in ("attend", "look", "settle", "at_once"):
        sizes = Sizes(shape["G"], shape["D"], shape["E"], 2)
        spread = kernel == "settle" and shape.get("SPREADS")
        pieces = sizes.pieces(step.slots, heads, chip.processors)[0] + 1 if spread else 1
        return heads * (pieces if kernel == "settle" else sizes.splits(step.slots)[0])
    return {"give_back": step.batch * -(-step.slots // (shape["SIZE"] or 1)), "agree": step.batch, "take": 1}.get(
        kernel, heads
    )


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
        return shape["TOGETHER"] if loop.name == "attend" and shape.get("TOGETHER") else shape["BLOCK"]
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
