"""Updates alone: 64 of 1,024 tokens replaced (table 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots
from kvdsl_lab.reproduce.equip.common import NAMES
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS_SPEEDUPS = {
    "h2o": (11.62, 27.32, 19.36, 35.73, 38.12, 39.90, 39.75, 31.43),
    "streaming_llm": (26.54, 36.04, 27.65, 47.94, 46.67, 45.04, 50.58, 47.34),
}
"""Table 5's columns for the CPU (Sapphire Rapids), in the order of `EQUIP_SHAPES`."""

_TOY_SHAPE = (1, 2, 16)


def _shapes(setup: Setup) -> tuple[tuple[int, int, int], ...]:
    from kvdsl_lab.bench.update import EQUIP_SHAPES

    return setup.size(EQUIP_SHAPES, (_TOY_SHAPE,))


def _update_cells(setup: Setup) -> Iterator[Cell]:
    for policy in PAPERS_SPEEDUPS:
        for index, (batch, heads, size) in enumerate(_shapes(setup)):
            yield Cell(
                f"{NAMES[policy]}, batch {batch}, {heads} heads of {size}", partial(_update, policy=policy, index=index)
            )


def _update(setup: Setup, policy: str, index: int) -> list[Row]:
    """64 of 1,024 tokens leave, and as many come in."""
    from kvdsl.loading import load
    from kvdsl_lab.bench.update import Shape, bench_update

    shape = Shape(*_shapes(setup)[index], *setup.size((1024, 64), (32, 4)), "fp32")
    found = bench_update(load(policy).spec, shape, backend=setup.backend, repeats=setup.repeats, seed=setup.seed)
    kept = (
        "policy",
        "batch",
        "heads",
        "head_dim",
        "ms",
        "ms_q1",
        "ms_q3",
        "shift_ms",
        "speedup",
        "speedup_q1",
        "speedup_q3",
        "shift_of_copy",
    )
    paper = None if setup.quick else PAPERS_SPEEDUPS[policy][index]
    return [{**{name: found[name] for name in kept}, "paper": paper}]


def _update_table(rows: Sequence[Row]) -> list[Row]:
    columns = ("policy", "batch", "heads", "head_dim", "ms", "shift_ms", "shift_of_copy", "speedup", "paper")
    return [{name: row[name] for name in columns} | {"policy": NAMES[row["policy"]]} for row in rows]


def _update_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for policy, name in ((one, NAMES[one]) for one in PAPERS_SPEEDUPS):
        own = [row for row in rows if row["policy"] == policy]
        below = [row for row in own if row["paper"] is not None and row["speedup"] < row["paper"]]
        told = ", ".join(f"{row['speedup']:.3g}x at {row['batch']} x {row['heads']} x {row['head_dim']}" for row in own)
        known = own[0]["paper"] is not None
        found.append(
            Finding(f"in place beats shift by more than the paper's factor, {name}", not below if known else None, told)
        )
    return found


def _update_plot(figure: Figure, rows: Sequence[Row]) -> None:
    shown = [
        {**row, "policy": NAMES[row["policy"]], "batch x heads x size": f"{row['batch']}x{row['heads']}x{row['head_dim']}"}
        for row in rows
    ]  # fmt: skip
    axes = figure.subplots()
    plots.bars(axes, shown, x="batch x heads x size", y="speedup", by="policy")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("in place, times as fast as shift")


TABLE5 = Experiment(
    "table5", "64 of 1,024 tokens replaced", "Table 5", _update_cells,
    says="11.6 to 39.9 times as fast for H2O, 26.5 to 50.6 times for StreamingLLM (Sapphire Rapids).",
    findings=_update_findings, table=_update_table, plot=_update_plot,
)  # fmt: skip
