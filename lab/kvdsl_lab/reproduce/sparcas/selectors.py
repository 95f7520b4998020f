"""What few dims of the keys tell of the tokens: selectors, dims, intervals (tables 2, figures 1 (c), 6 (b), 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce import plots, tables
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup
from kvdsl_lab.reproduce.sparcas.common import DIMS, INTERVAL, attended

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from kvdsl_lab.eval.recording import Recording

SELECTORS = ("abs_q", "abs_q_plus_mean_k", "mean_k", "token_wise", "product", "random_dims")
_NAMES = {
    "abs_q": "|q|", "abs_q_plus_mean_k": "|q| + mean(K)", "mean_k": "mean(K)", "token_wise": "|q| |K|, token by token",
    "product": "|q| mean(|K|)", "random_dims": "random", "quest": "Quest", "full": "full cache",
}  # fmt: skip

# -- what is read ------------------------------------------------------------------------------------------------------


def _prompt(setup: Setup) -> int:
    return setup.size(1024, 64)


@lru_cache(1)
def _stretches(setup: Setup) -> Tensor:
    """Stretches of the text; about a third comes after the prompt."""
    from kvdsl.generation.models import windows

    return windows(setup.tokenizer, setup.text, setup.size(1536, 80), setup.size(4, 1))


@lru_cache(1)
def _recorded(setup: Setup) -> list[Recording]:
    from kvdsl_lab.eval.sketch import record

    return record(setup.model, _stretches(setup))


def _evaluated(setup: Setup, selector: str, dims: int, interval: int = INTERVAL) -> list[Row]:
    """One row of `kvdsl eval sketch`."""
    from kvdsl_lab.eval import sketch

    wanted = sketch.settings([selector], [dims], [attended(setup)], [interval])
    return sketch.evaluate(
        setup.model, _stretches(setup), _prompt(setup), wanted, queries=setup.size(32, 4), backend=setup.backend, seed=setup.seed
    )  # fmt: skip


def _full(setup: Setup) -> list[Row]:
    """The full cache's row."""
    from kvdsl_lab.eval import sketch

    ppl = sketch.full_perplexity(setup.model, _stretches(setup), _prompt(setup), setup.backend, lambda: None)
    return [{
        "selector": "full", "dims": None, "tokens": None, "interval": None, "mask_diff": 0.0, "construction_error": 0.0,
        "ppl": round(ppl, 4),
    }]  # fmt: skip


def _named(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "selector": _NAMES[row["selector"]]} for row in rows]


# -- Table 2 -----------------------------------------------------------------------------------------------------------


def _selector_cells(setup: Setup) -> Iterator[Cell]:
    yield Cell("full cache", _full)
    for dims in setup.size((8, 16), (8,)):
        for selector in SELECTORS:
            yield Cell(f"{_NAMES[selector]}, D = {dims}", partial(_evaluated, selector=selector, dims=dims))


def _selector_table(rows: Sequence[Row]) -> list[Row]:
    columns = ("selector", "dims", "ppl", "mask_diff", "construction_error")
    return [{name: row[name] for name in columns} for row in _named(rows)]


def _selector_findings(rows: Sequence[Row]) -> list[Finding]:
    by = {(row["selector"], row["dims"]): row for row in rows}
    dims = sorted({row["dims"] for row in rows if row["dims"] is not None})
    found = []
    for other in ("mean_k", "random_dims"):
        for measure, words in (("ppl", "perplexity"), ("mask_diff", "mask difference")):
            pairs = [(by["abs_q", size][measure], by[other, size][measure]) for size in dims]
            told = ", ".join(
                f"{ours:.4g} against {theirs:.4g} at D = {size}" for size, (ours, theirs) in zip(dims, pairs, strict=True)
            )
            claim = f"|q| has a lower {words} than {_NAMES[other]}"
            found.append(Finding(claim, all(ours < theirs for ours, theirs in pairs), told))
    return found


def _selector_plot(figure: Figure, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2)
    some = _named([row for row in rows if row["dims"] is not None])
    plots.bars(left, some, x="dims", y="ppl", by="selector")
    plots.bars(right, some, x="dims", y="mask_diff", by="selector")


def _interval_cells(setup: Setup) -> Iterator[Cell]:
    for interval in setup.size((1, 4, 16, 64, 256, 1024), (1, 16)):
        yield Cell(f"U = {interval}", partial(_evaluated, selector="abs_q", dims=DIMS, interval=interval))


