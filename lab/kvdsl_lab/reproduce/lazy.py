"""Lazy pruning, slack and staged eviction: what they cost and save against pruning at every token.

The paper leaves its tables open; here every cell is measured. As in its section 4.1 all methods see at most C tokens, and the baseline
computes a sliding window of C tokens anew for every token. Ours without its mechanisms is the framework's own row. Its Table 4 is a log of
what did not work with its code, and has no figures to measure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from kvdsl_lab.reproduce import plots
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Paper, Row, Setup, below, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

R, SIGMA, DELTA = 32, 24, 8
RECOMPUTED, FULL, STREAMING, FRAMEWORK, OURS = (
    "recomputed window",
    "full cache",
    "StreamingLLM",
    "ours, framework only",
    "ours",
)
NO_SLACK, NO_MAX_DROP, LAZY_ONLY = "without slack", "without max_drop", "lazy pruning only"


def _params(method: str, setup: Setup) -> tuple[str, dict[str, int]]:
    """A method as a policy and its params."""
    budget = {"budget": _capacity(setup)}
    if method == FULL:
        return "full", {}
    if method == STREAMING:
        return "streaming_llm", budget
    allowance, slack, drop = setup.size((R, SIGMA, DELTA), (8, 6, 2))
    chosen = {
        FRAMEWORK: (1, 0, 0), LAZY_ONLY: (allowance, 0, 0), NO_SLACK: (allowance, 0, drop), NO_MAX_DROP: (allowance, slack, 0),
        OURS: (allowance, slack, drop),
    }[method]  # fmt: skip
    return "lazy_streaming", budget | dict(zip(("R", "sigma", "delta"), chosen, strict=True))


def _capacity(setup: Setup) -> int:
    """C, the tokens that every method sees."""
    return setup.size(256, 16)


def _cache(setup: Setup, method: str) -> Any:
    from kvdsl.loading import load

    policy, params = _params(method, setup)
    made: Any = load(policy)
    return made(setup.model, backend=setup.backend, **params)


# -- perplexity --------------------------------------------------------------------------------------------------------


@lru_cache(2)
def _long(setup: Setup) -> Tensor:
    from kvdsl.generation.models import windows

    return windows(setup.tokenizer, setup.text, setup.size(3072, 48, 1024), setup.size(2, 1))


@lru_cache(2)
def _short(setup: Setup) -> Tensor:
    from kvdsl.generation.models import windows

    return windows(setup.tokenizer, setup.text, setup.size(768, 36), setup.size(4, 1))


@lru_cache(None)
def _losses(setup: Setup, method: str, long: bool) -> Tensor:
    """Loss of every token but the first, token by token, [rows, length - 1]."""
    from kvdsl_lab.eval.perplexity import token_losses

    return token_losses(setup.model, _long(setup) if long else _short(setup), _cache(setup, method), 1)


@lru_cache(None)
def _recomputed_losses(setup: Setup, long: bool) -> Tensor:
    """Of every `_every`-th token, predicted from the C tokens before it in a forward of their own."""
    import torch
    from torch.nn.functional import cross_entropy

    ids, window = _long(setup) if long else _short(setup), _capacity(setup)
    found = []
    with torch.inference_mode():
        for at in _sampled(setup, ids):
            logits = setup.model(
                input_ids=ids[:, max(0, at - window) : at].to(setup.model.device), use_cache=False, logits_to_keep=1
            )
            found.append(cross_entropy(logits.logits[:, -1].float().cpu(), ids[:, at], reduction="none"))
    return torch.stack(found, 1)


def _sampled(setup: Setup, ids: Tensor) -> range:
    """The tokens of which all perplexities are: the recomputed window is too slow for every one.

    Prunes come every 8th and every 32nd token, quick ones every 2nd and 8th: an odd step meets all that lies between two alike.
    """
    return range(_capacity(setup), ids.shape[1], setup.size(7, 3))


def _perplexity(setup: Setup, method: str, long: bool) -> float:
    if method == RECOMPUTED:
        losses = _recomputed_losses(setup, long)
    else:
        ids = _long(setup) if long else _short(setup)
        losses = _losses(setup, method, long)[:, [at - 1 for at in _sampled(setup, ids)]]
    return round(math.exp(float(losses.double().mean())), 4)


# -- Tables 1 to 3 -----------------------------------------------------------------------------------------------------


def _timed(setup: Setup, methods: tuple[str, ...], long: bool) -> list[Row]:
    """Times and memory of all methods in turns, generating past C tokens."""
    from kvdsl_lab.bench.contenders import Contender
    from kvdsl_lab.bench.generate import bench_generate

    capacity, length = _capacity(setup), (_long(setup) if long else _short(setup)).shape[1]
    wanted = [
        Contender(one, float(capacity), window=capacity) if one == RECOMPUTED else Contender(one, None, partial(_cache, setup, one))
        for one in methods
    ]  # fmt: skip
    ids = (_long(setup) if long else _short(setup))[:1, : length * 2 // 3]
    return bench_generate(setup.model, ids, setup.size(64, 6), wanted, repeats=setup.size(3, 1))


_TIMES = ("tpot_ms", "tpot_ms_q1", "tpot_ms_q3", "vs_first")


def _method_cells(setup: Setup, methods: tuple[str, ...], long: bool) -> Iterator[Cell]:
    """Perplexities one by one; the times are taken in turns, and so are one cell."""
    for method in methods:
        yield Cell(f"perplexity, {method}", partial(_perplexity_row, method=method, long=long))
    yield Cell("times and memory", partial(_time_rows, methods=methods, long=long))


def _perplexity_row(setup: Setup, method: str, long: bool) -> list[Row]:
    return [{"method": method, "ppl": _perplexity(setup, method, long), "peak_bytes": None, **dict.fromkeys(_TIMES)}]


def _time_rows(setup: Setup, methods: tuple[str, ...], long: bool) -> list[Row]:
    rows = _timed(setup, methods, long)
    return [
        {"method": row["policy"], "ppl": None, "peak_bytes": row["peak_bytes"], **{name: row[name] for name in _TIMES}}
        for row in rows
    ]  # fmt: skip


def _merged(rows: Sequence[Row]) -> dict[str, Row]:
    """Every method's perplexity and times in one."""
    found: dict[str, Row] = {}
    for row in rows:
        known = {name: value for name, value in row.items() if value is not None}
        found[row["method"]] = {**dict.fromkeys(row), **found.get(row["method"], {}), **known}
    return found


