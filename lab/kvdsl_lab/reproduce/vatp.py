"""VATP: values differ in size, attention sinks have small ones, and what it brings to weigh attention by their norms.

The paper's tasks are LongBench's, for models that follow instructions; ours are facts to recall and the full cache's text. Budgets
are rates of the prompt, 1,024 tokens here, and StreamLLM keeps 20 sinks, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvdsl_lab.reproduce import plots, tables
from kvdsl_lab.reproduce.experiment import NEAR, Cell, Experiment, Finding, Paper, Row, Setup, all_of, below
from kvdsl_lab.reproduce.recall import TEXT, by_depth, faithful, recalled, usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = Path(__file__).with_name("variants")
BASES = {"h2o": "vatp_h2o", "scissorhands_window": "vatp_scissorhands"}
"""Policies that look at attention only, and the same with the values' norms."""
_NAMES = {
    "full": "all budget", "streaming_llm": "StreamLLM", "h2o": "H2O", "vatp_h2o": "H2O w/ VATP", "scissorhands_window": "Scissorhands",
    "vatp_scissorhands": "Scissorhands w/ VATP",
}  # fmt: skip
SINKS = 20


def _prompt(setup: Setup) -> int:
    """Tokens of a prompt, as `kvdsl_lab.reproduce.recall` makes them."""
    return setup.size(1024, 160)


def _named(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "policy": _NAMES[row["policy"]]} for row in rows]


# -- Figure 1 ----------------------------------------------------------------------------------------------------------

SHOWN = 32
"""Tokens of the maps, from the text's first."""


def _map_cells(_: Setup) -> Iterator[Cell]:
    yield Cell("attention and norms", _maps)


def _maps(setup: Setup) -> list[Row]:
    """What the first tokens get from all queries that see them, on average, and the norms of their values; means over stretches."""
    import torch

    from kvdsl.generation.models import windows
    from kvdsl_lab.eval.recording import record

    length = setup.size(256, 48)
    ids = windows(setup.tokenizer, setup.text, length, setup.size(8, 2))
    rows = []
    for layer, found in enumerate(record(setup.model, ids)):
        seen_by = torch.arange(length, 0, -1, device=found.key.device)
        received = (found.attention(0, length).sum(2) / seen_by).mean(0)
        norm = found.value.abs().sum(-1).mean(0)
        others = norm[:, 1:].median(-1).values
        rows += [
            {
                "layer": layer, "head": head, "token": token, "attention": float(f"{received[head, token]:.4g}"),
                "norm": float(f"{norm[head, token]:.4g}"), "median_norm": float(f"{others[head]:.4g}"),
            }
            for head in range(len(norm)) for token in range(SHOWN)
        ]  # fmt: skip
    return rows


def _sinks(rows: Sequence[Row]) -> list[Row]:
    """Per KV head: what the first token gets, and the norm of its value against the median of all others'."""
    return [
        {
            "layer": row["layer"], "head": row["head"], "first token's attention": row["attention"],
            "its norm": row["norm"], "median norm": row["median_norm"], "ratio": row["norm"] / row["median_norm"],
        }
        for row in rows if row["token"] == 0
    ]  # fmt: skip


SINK = 0.1
"""A head has a sink where the first token gets more than this from queries on average."""


def _map_findings(rows: Sequence[Row]) -> list[Finding]:
    heads = [row for row in _sinks(rows) if row["first token's attention"] > SINK]
    claim = "where the first token is a sink, the norm of its value is smaller than the median of the others'"
    if not heads:
        return [Finding(claim, None, f"in no KV head does the first token get more than {SINK:.0%} of attention")]
    small = [row["ratio"] for row in heads if row["ratio"] < 1]
    holds = all_of(below(row["ratio"], 1) for row in heads)
    told = f"in {len(small)} of {len(heads)} KV heads with a sink; the median ratio is {median(row['ratio'] for row in heads):.2f}"
    return [Finding(claim, holds, told)]


def _map_plot(figure: Figure, rows: Sequence[Row]) -> None:
    """Two maps of tokens (across) and KV heads (down)."""
    tokens = max(row["token"] for row in rows) + 1
    for axes, name, of in zip(
        figure.subplots(1, 2), ("log10 attention", "norm / median"), (_log_attention, _relative), strict=True
    ):
        values = [of(row) for row in rows]
        grid = [values[at : at + tokens] for at in range(0, len(values), tokens)]
        image = axes.imshow(grid, aspect="auto", cmap="viridis")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("token")
        axes.set_ylabel("KV head, layer by layer")
        axes.grid(visible=False)
        figure.colorbar(image, ax=axes)


def _log_attention(row: Row) -> float:
    return math.log10(max(row["attention"], 1e-8))


def _relative(row: Row) -> float:
    ratio: float = row["norm"] / row["median_norm"]
    return ratio


# -- Table 1 -----------------------------------------------------------------------------------------------------------


def _scores(setup: Setup, policy: str, label: str, **settings: int) -> list[Row]:
    """One row for every task."""
    budget = settings.get("budget")
    shares = recalled(setup, policy, **settings) | {TEXT: faithful(setup, policy, **settings)}
    held = usage(setup, policy, **settings)
    return [
        {"policy": label, "budget": budget, "task": task, "score": round(share, 4), **held} for task, share in shares.items()
    ]