def _interval_findings(rows: Sequence[Row]) -> list[Finding]:
    at = {row["interval"]: row["ppl"] for row in rows}
    if INTERVAL not in at:
        return [Finding(f"U = {INTERVAL} costs little against U = 1", None, "not measured at this size")]
    cost = at[INTERVAL] / at[1] - 1
    return [Finding(
        "a sketch that serves 64 queries costs at most 1 % of perplexity against one for every query", cost <= 0.01,
        f"{at[1]:.4g} at U = 1, {at[INTERVAL]:.4g} at U = {INTERVAL}: {100 * cost:+.2f} %",
    )]  # fmt: skip


def _interval_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows), x="interval", y="ppl", by="selector", log_x=True)


TABLE2A = Experiment(
    "table2a", "What the dims are chosen by", "Table 2 (a)", _selector_cells,
    says="|q| is best (7.470), with mean(K) added 7.473, mean(K) alone 7.581, token by token 7.480, random dims 115.",
    findings=_selector_findings, table=_selector_table, plot=_selector_plot,
)  # fmt: skip


TABLE2B = Experiment(
    "table2b", "Queries from one sketch to the next", "Table 2 (b)", _interval_cells,
    says="stable up to 1,024 queries (7.470 at 1, 7.500 at 64, 7.552 at 1,024).", findings=_interval_findings, plot=_interval_plot,
)  # fmt: skip


# -- Figures 6 (b), 7, 8 and 1 (c) -------------------------------------------------------------------------------------


def _dims_cells(setup: Setup) -> Iterator[Cell]:
    yield Cell("full cache", _full)
    for dims in setup.size((2, 4, 8, 16, 32, 64), (4, 16, 64)):
        yield Cell(f"D = {dims}", partial(_evaluated, selector="abs_q", dims=dims))


def _dims_findings(rows: Sequence[Row]) -> list[Finding]:
    full, *ours = rows
    ours = sorted(ours, key=lambda row: row["dims"])
    differences = [row["mask_diff"] for row in ours]
    falls = sum(more < less for less, more in pairwise(differences))
    at = {row["dims"]: row["ppl"] for row in ours}
    every = max(at)
    cost = at[DIMS] / at[every] - 1
    return [
        Finding(
            "the mask difference falls with every more dims", falls == len(ours) - 1,
            ", ".join(f"{row['mask_diff']:.3g} at D = {row['dims']}" for row in ours),
        ),
        Finding(
            f"{DIMS} dims come within 1 % of the perplexity with {every}", cost <= 0.01,
            f"{at[DIMS]:.4g} against {at[every]:.4g}: {100 * cost:+.2f} %; full cache {full['ppl']:.4g}",
        ),
    ]  # fmt: skip


def _dims_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows), x="dims", y="ppl", by="selector", log_x=True)


def _layers_cells(setup: Setup) -> Iterator[Cell]:
    for dims in setup.size((2, 4, 8, 16, 32, 64), (4, 16, 64)):
        yield Cell(f"D = {dims}", partial(_by_layer, dims=dims))


def _by_layer(setup: Setup, dims: int) -> list[Row]:
    from kvdsl_lab.eval import sketch

    setting, rows = sketch.Setting("abs_q", dims, attended(setup), INTERVAL), []
    for index, layer in enumerate(_recorded(setup), sketch.FIRST_LAYER):
        difference, error = sketch.fidelity([layer], _prompt(setup), setup.size(32, 4), setting, setup.seed)
        rows.append({"layer": index, "dims": dims, "construction_error": round(error, 6), "mask_diff": round(difference, 6)})
    return rows


def _layers_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(sorted(rows, key=lambda row: row["layer"]), ["layer"], "dims", "construction_error", "D = {}")


def _layers_findings(rows: Sequence[Row]) -> list[Finding]:
    by_layer: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["dims"]):
        by_layer.setdefault(row["layer"], []).append(row["construction_error"])
    falling = sum(all(more < less for less, more in pairwise(errors)) for errors in by_layer.values())
    return [
        Finding(
            "the construction error falls with every more dims",
            falling == len(by_layer),
            f"in {falling} of {len(by_layer)} layers",
        ),
        _first_is_largest({layer: errors[0] for layer, errors in by_layer.items()}),
    ]


def _first_is_largest(fewest: Mapping[int, float]) -> Finding:
    """Of each layer's construction error with the fewest dims."""
    claim = "with the fewest dims, the first layer that selects has the largest error"
    first, *later = fewest
    if not later:
        return Finding(claim, None, "the model has one layer that selects")
    largest = max(later, key=lambda layer: fewest[layer])
    told = f"layer {first}: {fewest[first]:.3g}; the largest of the {len(later)} behind it, layer {largest}: {fewest[largest]:.3g}"
    return Finding(claim, fewest[first] > fewest[largest], told)


