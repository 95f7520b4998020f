"""What attending to few tokens costs: perplexity along a text, facts recalled (tables 1 and 3 to 5, figure 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots, tables
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup
from kvdsl_lab.reproduce.recall import TEXT, by_task, faithful, recalled
from kvdsl_lab.reproduce.sparcas.common import attended

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_POLICIES = {
    "full": "full cache", "quest": "Quest", "sparcas": "SparCas", "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "adakv": "AdaKV",
    "sparcas_all": "SparCas in all layers", "magicpig": "MagicPIG",
}  # fmt: skip


# -- Figure 3 ----------------------------------------------------------------------------------------------------------


def _along_cells(setup: Setup) -> Iterator[Cell]:
    for policy in ("full", "quest", "sparcas"):
        yield Cell(_POLICIES[policy], partial(_along, policy=policy))


def _along(setup: Setup, policy: str) -> list[Row]:
    """Perplexity of everything up to a length, token by token from the first."""
    from kvdsl.generation.models import windows
    from kvdsl_lab.eval.caches import Policies
    from kvdsl_lab.eval.perplexity import token_losses

    length, by = setup.size(2048, 48), setup.size(256, 16)
    ids = windows(setup.tokenizer, setup.text, length, setup.size(4, 1))
    settings = {} if policy == "full" else {"tokens": str(attended(setup))}
    cache = Policies([policy], settings, setup.backend).make(policy, setup.model, None)
    losses = token_losses(setup.model, ids, cache, 1).double()
    return [
        {"policy": policy, "length": end, "ppl": round(float(losses[:, : end - 1].mean().exp()), 4)}
        for end in range(by, length + 1, by)
    ]  # fmt: skip


def _called(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "policy": _POLICIES[row["policy"]]} for row in rows]


def _along_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_called(rows), ["length"], "policy", "ppl")


def _along_findings(rows: Sequence[Row]) -> list[Finding]:
    by = {(row["policy"], row["length"]): row["ppl"] for row in rows}
    lengths = sorted({row["length"] for row in rows})
    below, last = sum(by["sparcas", at] < by["quest", at] for at in lengths), lengths[-1]
    return [Finding(
        "SparCas has a lower perplexity than Quest at every length", below == len(lengths),
        f"at {below} of {len(lengths)}; at {last} {by['sparcas', last]:.4g} against {by['quest', last]:.4g}, "
        f"full cache {by['full', last]:.4g}",
    )]  # fmt: skip


def _along_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _called(rows), x="length", y="ppl", by="policy")


FIGURE3 = Experiment(
    "figure3", "Perplexity along the text", "Figure 3", _along_cells,
    says="SparCas stays below Quest over the whole text.", findings=_along_findings, table=_along_table, plot=_along_plot,
)  # fmt: skip


# -- Tables 1, 3 to 5 --------------------------------------------------------------------------------------------------


def _budget_cells(setup: Setup) -> Iterator[Cell]:
    yield Cell("full cache", partial(_recall_row, policy="full"))
    for tokens in setup.size((32, 64, 128), (16,)):
        for policy in ("quest", "sparcas"):
            yield Cell(f"{_POLICIES[policy]}, {tokens} tokens", partial(_recall_row, policy=policy, tokens=tokens))


def _recall_row(setup: Setup, policy: str, tokens: int | None = None) -> list[Row]:
    rows = by_task(setup, policy) if tokens is None else by_task(setup, policy, tokens=tokens)
    return [{"policy": policy, "tokens": tokens, "task": row["task"], "accuracy": row["accuracy"]} for row in rows]


def _budget_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_called(rows), ["policy", "tokens"], "task", "accuracy")


def _budget_findings(rows: Sequence[Row]) -> list[Finding]:
    mean: dict[tuple[str, int], float] = {}
    for policy, tokens in {(row["policy"], row["tokens"]) for row in rows}:
        mean[policy, tokens] = fmean(row["accuracy"] for row in rows if (row["policy"], row["tokens"]) == (policy, tokens))
    budgets = sorted(tokens for policy, tokens in mean if policy == "sparcas")
    told = ", ".join(f"{mean['sparcas', at]:.3g} against {mean['quest', at]:.3g} with {at} tokens" for at in budgets)
    holds = all(mean["sparcas", at] > mean["quest", at] for at in budgets)
    return [Finding("SparCas recalls more than Quest with every number of tokens", holds, told)]


def _budget_plot(figure: Figure, rows: Sequence[Row]) -> None:
    for axes, task in zip(figure.subplots(1, 2, sharey=True), dict.fromkeys(row["task"] for row in rows), strict=True):
        plots.lines(
            axes, [row for row in _called(rows) if row["task"] == task], x="tokens", y="accuracy", by="policy", log_x=True
        )
        axes.set_title(task)


def _few_dims_cells(setup: Setup) -> Iterator[Cell]:
    for dims in setup.size((2, 4, 8, 16), (2, 16)):
        yield Cell(f"D = {dims}", partial(_few_dims, dims=dims))


def _few_dims(setup: Setup, dims: int) -> list[Row]:
    rows = by_task(setup, "sparcas", tokens=attended(setup), dims=dims)
    return [{"dims": dims, "task": row["task"], "accuracy": row["accuracy"]} for row in rows]


def _few_dims_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(rows, ["dims"], "task", "accuracy")


def _few_dims_findings(rows: Sequence[Row]) -> list[Finding]:
    means = {
        dims: fmean(row["accuracy"] for row in rows if row["dims"] == dims) for dims in sorted({row["dims"] for row in rows})
    }
    values = list(means.values())
    told = ", ".join(f"{share:.3g} at D = {dims}" for dims, share in means.items())
    return [Finding("recall does not fall with more dims", all(b >= a for a, b in pairwise(values)), told)]


VARIANTS = Path(__file__).parents[1] / "variants"
_PYRAMID = str(Path(__file__).with_name("pyramidkv.kv"))
_EVERYWHERE = "sparcas_all"
"""SparCas in the first two layers as well, so that it reads as many tokens as the others keep."""
_EVICTING = ("full", "pyramidkv", "snapkv", "adakv", "sparcas", _EVERYWHERE, "magicpig")


def _evicting_cells(setup: Setup) -> Iterator[Cell]:
    for policy in _EVICTING:
        yield Cell(_POLICIES[policy], partial(_evicting, policy=policy))


def _evicting(setup: Setup, policy: str) -> list[Row]:
    size, used = (
        setup.size(128, 48),
        {"pyramidkv": _PYRAMID, _EVERYWHERE: str(VARIANTS / "sparcas_all.kv")}.get(policy, policy),
    )
    settings = {"full": {}, "magicpig": {}, "sparcas": {"tokens": size}, _EVERYWHERE: {"tokens": size}}.get(
        policy, {"budget": size}
    )
    scores = recalled(setup, used, **settings) | {TEXT: faithful(setup, used, **settings)}
    return [{"policy": policy, "task": task, "score": score} for task, score in scores.items()]


def _evicting_table(rows: Sequence[Row]) -> list[Row]:
    made = tables.pivot(_called(rows), ["task"], "policy", "score")
    average = {name: fmean(row[name] for row in made) for name in made[0] if name != "task"}
    return [*made, {"task": "average", **average}]


def _evicting_findings(rows: Sequence[Row]) -> list[Finding]:
    means = {policy: fmean(row["score"] for row in rows if row["policy"] == policy) for policy in _EVICTING}
    others = [means[name] for name in ("pyramidkv", "snapkv", "adakv")]
    told = ", ".join(f"{_POLICIES[name]} {score:.3g}" for name, score in means.items())
    best = max(others)
    return [
        Finding("SparCas has the highest average of those that hold or attend to few tokens", means["sparcas"] > best, told),
        Finding(
            "it has so where it reads 128 tokens in all layers",
            means[_EVERYWHERE] > best,
            f"{means[_EVERYWHERE]:.3g}, {best:.3g}",
        ),
    ]


def _evicting_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.bars(figure.subplots(), _called(rows), x="task", y="score", by="policy")


TABLE1 = Experiment(
    "table1", "Facts recalled, by the number of tokens attended to", "Table 1",
    _budget_cells, says="SparCas is above Quest with every budget, most with the smallest (94.0 against 81.1 with 128 tokens of 32K).",
    findings=_budget_findings, table=_budget_table, plot=_budget_plot,
)  # fmt: skip


TABLE3 = Experiment(
    "table3", "Facts recalled, by the dims of the sketch", "Tables 3 and 4", _few_dims_cells,
    says="8 to 16 of 128 dims suffice; 2 do not (84.6 and 38.8 against 96.0 and 92.0 with 16).",
    findings=_few_dims_findings, table=_few_dims_table,
)  # fmt: skip


TABLE5 = Experiment(
    "table5", "Beside policies that evict after the prompt, with as many tokens a layer (SparCas: from the third on)", "Table 5",
    _evicting_cells, says="SparCas has the highest average (52.63; AdaKV 50.73, SnapKV 50.36, PyramidKV 50.34; full cache 52.37).",
    findings=_evicting_findings, table=_evicting_table, plot=_evicting_plot,
)  # fmt: skip