def _task_cells(setup: Setup) -> Iterator[Cell]:
    half = _prompt(setup) // 2
    yield Cell(_NAMES["full"], partial(_scores, policy="full", label="full"))
    settings: dict[str, dict[str, Any]] = {"streaming_llm": {"sinks": SINKS}}
    for policy in ("streaming_llm", *(name for pair in BASES.items() for name in pair)):
        yield Cell(_NAMES[policy], partial(_scores, policy=policy, label=policy, budget=half, **settings.get(policy, {})))


def _over_bases(rows: Sequence[Row]) -> list[Finding]:
    """Where the norm helps, does nothing, or harms: by base, over everything that is measured of both."""
    by = {(row["policy"], row["budget"], row["task"]): row["score"] for row in rows}
    found = []
    for base, ours in BASES.items():
        pairs = [(by[ours, budget, task], score) for (name, budget, task), score in by.items() if name == base]
        above, near = sum(a > b + NEAR for a, b in pairs), sum(abs(a - b) <= NEAR for a, b in pairs)
        half = len(pairs) / 2
        found.append(Finding(
            f"{_NAMES[ours]} is above {_NAMES[base]} in most of what is measured",
            True if above > half else None if above + near > half else False,
            f"above in {above}, within {NEAR} in {near} of {len(pairs)}; on average {fmean(a - b for a, b in pairs):+.4f}",
        ))  # fmt: skip
    return found


def _task_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows), ["policy"], "task", "score")


# -- Figure 3 ----------------------------------------------------------------------------------------------------------


def _ratio_cells(setup: Setup) -> Iterator[Cell]:
    for ratio in setup.size((0.1, 0.2, 0.3, 0.5, 0.7), (0.5,)):
        for policy in (name for pair in BASES.items() for name in pair):
            yield Cell(f"{_NAMES[policy]} at {ratio:g}", partial(_at_ratio, policy=policy, ratio=ratio))


def _at_ratio(setup: Setup, policy: str, ratio: float) -> list[Row]:
    budget = int(ratio * _prompt(setup))
    shares = recalled(setup, policy, budget=budget)
    return [
        {"policy": policy, "budget": budget, "ratio": ratio, "task": task, "score": share} for task, share in shares.items()
    ]


def _ratio_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows), ["policy", "task"], "ratio", "score")


def _ratio_plot(figure: Figure, rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for axes, task in zip(figure.subplots(1, len(tasks)), tasks, strict=True):
        plots.lines(axes, _named([row for row in rows if row["task"] == task]), x="ratio", y="score", by="policy")
        axes.set_title(task, fontsize="medium")


# -- what of that is the norm's ---------------------------------------------------------------------------------------


def _depth_cells(setup: Setup) -> Iterator[Cell]:
    for ratio in setup.size((0.2, 0.5), (0.5,)):
        for policy in (name for pair in BASES.items() for name in pair):
            yield Cell(f"{_NAMES[policy]} at {ratio:g}", partial(_at_depths, policy=policy, ratio=ratio))


def _at_depths(setup: Setup, policy: str, ratio: float) -> list[Row]:
    rows = by_depth(setup, policy, budget=int(ratio * _prompt(setup)))
    return [{"policy": policy, "ratio": ratio, **row} for row in rows]


def _depth_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows), ["policy", "ratio", "task"], "depth", "score")


def _depth_findings(rows: Sequence[Row]) -> list[Finding]:
    """A fact that stands first lies within the tokens that VATP's policies protect, and that their bases do not."""
    by = {(row["policy"], row["ratio"], row["task"], row["depth"]): row["score"] for row in rows}
    found = []
    for base, ours in BASES.items():
        gains = [
            (depth, score - by[base, ratio, task, depth])
            for (policy, ratio, task, depth), score in by.items() if policy == ours
        ]  # fmt: skip
        first, later = (fmean(gain for depth, gain in gains if (depth == 0) == at_first) for at_first in (True, False))
        found.append(Finding(
            f"{_NAMES[ours]} recalls more than {_NAMES[base]} of what lies behind the {SINKS} tokens that it protects",
            None if abs(later) < NEAR else later > 0, f"{later:+.3f} there, {first:+.3f} of what stands first",
        ))  # fmt: skip
    return found


# -- Table 2 -----------------------------------------------------------------------------------------------------------

_NORMS = {"l1": "vatp_h2o", "l2": str(VARIANTS / "vatp_h2o_norm2.kv"), "linf": str(VARIANTS / "vatp_h2o_norminf.kv")}


def _norm_cells(setup: Setup) -> Iterator[Cell]:
    for norm, policy in _NORMS.items():
        yield Cell(norm, partial(_norms, norm=norm, policy=policy))


def _norms(setup: Setup, norm: str, policy: str) -> list[Row]:
    rows = [row for budget in setup.size((128, 256, 512), (80,)) for row in _scores(setup, policy, norm, budget=budget)]
    return [{"norm": row.pop("policy"), **row} for row in rows]


