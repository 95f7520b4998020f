"""`kvdsl build`: compile kernels ahead of time and report their use of a processor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import json_option, print_json
from kvdsl.cli.options import memory_options
from kvdsl.errors import KvdslError
from kvdsl.memory import slots_of_a_block

if TYPE_CHECKING:
    from kvdsl.build import Row
    from kvdsl.runtime.spec import PolicySpec

TARGETS = "cuda:80,cuda:90,cuda:100,hip:gfx90a,hip:gfx942,cpu"


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="POLICY...", shell_complete=completion.policies)
@click.option("--target", "targets", default=TARGETS, show_default=True, metavar="LIST", help="What to compile for.")
@click.option("--group", type=click.IntRange(1, 128), default=4, show_default=True, help="Query heads per KV head, on GPUs.")
@click.option("--head-dim", type=click.IntRange(16, 512), default=128, show_default=True,
              help="Dims of keys and values on GPUs; a multiple of 16.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True,
              help="The model's dtype, on GPUs.")  # fmt: skip
@click.option("--report", is_flag=True, help="Analyse the GPUs' machine code, loop by loop.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="With --report: rows of a step.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="With --report: KV heads of a row.")
@click.option("--slots", type=click.IntRange(1), default=4096, show_default=True, help="With --report: slots of a KV head.")
@memory_options
@json_option
def command(
    names: tuple[str, ...], targets: str, group: int, head_dim: int, dtype: str, memory: dict[str, str], report: bool,
    as_json: bool, **step: int,
) -> None:  # fmt: skip
    """Compile the kernels of policies ahead of time; no GPU is needed.

    A GPU is named by its architecture: cuda:90 (compute capability 9.0), hip:gfx942. `cpu` builds the C++ kernels for this machine.
    GPU kernels are compiled for one shape of a model; others are compiled when they first run.

    With --report, of every kernel: resident programs, warps per scheduler in the step, and the longest chain of round trips to memory,
    every branch taken. Of every innermost loop: instructions per slot (in a prompt's kernels per score), loads by their bits, products of
    matrices, barriers, round trips per iteration, kilobytes in flight on a multiprocessor, and the least time in which that GPU reads the
    loop's data in a step. The time is a lower bound from machine code and does not predict speed.

    \b
    Examples:
      kvdsl build roco
      kvdsl build roco --group 3 --head-dim 64 --dtype fp32 --target cuda:90
      kvdsl build h2o tova --target cuda:90,cpu --json
      kvdsl build roco --target cuda:90 --report --batch 1 --slots 32768
    """
    from kvdsl.loading import load

    if head_dim % 16:
        raise click.BadParameter("must be a multiple of 16", param_hint="'--head-dim'")
    wanted = [target.strip() for target in targets.split(",") if target.strip()]
    shape = {"group": group, "head_dim": head_dim, "dtype": dtype}
    rows = [row for name in names for row in _build(load(name, **memory).spec, wanted, shape, step if report else None)]
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
    else:
        _show(rows)
        _show_loops(rows)


def _build(spec: PolicySpec, targets: list[str], shape: dict[str, Any], step: dict[str, int] | None) -> Iterator[Row]:
    gpus = [target for target in targets if target != "cpu"]
    if gpus:
        yield from _gpus(spec, gpus, shape, step)
    if "cpu" in targets:
        yield _cpu(spec)


def _gpus(spec: PolicySpec, targets: list[str], shape: dict[str, Any], step: dict[str, int] | None) -> Iterator[Row]:
    try:
        from kvdsl.runtime.gpu.build import Shape, build, parse_target
        from kvdsl.runtime.gpu.report import Workload
    except ImportError as error:
        raise KvdslError(f"Triton cannot be imported ({error}); `pip install triton`, or `--target cpu`") from error
    gpus = {target: parse_target(target) for target in targets}
    if not spec.triton_source.exists():
        raise KvdslError(f"`{spec.stem}`: {spec.without('triton')}; `--target cpu`")
    block = spec.block or slots_of_a_block("blocks") if spec.in_blocks else 0
    wanted = Shape(**shape, block=block, kv_dtype=spec.kv_dtype)
    yield from build(spec.stem, spec.triton_source, gpus, wanted, None if step is None else Workload(**step))


def _cpu(spec: PolicySpec) -> Row:
    from kvdsl.build import Row
    from kvdsl.build.cxx import kernel_library

    if not spec.cpu_source.exists():
        raise KvdslError(f"`{spec.stem}`: {spec.without('cpu')}")
    begun = time.perf_counter()
    kernel_library(spec.cpu_source, spec.stem)
    return Row(spec.stem, "decode", "cpu", None, None, None, round((time.perf_counter() - begun) * 1e3, 1))


def _show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("policy", "kernel", "target"):
        table.add_column(name)
    for name in ("registers", "shared bytes", "spills", "ms"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (row.registers, row.shared_bytes, row.spills)
        cells = ["" if number is None else f"{number:,}" for number in numbers]
        table.add_row(row.policy, row.kernel, row.target, *cells, f"{row.ms:,.0f}")
    Console(highlight=False).print(table)


def _show_loops(rows: list[Row]) -> None:
    """Print a table for --report; nothing without it."""
    from rich.console import Console
    from rich.table import Table

    reported = [(row, loop) for row in rows if row.taken is not None for loop in row.taken.loops]
    if not reported:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("policy", "kernel", "target"):
        table.add_column(name)
    for name in ("programs", "warps", "chain", "buffers"):
        table.add_column(name, justify="right")
    table.add_column("loop", overflow="fold")
    for name in ("instructions", "loads", "products", "barriers", "trips", "KB in flight", "read µs"):
        table.add_column(name, justify="right")
    for row, loop in reported:
        assert row.taken is not None
        name = loop.loop if loop.times == 1 else f"{loop.loop} ({loop.times} alike)"
        taken = row.taken
        table.add_row(
            row.policy, row.kernel, row.target, str(taken.programs), f"{taken.warps:g}", _cell(taken.chain), " ".join(taken.buffers),
            name, f"{loop.per_slot:.2f}", loop.loads, str(loop.products), str(loop.barriers), _cell(loop.trips),
            _cell(loop.in_flight and loop.in_flight / 1024), _cell(loop.read_us),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(
        "\nInnermost loops; programs: of a multiprocessor; warps: of a scheduler; trips: to memory; times are lower bounds\n"
    )
    console.print(table)
    _show_estimates(rows, console)


def _show_estimates(rows: list[Row], console: Any) -> None:
    """Print the times that are estimates, with how far they have been off."""
    from kvdsl.runtime.gpu.report import CHIPS, FITTED

    for row in rows:
        if row.taken is not None and row.taken.us is not None:
            chip, fitted = CHIPS[row.target], FITTED[row.target]
            off = f"off by {fitted.median:.0%} in the median and {fitted.worst:.0%} at most on measurements held out"
            console.print(f"{row.policy}: {row.kernel} takes about {row.taken.us:g} µs on an {chip.name} ({off})")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
