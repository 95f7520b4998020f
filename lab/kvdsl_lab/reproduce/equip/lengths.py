"""Whole models behind texts of several lengths: caches that grow beside those that evict, and both in blocks (figures 3 and 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots
from kvdsl_lab.reproduce.equip.common import NAMES, layers, named, prompt
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup, all_of, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = Path(__file__).parents[1] / "variants"
SHAPE = "llama-2-7b:2"
BATCH, BUDGET = 8, 256


def _generated(setup: Setup, length: int, names: Sequence[str]) -> list[Row]:
    """A token's time behind one prompt of that length, which all rows share."""
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import bench_generate

    shape, batch, budget, new = setup.size((SHAPE, BATCH, BUDGET, 24), ("tiny:2", 2, 16, 4))
    model = layers(setup, shape)
    wanted = contenders(names, {}, [budget], model, setup.backend)
    rows = bench_generate(model, prompt(setup, model, length), new, wanted, rows=batch, repeats=1)
    kept = ("tpot_ms", "tpot_ms_q1", "tpot_ms_q3", "vs_first", "vs_first_q1", "vs_first_q3", "cache_bytes")
    return [
        {"policy": Path(row["policy"]).stem, "length": length, "batch": batch, **{name: row[name] for name in kept}}
        for row in rows
    ]


# -- Figure 3 ----------------------------------------------------------------------------------------------------------

_EVICTING = ("h2o", "streaming_llm")


def _length_cells(setup: Setup) -> Iterator[Cell]:
    from kvdsl_lab.bench.contenders import NATIVE

    for length in setup.size((256, 512, 1024, 2048), (16, 48)):
        yield Cell(f"{length} tokens", partial(_generated, length=length, names=(NATIVE, *_EVICTING)))


def _length_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for policy in _EVICTING:
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["length"])
        first, last = own[0], own[-1]
        rises = [row["tpot_ms"] / first["tpot_ms"] for row in own[1:]]
        claim = f"with {NAMES[policy]} in place a token takes as long behind {last['length']} tokens as behind {first['length']} (10 %)"
        told = f"{', '.join(f'{rise:.3g}' for rise in rises)} times as long; {last['vs_first']:.3g}x as fast as the growing cache there"
        # The lengths are measured one after the other: the quartiles say how far another hour may be from this one.
        holds = all_of(
            within((row["tpot_ms_q1"] / first["tpot_ms_q3"], row["tpot_ms_q3"] / first["tpot_ms_q1"]), high=1.1)
            for row in own[1:]
        )
        found.append(Finding(claim, holds if last["length"] >= 1024 else None, told))
    return found


def _length_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), named(rows), x="length", y="tpot_ms", by="policy", log_x=True)


FIGURE3 = Experiment(
    "figure3", "A token's time behind texts of several lengths", "Figure 3", _length_cells,
    says="it rises with the length where the cache grows, and stays flat where tokens are evicted, lowest in place.",
    findings=_length_findings, table=named, plot=_length_plot,
)  # fmt: skip

# -- Figure 10 ---------------------------------------------------------------------------------------------------------

_PAGED = {"full_blocks": "all tokens", "streaming_llm_blocks": "StreamingLLM"}


def _paged_cells(setup: Setup) -> Iterator[Cell]:
    names = tuple(str(VARIANTS / f"{name}.kv") for name in _PAGED)
    for length in setup.size((1024, 4096), (16, 48)):
        yield Cell(f"{length} tokens", partial(_generated, length=length, names=names))


def _paged_table(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "policy": _PAGED[row["policy"]]} for row in rows]


def _paged_findings(rows: Sequence[Row]) -> list[Finding]:
    own = sorted((row for row in rows if row["policy"] == "streaming_llm_blocks"), key=lambda row: row["length"])
    speed = [row["vs_first"] for row in own]
    told = ", ".join(f"{row['vs_first']:.3g}x behind {row['length']} tokens" for row in own)
    claim = "StreamingLLM in blocks is faster than all tokens in blocks, the more so the longer the text"
    return [Finding(claim, speed[-1] > max(1, speed[0]) if own[-1]["length"] >= 1024 else None, told)]


FIGURE10 = Experiment(
    "figure10", "In blocks: StreamingLLM beside all tokens", "Figure 10", _paged_cells,
    says="up to 7.44 times as fast as paged attention over 4K tokens, 16.58 times over 16K (batch 32, Sapphire Rapids).",
    findings=_paged_findings, table=_paged_table,
)  # fmt: skip