def _norm_findings(rows: Sequence[Row]) -> list[Finding]:
    means = {norm: fmean(row["score"] for row in rows if row["norm"] == norm) for norm in _NORMS}
    told = ", ".join(f"{norm} {value:.4f}" for norm, value in means.items())
    ahead = means["l1"] - max(means["l2"], means["linf"])
    return [Finding("the l1 norm has the highest average", None if abs(ahead) < NEAR else ahead > 0, told)]


def _norm_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(rows, ["budget", "task"], "norm", "score")


# -- Tables 3 and 4 ----------------------------------------------------------------------------------------------------


def _speed(setup: Setup, names: Sequence[str], rates: Sequence[float]) -> list[Row]:
    """Contenders in turns, token by token."""
    from kvdsl.generation.models import windows
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import bench_generate

    length, new_tokens, batch = setup.size((1024, 32, 4), (160, 4, 1))
    ids = windows(setup.tokenizer, setup.text, length, batch)
    wanted = contenders(names, {}, [int(rate * length) for rate in rates], setup.model, setup.backend)
    return bench_generate(setup.model, ids, new_tokens, wanted, repeats=setup.repeats, warmup=1)


def _with_and_without_cells(_: Setup) -> Iterator[Cell]:
    for base, ours in BASES.items():
        yield Cell(_NAMES[base], partial(_speed, names=(base, ours), rates=(0.5,)))


def _budget_cells(_: Setup) -> Iterator[Cell]:
    for ours in BASES.values():
        yield Cell(_NAMES[ours], partial(_speed, names=("full", ours), rates=(0.5, 0.25)))


def _with_and_without_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for base, ours in BASES.items():
        plain, weighed = (next(row for row in rows if row["policy"] == policy) for policy in (base, ours))
        slower = 1 - weighed["vs_first"]
        more = weighed["cache_bytes"] / plain["cache_bytes"] - 1
        claims = ("VATP costs {} less than 5 % of the throughput", "VATP costs {} less than 1 % of the cache's memory")
        speed, memory = (claim.format(_NAMES[base]) for claim in claims)
        found.append(Finding(speed, slower < 0.05, f"{-slower:+.1%}, token by token"))
        found.append(Finding(memory, more < 0.01, f"{more:+.2%}"))
    return found


def _budget_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for ours in BASES.values():
        half, quarter = (row["vs_first"] for row in rows if row["policy"] == ours)
        claim = f"{_NAMES[ours]}: a smaller budget has more throughput, a half over all, a quarter over a half"
        found.append(Finding(claim, quarter > half > 1, f"{half:.2f}x at a half, {quarter:.2f}x at a quarter"))
    return found


def _speed_table(rows: Sequence[Row]) -> list[Row]:
    columns = (
        "policy",
        "budget",
        "tokens_per_s",
        "vs_first",
        "vs_first_q1",
        "vs_first_q3",
        "tpot_ms",
        "peak_bytes",
        "cache_bytes",
    )
    return [{name: row[name] for name in columns} for row in _named(rows)]


PAPER = Paper(
    "vatp", "Attention score is not all you need for token importance indicator in KV cache reduction: value also matters "
    "(Guo et al., 2024)",
    (
        Experiment(
            "figure1", "What the first tokens get of attention, and the l1 norms of their values", "Figure 1", _map_cells,
            says="norms differ between tokens in all layers and heads; sinks have massive attention and norms close to 0.",
            findings=_map_findings, table=_sinks, plot=_map_plot,
        ),
        Experiment(
            "table1", "Tasks at half the cache", "Table 1", _task_cells,
            says="over H2O, VATP is better in 12 of 16 tasks, over Scissorhands in 13 (LLaMA2-7B-chat).",
            findings=_over_bases, table=_task_table,
        ),
        Experiment(
            "figure3", "Facts recalled, by the budget's ratio", "Figure 3", _ratio_cells,
            says="Scissorhands with VATP is best at nearly all ratios; H2O gains mainly at the larger ones (2WikiMultihopQA).",
            findings=_over_bases, table=_ratio_table, plot=_ratio_plot,
        ),
        Experiment(
            "depths", "Facts recalled, by the depth at which they stand", "Figure 3, taken apart", _depth_cells,
            findings=_depth_findings, table=_depth_table,
        ),
        Experiment(
            "table2", "Norms of the value, with H2O's attention", "Table 2", _norm_cells,
            says="averages of 28.00 (l1), 27.70 (l2) and 27.71 (linf).", findings=_norm_findings, table=_norm_table,
        ),
        Experiment(
            "table3", "Throughput and memory with and without the norms, at half the cache", "Table 3", _with_and_without_cells,
            says="103.93 tokens a second with VATP, 104.28 without; the same memory (A6000, batch 12).",
            findings=_with_and_without_findings, table=_speed_table,
        ),
        Experiment(
            "table4", "Throughput by budget", "Table 4", _budget_cells,
            says="1.58x at 50 % and 2.26x at 25 % of the budget (A100).", findings=_budget_findings, table=_speed_table,
        ),
    ),
)  # fmt: skip
