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

SHAPE = "llama-2-7b:2"
BATCH, BUDGET = 8, 256


_KEPT = ("tpot_ms", "tpot_ms_q1", "tpot_ms_q3", "vs_first", "vs_first_q1", "vs_first_q3", "cache_bytes")


def _row(row: Row, length: int) -> Row:
    return {
        "policy": Path(row["policy"]).stem,
        "length": length,
        "batch": row["batch"],
        **{name: row[name] for name in _KEPT},
    }


def _generated(setup: Setup, length: int, names: Sequence[str], **memory: str) -> list[Row]:
    """A token's time behind one prompt of that length, which all rows share, with caches that lie in memory so."""
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import bench_generate

    shape, batch, budget, new = setup.size((SHAPE, BATCH, BUDGET, 24), ("tiny:2", 2, 16, 4))
    model = layers(setup, shape)
    wanted = contenders(names, memory, [budget], model, setup.backend)
    return [
        _row(row, length) for row in bench_generate(model, prompt(setup, model, length), new, wanted, rows=batch, repeats=1)
    ]


# -- Figure 3 ----------------------------------------------------------------------------------------------------------

_EVICTING = ("h2o", "streaming_llm")


_ROUNDS = 3


def _length_cells(_: Setup) -> Iterator[Cell]:
    yield Cell("all lengths", _in_turns)


def _in_turns(setup: Setup) -> list[Row]:
    """A token's time behind prompts of all lengths, in turns; `rises`: times that behind the shortest one, round by round."""
    import torch

    from kvdsl_lab.bench import measure
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import Race, Times, figures
    from kvdsl_lab.bench.names import NATIVE

    shape, batch, budget, new = setup.size((SHAPE, BATCH, BUDGET, 24), ("tiny:2", 2, 16, 4))
    model = layers(setup, shape)
    wanted = contenders((NATIVE, *_EVICTING), {}, [budget], model, setup.backend)
    lengths = setup.size((256, 512, 1024, 2048), (16, 48))
    races = [Race(model, prompt(setup, model, length), new, wanted, batch) for length in lengths]
    times = [[Times() for _ in wanted] for _ in lengths]
    with torch.inference_mode():
        for turn in range(-1, _ROUNDS):  # the first warms up
            for race, own in zip(races, times, strict=True):
                race.round(own if turn >= 0 else [Times() for _ in wanted], turn)
    rows = []
    for length, race, own in zip(lengths, races, times, strict=True):
        for one, found, shortest in zip(race.wanted, own, times[0], strict=True):
            row = {"policy": one.policy, "batch": batch, **figures(found, own[0], batch)}
            rows.append(_row(row, length) | measure.summary("rises", measure.ratios(found.later, shortest.later)))
    return rows


def _length_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for policy in _EVICTING:
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["length"])
        first, last = own[0], own[-1]
        claim = f"with {NAMES[policy]} in place a token takes as long behind {last['length']} tokens as behind {first['length']} (10 %)"
        rises = ", ".join(f"{row['rises']:.3g}" for row in own[1:])
        told = f"{rises} times as long; {last['vs_first']:.3g}x as fast as the growing cache there"
        holds = all_of(within((row["rises_q1"], row["rises_q3"]), high=1.1) for row in own[1:])
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
    for length in setup.size((1024, 4096), (16, 48)):
        yield Cell(f"{length} tokens", partial(_paged, length=length))


def _paged(setup: Setup, length: int) -> list[Row]:
    rows = _generated(setup, length, ("full", "streaming_llm"), storage="blocks:16")
    return [{**row, "policy": f"{row['policy']}_blocks"} for row in rows]


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
