"""EQUIP: what it saves that a new token overwrites the evicted one, where others move the whole cache together.

Updates alone are measured at the paper's shapes (table 5). Generation is measured on two decoder layers of Llama 2 7B's shape with random
weights, whole embeddings included, beside a cache that grows. Its end-to-end figures against a cache that is shifted are not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from kvdsl.reproduce import plots
from kvdsl.reproduce.experiment import Cell, Experiment, Finding, Paper, Row, Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS_SPEEDUPS = {
    "h2o": (11.62, 27.32, 19.36, 35.73, 38.12, 39.90, 39.75, 31.43),
    "streaming_llm": (26.54, 36.04, 27.65, 47.94, 46.67, 45.04, 50.58, 47.34),
}
"""Table 5's columns for the CPU (Sapphire Rapids), in the order of `EQUIP_SHAPES`."""

_TOY_SHAPE = (1, 2, 16)
_NAMES = {"h2o": "H2O", "streaming_llm": "StreamingLLM", "transformers": "growing cache"}


# -- Table 5 -----------------------------------------------------------------------------------------------------------


def _shapes(setup: Setup) -> tuple[tuple[int, int, int], ...]:
    from kvdsl.bench.update import EQUIP_SHAPES

    return setup.size(EQUIP_SHAPES, (_TOY_SHAPE,))


def _update_cells(setup: Setup) -> Iterator[Cell]:
    for policy in PAPERS_SPEEDUPS:
        for index, (batch, heads, size) in enumerate(_shapes(setup)):
            yield Cell(
                f"{_NAMES[policy]}, batch {batch}, {heads} heads of {size}", partial(_update, policy=policy, index=index)
            )


def _update(setup: Setup, policy: str, index: int) -> list[Row]:
    """64 of 1,024 tokens leave, and as many come in."""
    from kvdsl.bench.update import Shape, bench_update
    from kvdsl.loading import load

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
    return [{name: row[name] for name in columns} | {"policy": _NAMES[row["policy"]]} for row in rows]


def _update_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for policy, name in ((one, _NAMES[one]) for one in PAPERS_SPEEDUPS):
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
        {**row, "policy": _NAMES[row["policy"]], "batch x heads x size": f"{row['batch']}x{row['heads']}x{row['head_dim']}"}
        for row in rows
    ]  # fmt: skip
    axes = figure.subplots()
    plots.bars(axes, shown, x="batch x heads x size", y="speedup", by="policy")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("in place, times as fast as shift")


# -- Figure 3 ----------------------------------------------------------------------------------------------------------


@lru_cache(1)
def _layers(setup: Setup) -> Any:
    from kvdsl.bench.shapes import shaped_model

    return shaped_model(setup.size("llama-2-7b:2", "tiny:2"), setup.dtype, setup.seed)


def _length_cells(setup: Setup) -> Iterator[Cell]:
    for length in setup.size((256, 512, 1024, 2048), (16, 48)):
        yield Cell(f"{length} tokens", partial(_generated, length=length))


def _generated(setup: Setup, length: int) -> list[Row]:
    """A token's time behind `length` tokens: growing, and with a cache of 256."""
    import torch

    from kvdsl.bench.generate import NATIVE, bench_generate, contenders

    model, (batch, budget) = _layers(setup), setup.size((8, 256), (2, 16))
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(setup.seed))
    wanted = contenders([NATIVE, *PAPERS_SPEEDUPS], {}, [budget], model, setup.backend)
    rows = bench_generate(model, ids, setup.size(32, 4), wanted, repeats=1)
    kept = ("policy", "tpot_ms", "tpot_ms_q1", "tpot_ms_q3", "vs_first", "cache_bytes")
    return [{"length": length, "batch": batch, **{name: row[name] for name in kept}} for row in rows]


def _named(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "policy": _NAMES[row["policy"]]} for row in rows]


def _length_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for policy in PAPERS_SPEEDUPS:
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["length"])
        rise = own[-1]["tpot_ms"] / own[0]["tpot_ms"]
        found.append(Finding(
            f"with {_NAMES[policy]} in place a token takes as long behind {own[-1]['length']} tokens as behind {own[0]['length']} (10 %)",
            rise <= 1.1, f"{rise:.3g} times as long; {own[-1]['vs_first']:.3g}x as fast as the growing cache there",
        ))  # fmt: skip
    return found


def _length_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows), x="length", y="tpot_ms", by="policy", log_x=True)


PAPER = Paper(
    "equip", "EQUIP: EQUivariant preserving In-Place updates for Efficient Token Pruning",
    (
        Experiment(
            "figure3", "A token's time behind texts of several lengths", "Figure 3", _length_cells,
            says="it rises with the length where the cache grows, and stays flat where tokens are evicted, lowest in place.",
            findings=_length_findings, table=_named, plot=_length_plot,
        ),
        Experiment(
            "table5", "64 of 1,024 tokens replaced", "Table 5", _update_cells,
            says="11.6 to 39.9 times as fast for H2O, 26.5 to 50.6 times for StreamingLLM (Sapphire Rapids).",
            findings=_update_findings, table=_update_table, plot=_update_plot,
        ),
    ),
)  # fmt: skip
