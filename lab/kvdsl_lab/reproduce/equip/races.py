"""Whole models in place beside the same policies with a cache that is shifted for every token (figures 4 and 7, tables 1 and 2, D.3).

Two baselines stand beside it: shift and append done well, and as published code writes it, which makes new tensors for every token.
Two decoder layers with their whole embeddings, random weights; all rows of a batch share one prompt as long as the budget, so that
every token evicts one. GPT-NeoX runs H2O at the positions of the text, for its keys cannot be turned anew from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots
from kvdsl_lab.reproduce.equip.common import NAMES, ROTATED, layers, memory, prompt
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup, all_of, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LLAMA, LARGER, NEOX = "llama-2-7b:2", "llama-2-13b:2", "gpt-neox-20b:1"
TOY = "tiny:2"


def race(
    setup: Setup, policy: str, shape: str, batch: int, budget: int, threads: int | None = None, kind: str = ROTATED
) -> Row:
    """A token's time in place and with both baselines; shares of it."""
    import torch

    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import bench_generate
    from kvdsl_lab.bench.names import FRESH, SHIFT

    model, new = layers(setup, shape, kind), setup.size(12, 4)
    wanted = contenders([policy, SHIFT + policy, FRESH + policy], memory(policy), [budget], model, setup.backend)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        ours, shift, fresh = bench_generate(model, prompt(setup, model, budget), new, wanted, rows=batch, repeats=1)
    finally:
        torch.set_num_threads(before)
    return {
        "policy": policy, "model": shape, "batch": batch, "budget": budget, "threads": threads or before,
        **{name: ours[name] for name in ("tpot_ms", "tpot_ms_q1", "tpot_ms_q3")},
        **_beside("shift", shift), **_beside("published", fresh), **_shares("", ours),
    }  # fmt: skip


def _beside(name: str, other: Row) -> Row:
    """A baseline's time, how many times as fast in place is (quartiles by those of the ratio, token by token), and its shares."""
    slower = {f"over_{name}{end}": round(1 / other["vs_first" + of], 4) for end, of in _ENDS.items()}
    return {f"{name}_ms": other["tpot_ms"], **slower, **_shares(f"{name}_", other)}


_ENDS = {"": "", "_q1": "_q3", "_q3": "_q1"}
"""The quartiles of a ratio and of its inverse."""


def _shares(prefix: str, row: Row) -> Row:
    return {f"{prefix}{name}": row["shares"][name] for name in ("attention", "update", "rotation")}


def _cell(policy: str, shape: str, batch: int, budget: int, threads: int | None = None) -> Cell:
    name = f"{policy}, {shape}, batch {batch}, cache {budget}" + (f", {threads} threads" if threads else "")
    return Cell(name, lambda setup: [race(setup, policy, shape, batch, budget, threads)])


def race_table(rows: Sequence[Row]) -> list[Row]:
    """With how many times as fast attention alone is, its update and the turning of keys included."""
    columns = (
        "policy", "model", "batch", "budget", "threads", "tpot_ms", "shift_ms", "over_shift", "over_shift_q1", "over_shift_q3",
        "published_ms", "over_published", "over_published_q1", "over_published_q3",
    )  # fmt: skip
    return [
        {name: row[name] for name in columns}
        | {"policy": NAMES[row["policy"]]}
        | {f"attention_over_{name}": _attention_over(row, name) for name in ("shift", "published")}
        for row in rows
    ]


def _attention_over(row: Row, name: str) -> float | None:
    if row["attention"] is None:  # on a GPU the parts cannot be told apart
        return None
    ours, theirs = (sum(_share(row, prefix, part) for part in _PARTS) for prefix in ("", f"{name}_"))
    return round(float(theirs * row[f"{name}_ms"] / (ours * row["tpot_ms"])), 4)


_PARTS = ("update", "rotation", "attention")


def _share(row: Row, prefix: str, name: str) -> float:
    """A share of a token's time, or what the parts leave; in place, turning keys is part of attention."""
    if name == "rest":
        return round(1 - sum(_share(row, prefix, one) for one in _PARTS), 4)
    return float(row[f"{prefix}{name}"] or 0.0)


def _mean(rows: Sequence[Row], name: str) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(row[name]) for row in rows) / len(rows))


def _findings(rows: Sequence[Row], bounds: dict[str, float]) -> list[Finding]:
    found = []
    for policy, bound in bounds.items():
        own = [row for row in rows if row["policy"] == policy]
        ways = {"over_shift": "shift done well", "over_published": "shift as published"}
        means = {way: _mean(own, name) for name, way in ways.items()}
        told = ", ".join(f"{mean:.3g}x over {way}" for way, mean in means.items())
        share = sum(_share(row, "", part) for row in own for part in _PARTS) / len(own)
        told += f"; attention and update are {share:.0%} of a token's time in place"
        claim = f"{NAMES[policy]}: in place is {bound:g} times as fast as shift and append (geometric mean)"
        quartiles = {way: (_mean(own, f"{way}_q1"), _mean(own, f"{way}_q3")) for way in ways}
        holds = all_of(within(ends, low=bound) for ends in quartiles.values())
        found.append(Finding(claim, holds if own[0]["model"] != TOY else None, told))
    return found