def _method_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "method": row["method"], "TPOT, ms": row["tpot_ms"], "q1": row["tpot_ms_q1"], "q3": row["tpot_ms_q3"],
            "speedup": row["vs_first"], "ppl": row["ppl"],
            "peak, MB": None if row["peak_bytes"] is None else round(row["peak_bytes"] / 1e6, 1),
        }
        for row in _merged(rows).values()
    ]  # fmt: skip


def _main_findings(rows: Sequence[Row]) -> list[Finding]:
    by = _merged(rows)
    ours, streaming, framework = by[OURS], by[STREAMING], by[FRAMEWORK]
    return [
        Finding(
            "the framework with its mechanisms off is StreamingLLM", abs(framework["ppl"] / streaming["ppl"] - 1) < 1e-3,
            f"perplexity {framework['ppl']:.5g} and {streaming['ppl']:.5g}",
        ),
        Finding(
            "pruning seldom takes less time a token than pruning at every one",
            within((ours["tpot_ms_q1"] / streaming["tpot_ms_q3"], ours["tpot_ms_q3"] / streaming["tpot_ms_q1"]), high=1),
            f"{ours['tpot_ms']:.4g} and {streaming['tpot_ms']:.4g} ms",
        ),
        Finding(
            "it costs at most 1 % of perplexity", ours["ppl"] <= 1.01 * streaming["ppl"],
            f"{ours['ppl']:.5g} and {streaming['ppl']:.5g}",
        ),
    ]  # fmt: skip


def _ablation_findings(rows: Sequence[Row]) -> list[Finding]:
    by = _merged(rows)
    told = ", ".join(f"{name} {row['ppl']:.5g}" for name, row in by.items())
    others = [row["ppl"] for name, row in by.items() if name != OURS]
    return [Finding("with slack and max_drop the perplexity is lowest", below(by[OURS]["ppl"], min(others)), told)]


# -- token by token around prunes --------------------------------------------------------------------------------------

