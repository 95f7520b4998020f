"""What attending to few tokens saves: a decode step beside dense ones (figures 5 and 6 (a))."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup
from kvdsl_lab.reproduce.sparcas.common import DIMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STAGES = ("place_ms", "sketch_ms", "partial_scores_ms", "top_k_ms", "attention_ms", "finish_ms")


def _step_cells(setup: Setup) -> Iterator[Cell]:
    for live in setup.size((4096, 8192, 16384, 32768), (256,)):
        yield Cell(f"{live} tokens", partial(_step, live=live))


def _step(setup: Setup, live: int) -> list[Row]:
    """One decode step of one layer with 8 KV heads of 4 query heads each, as Llama 3.1 8B has them."""
    from kvdsl.loading import load
    from kvdsl_lab.bench.decode import Shape, bench_decode

    spec = load("sparcas", tokens=setup.size(512, 64), dims=DIMS).spec
    shape = Shape(1, 8, 4, 128, live, "fp32")
    found = bench_decode(spec, shape, backend=setup.backend, repeats=setup.repeats, seed=setup.seed)
    times = {f"{name}{spread}": found[f"{name}{spread}"] for name in ("ms", "dense_ms", "sdpa_ms", "vs_dense", "vs_sdpa")
             for spread in ("", "_q1", "_q3")}  # fmt: skip
    parts = found.get("breakdown", {})
    return [{"live": live, "backend": found["backend"], **times, **{stage: parts.get(stage) for stage in _STAGES}}]


def _step_table(rows: Sequence[Row]) -> list[Row]:
    columns = ("live", *_STAGES, "ms", "dense_ms", "sdpa_ms", "vs_dense", "vs_sdpa")
    return [{name: row[name] for name in columns} for row in rows]


def _step_findings(rows: Sequence[Row]) -> list[Finding]:
    gains = [row["vs_dense"] for row in rows]
    told = ", ".join(f"{row['vs_dense']:.3g}x at {row['live']}" for row in rows)
    longest = rows[-1]
    return [
        Finding(
            "a step gains more over the dense one, the longer the cache",
            all(b > a for a, b in pairwise(gains)) if len(gains) > 1 else None, told,
        ),
        Finding(
            "3.01 times as fast as the best dense step at 32,768 tokens",
            None if longest["live"] < 32768 else min(longest["vs_dense"], longest["vs_sdpa"]) >= 3.01,
            f"at {longest['live']} {longest['vs_dense']:.3g}x our own dense step, {longest['vs_sdpa']:.3g}x torch's SDPA",
        ),
    ]  # fmt: skip


def _step_plot(figure: Figure, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2)
    stages = [
        {"live": row["live"], "stage": name.removesuffix("_ms").replace("_", " "), "ms": row[name]}
        for row in rows for name in _STAGES if row[name] is not None
    ]  # fmt: skip
    if stages:
        plots.bars(left, stages, x="live", y="ms", by="stage")
    kinds = {"ms": "SparCas", "dense_ms": "our dense step", "sdpa_ms": "SDPA"}
    steps = [{"live": row["live"], "step": kind, "ms": row[name]} for row in rows for name, kind in kinds.items()]
    plots.lines(right, steps, x="live", y="ms", by="step", log_x=True)
    right.set_yscale("log")


FIGURE5 = Experiment(
    "figure5", "A decode step by its stages, and beside dense ones", "Figures 5 and 6 (a)", _step_cells,
    says="1.79 times as fast as FlashInfer at 8K, 2.47 at 16K, 3.01 at 32K (A100).",
    findings=_step_findings, table=_step_table, plot=_step_plot,
)  # fmt: skip