def _plot(figure: Figure, rows: Sequence[Row]) -> None:
    shown = [{**row, "policy": NAMES[row["policy"]], "batch x cache": f"{row['batch']}x{row['budget']}"} for row in rows]
    plots.bars(figure.subplots(), shown, x="batch x cache", y="over_shift", by="policy")


# -- Figure 7 ----------------------------------------------------------------------------------------------------------


def _size_cells(setup: Setup) -> Iterator[Cell]:
    for policy in ("streaming_llm", "equip_h2o"):
        for batch in setup.size((8, 16), (2,)):
            for budget in setup.size((256, 512, 1024), (16,)):
                yield _cell(policy, setup.size(LLAMA, TOY), batch, budget)


FIGURE7 = Experiment(
    "figure7", "Generation in place and with shift and append", "Figures 7 and 8", _size_cells,
    says="1.62 times as fast as StreamingLLM, 4.48 times as fast as H2O (geometric means, Sapphire Rapids).",
    findings=partial(_findings, bounds={"streaming_llm": 1.62, "equip_h2o": 4.48}), table=race_table, plot=_plot,
)  # fmt: skip

# -- Figure 4 ----------------------------------------------------------------------------------------------------------

_WAYS = {"published_": "as published", "shift_": "shift done well", "": "in place"}


def _share_cells(setup: Setup) -> Iterator[Cell]:
    yield _cell("streaming_llm", *setup.size((LLAMA, 16, 256), (TOY, 2, 16)))


def _share_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {"way": way, **{name: _share(row, prefix, name) for name in (*_PARTS, "rest")}}
        for row in rows
        for prefix, way in _WAYS.items()
    ]


def _share_findings(rows: Sequence[Row]) -> list[Finding]:
    (row,) = rows
    shares = {way: _share(row, prefix, "update") + _share(row, prefix, "rotation") for prefix, way in _WAYS.items()}
    told = ", ".join(f"{share:.1%} {way}" for way, share in shares.items())
    least = shares["in place"] < min(shares["shift done well"], shares["as published"])
    return [Finding("updating the cache and turning keys takes a smaller share of a token's time in place", least, told)]


def _share_plot(figure: Figure, rows: Sequence[Row]) -> None:
    shown = [
        {"way": one["way"], "part": name, "share": one[name]} for one in _share_table(rows) for name in (*_PARTS, "rest")
    ]
    plots.bars(figure.subplots(), shown, x="way", y="share", by="part")


FIGURE4 = Experiment(
    "figure4", "Where a token's time goes: batch 16, cache 256", "Figure 4", _share_cells,
    says="with shift and append the update and the turned keys take a large part of it.",
    findings=_share_findings, table=_share_table, plot=_share_plot,
)  # fmt: skip

# -- Tables 1 and 2 ----------------------------------------------------------------------------------------------------


def _larger_cells(setup: Setup) -> Iterator[Cell]:
    for shape in setup.size((LLAMA, LARGER), (TOY,)):
        for budget in setup.size((512, 768, 1024), (16,)):
            yield _cell("equip_h2o", shape, setup.size(8, 2), budget)


TABLE1 = Experiment(
    "table1", "H2O in place, by cache size", "Table 1", _larger_cells,
    says="1.61, 1.90 and 1.96 times as fast for Llama 2 7B, 1.89, 1.99 and 2.04 for 13B (MI210).",
    findings=partial(_findings, bounds={"equip_h2o": 1.89}), table=race_table,
)  # fmt: skip


def _neox_cells(setup: Setup) -> Iterator[Cell]:
    for budget in setup.size((512, 768), (16,)):
        yield _cell("h2o", *setup.size((NEOX, 8), (TOY, 2)), budget)


TABLE2 = Experiment(
    "table2", "H2O in place, in GPT-NeoX", "Table 2", _neox_cells,
    says="1.27 to 1.43 times as fast for GPT-NeoX 20B; GPT-J, its other model, has an attention that no cache can reach.",
    findings=partial(_findings, bounds={"h2o": 1.35}), table=race_table,
)  # fmt: skip

# -- D.3 ---------------------------------------------------------------------------------------------------------------


def _core_cells(setup: Setup) -> Iterator[Cell]:
    for threads in _threads():
        yield _cell("equip_h2o", *setup.size((LLAMA, 8, 512), (TOY, 2, 16)), threads)


def _threads() -> tuple[int, ...]:
    """One, and as many as there are."""
    import torch

    return tuple(dict.fromkeys((1, torch.get_num_threads())))


def _core_findings(rows: Sequence[Row]) -> list[Finding]:
    told = ", ".join(f"{row['over_shift']:.3g}x on {row['threads']}" for row in rows)
    holds = all(row["over_shift"] > 1 for row in rows) if len(rows) > 1 and rows[0]["model"] != TOY else None
    return [Finding("in place is faster than shift done well on any number of cores", holds, told)]


CORES = Experiment(
    "cores", "H2O in place, by cores", "D.3", _core_cells,
    says="2.35 times as fast on 16, 32, 48 and 60 cores.", findings=_core_findings, table=race_table,
)  # fmt: skip