def _layers_plot(figure: Figure, rows: Sequence[Row]) -> None:
    shown = [{**row, "layer": f"layer {row['layer']}"} for row in rows]
    plots.lines(figure.subplots(), shown, x="dims", y="construction_error", by="layer", log_x=True)


_NEAREST = (("abs_q", DIMS), ("quest", None), ("random_dims", DIMS))
_PROXIES = (("abs_q", DIMS), ("abs_q", 32), ("mean_k", DIMS), ("product", DIMS), ("random_dims", DIMS), ("quest", None))


def _length_cells(setup: Setup, kinds: Sequence[tuple[str, int | None]]) -> Iterator[Cell]:
    for selector, dims in kinds:
        yield Cell(_kind(selector, dims), partial(_by_length, selector=selector, dims=dims))


def _kind(selector: str, dims: int | None) -> str:
    return _NAMES[selector] if dims is None else f"{_NAMES[selector]}, D = {dims}"


def _by_length(setup: Setup, selector: str, dims: int | None) -> list[Row]:
    """How many tokens are chosen that the whole keys do not choose, or the other way round, in the 64 queries before each length."""
    from kvdsl_lab.eval.sketch import Setting, fidelity

    length, tokens = _stretches(setup).shape[1], attended(setup)
    step = setup.size(128, 20)
    rows = []
    for end in range(2 * step, length + 1, step):
        begun = end - min(INTERVAL, step)
        parts = [one.before(end) for one in _recorded(setup)]
        setting = Setting(selector, dims, tokens, None if dims is None else INTERVAL)
        difference, _ = fidelity(parts, begun, setup.size(8, 4), setting, setup.seed)
        rows.append({
            "selector": selector, "dims": dims, "tokens": tokens, "length": end, "mask_diff": round(difference, 6),
            "differing_tokens": round(difference * (begun + 1 + end) / 2, 2),
        })  # fmt: skip
    return rows


def _kinds_of(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "kind": _kind(row["selector"], row["dims"])} for row in rows]


def _length_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_kinds_of(rows), ["length"], "kind", "differing_tokens")


def _length_findings(rows: Sequence[Row], others: Sequence[str]) -> list[Finding]:
    ours = {row["length"]: row["mask_diff"] for row in rows if (row["selector"], row["dims"]) == ("abs_q", DIMS)}
    found = []
    for other in others:
        theirs = {row["length"]: row["mask_diff"] for row in rows if row["selector"] == other}
        below = sum(ours[length] < theirs[length] for length in ours)
        found.append(Finding(
            f"the masks by |q| are closer to the oracle's than those by {_NAMES[other]}", below == len(ours),
            f"at {below} of {len(ours)} lengths",
        ))  # fmt: skip
    return found


def _length_plot(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    plots.lines(axes, _kinds_of(rows), x="length", y="differing_tokens", by="kind")
    axes.axhline(rows[0]["tokens"], linestyle="--", linewidth=1, color="green", label="token budget")


FIGURE1C = Experiment(
    "figure1c", "Tokens chosen otherwise than by the whole keys", "Figure 1 (c)", partial(_length_cells, kinds=_NEAREST),
    says="the selection by few dims is most similar to the oracle's, before Quest and random dims.",
    findings=partial(_length_findings, others=("quest", "random_dims")), table=_length_table, plot=_length_plot,
)  # fmt: skip


FIGURE6B = Experiment(
    "figure6b", "Perplexity against the dims of the sketch", "Figure 6 (b)", _dims_cells,
    says="16 of 128 dims match the full cache; 8 cost 0.05.", findings=_dims_findings, table=_selector_table, plot=_dims_plot,
)  # fmt: skip


FIGURE7 = Experiment(
    "figure7", "Construction error against the dims of the sketch, layer by layer", "Figure 7", _layers_cells,
    says="it falls monotonically; early layers have the largest (at 2 dims 6.13 in layer 2, 2.88 in layer 17).",
    findings=_layers_findings, table=_layers_table, plot=_layers_plot,
)  # fmt: skip


FIGURE8 = Experiment(
    "figure8", "Mask difference along the text", "Figure 8", partial(_length_cells, kinds=_PROXIES),
    says="with 16 dims it is smaller by |q| than by the other selectors or Quest.",
    findings=partial(_length_findings, others=("mean_k", "product", "random_dims", "quest")),
    table=_length_table, plot=_length_plot,
)  # fmt: skip