_BEFORE, _AFTER = 3, 4
"""Places around a prune: as many as lie between two of those that come most often."""


def _prune_cells(setup: Setup) -> Iterator[Cell]:
    for method in (LAZY_ONLY, OURS):
        yield Cell(method, partial(_around, method=method))


def _around(setup: Setup, method: str) -> list[Row]:
    """Mean loss of the tokens before and after a prune, above that of all tokens.

    A policy settles when a token has attended: the token at offset 0 is still predicted from all that was there, the next is not.
    """
    from kvdsl_lab.eval.perplexity import token_losses

    cache, held = _cache(setup, method), list[int]()
    losses = token_losses(
        setup.model, _long(setup), cache, 1, lambda: held.append(int((cache.positions(0)[0, 0] >= 0).sum()))
    )
    prunes = [at for at in range(1, len(held)) if held[at] < held[at - 1]]
    mean, length = float(losses.mean()), losses.shape[1]
    rows = []
    for offset in range(-_BEFORE, _AFTER + 1):
        near = [at + offset for at in prunes if 0 <= at + offset < length]
        extra = round(float(losses[:, near].mean()) - mean, 6) if near else None
        rows.append({"method": method, "offset": offset, "prunes": len(prunes), "extra_nll": extra})
    return rows


def _prune_findings(rows: Sequence[Row]) -> list[Finding]:
    claim = "dropping few tokens at a time softens the rise of the loss after a prune"
    rises = {method: _rise(rows, method) for method in (LAZY_ONLY, OURS)}
    seen = {method: one for method, one in rises.items() if not math.isnan(one[0])}
    told = ", ".join(f"{method}: {rise:+.3g} ± {error:.2g} nats" for method, (rise, error) in seen.items())
    (once, its_error), (softly, our_error) = rises[LAZY_ONLY], rises[OURS]
    decided = abs(once - softly) > 2 * math.hypot(its_error, our_error)  # False, too, of what was not seen
    return [Finding(claim, softly < once if decided else None, told)]


def _rise(rows: Sequence[Row], method: str) -> tuple[float, float]:
    """The loss of the places after a prune above that of those before it, in nats; its standard error, by the places' scatter."""
    own = [(row["offset"], row["extra_nll"]) for row in rows if row["method"] == method and row["extra_nll"] is not None]
    before, after = ([loss for at, loss in own if (at > 0) == late] for late in (False, True))
    if min(len(before), len(after)) < 2:
        return math.nan, math.nan
    error = math.hypot(*(statistics.stdev(places) / math.sqrt(len(places)) for places in (before, after)))
    return statistics.fmean(after) - statistics.fmean(before), error


def _prune_plot(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    plots.lines(axes, rows, x="offset", y="extra_nll", by="method")
    axes.set_xlabel("tokens after a prune")
    axes.set_ylabel("loss above the mean, nats")


_MAIN = (RECOMPUTED, FULL, STREAMING, FRAMEWORK, OURS)

PAPER = Paper(
    "lazy", "Efficient KV Cache Management for Long-Context LLM Inference: Lazy Pruning, Slack, and Staged Eviction",
    (
        Experiment(
            "table1", "A long text: 3,072 tokens, more than the shipped model was made for; 1,024 on other models", "Table 1",
            partial(_method_cells, methods=_MAIN, long=True),
            says="its table is unfilled but for the baseline.", findings=_main_findings, table=_method_table,
        ),
        Experiment(
            "table2", "A short text", "Table 2", partial(_method_cells, methods=_MAIN, long=False),
            says="its table is unfilled but for the baseline.", findings=_main_findings, table=_method_table,
        ),
        Experiment(
            "table3", "Without slack, without max_drop", "Table 3",
            partial(_method_cells, methods=(LAZY_ONLY, NO_SLACK, NO_MAX_DROP, OURS), long=True),
            says="its table is unfilled.", findings=_ablation_findings, table=_method_table,
        ),
        Experiment(
            "prunes", "Loss, token by token, around prunes", "Section 3.4", _prune_cells,
            says="removing a large block at once makes the loss of the next tokens rise; smaller ones do so less.",
            findings=_prune_findings, plot=_prune_plot,
        ),
    ),
)  # fmt: skip
