"""RoCo: how consistent importance scores are, which scope protects better, and what policies cost in quality.

The paper's texts are summaries and answers of chat models; ours are what the model goes on to write. Greedy text under a policy
is compared with the full cache's: continuations of prompts that were encoded under eviction (for its summaries), passages that are
begun again and copied from what is left of them (context reconstruction), and long texts from short prompts, where only
decoding evicts (instructions). Prompts are encoded eight tokens at a time, which its Tables 6 and 9 find to cost little.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdsl_lab.reproduce import plots, tables
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Paper, Row, Setup, all_of, below

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

POLICIES = ("random", "streaming_llm", "scissorhands", "h2o", "tova", "roco")
ATTENTION = ("scissorhands", "h2o", "roco")
"""Those of the attention-based policies that the paper finds above Random and StreamLLM in every table."""
VARIANTS = Path(__file__).with_name("variants")
BLOCK = 8
SCORES = ("bleu", "rouge1", "rouge2", "rougeL")
_NAMES = {
    "random": "Random", "streaming_llm": "StreamLLM", "scissorhands": "ScissorHands", "h2o": "H2O", "tova": "TOVA", "roco": "RoCo",
    "full": "full cache", "aas": "AAS", "aqas": "AQAS", "ltas": "LTAS", "mas": "MAS", "window_scope": "local window",
    "roco_prompt": "standard deviation",
}  # fmt: skip


def _policy(setup: Setup, name: str | Path, **given: float) -> Any:
    """A fresh cache."""
    from kvdsl.loading import load

    made: Any = load(name)
    return made(setup.model, backend=setup.backend, **given)


def _named(rows: Sequence[Row], column: str) -> list[Row]:
    return [{**row, column: _NAMES[row[column]]} for row in rows]


# -- Figure 2: consistency ---------------------------------------------------------------------------------------------


@lru_cache(1)
def _stretches(setup: Setup) -> Tensor:
    from kvdsl.generation.models import windows

    return windows(setup.tokenizer, setup.text, setup.size(512, 48), setup.size(4, 1))


def _consistency_cells(setup: Setup) -> Iterator[Cell]:
    for score in ("mas", "ltas", "aas", "aqas"):
        yield Cell(_NAMES[score], partial(_consistency, score=score))


def _consistency(setup: Setup, score: str) -> list[Row]:
    from kvdsl_lab.eval.consistency import consistencies

    rates = setup.size((0.3, 0.4, 0.5, 0.6), (0.3, 0.6))
    return consistencies(setup.model, _stretches(setup), [score], rates, backend=setup.backend)


def _consistency_findings(rows: Sequence[Row]) -> list[Finding]:
    from kvdsl_lab.eval.consistency import findings

    told = [
        Finding(
            claim.upper().replace(" ABOVE ", " is above "), one["holds"], f"at {one['held']} of {one['budgets']} budgets"
        )
        for claim, one in findings(rows).items()
    ]
    lowest = min((row["budget"], row["jaccard"]) for row in rows if row["score"] == "mas")
    return [
        *told,
        Finding("MAS has more than 0.9 at the lowest budget", lowest[1] > 0.9, f"{lowest[1]:.3f} at {lowest[0]:g}"),
    ]


def _consistency_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows, "score"), ["score"], "budget", "jaccard")


def _consistency_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows, "score"), x="budget", y="jaccard", by="score")


# -- Figure 3: persistence ---------------------------------------------------------------------------------------------

_AGES = (2, 4, 8, 16, 32, 64, 128, 256)


def _persistence_cells(_: Setup) -> Iterator[Cell]:
    yield Cell("every layer and KV head", _persistence)


def _persistence(setup: Setup) -> list[Row]:
    from kvdsl_lab.eval.persistence import lives

    life = setup.size(256, 32)
    rows = lives(setup.model, _stretches(setup), life)
    return [_at_ages(row, [age for age in _AGES if age <= life]) for row in rows]


def _at_ages(row: Row, ages: Sequence[int]) -> Row:
    """A row whose curve is given at a few ages."""
    curve = {f"after {age}": row["curve"][age - 1] for age in ages}
    return {name: value for name, value in row.items() if name != "curve"} | curve


def _persistence_findings(rows: Sequence[Row]) -> list[Finding]:
    from kvdsl_lab.eval.persistence import findings

    found = findings(rows).items()
    return [Finding(claim, one["holds"], f"in {one['held']} of {one['heads']} KV heads") for claim, one in found]


def _persistence_plot(figure: Figure, rows: Sequence[Row]) -> None:
    points = [
        {"layer": f"layer {row['layer']}, head {row['head']}", "queries": int(name.split()[1]), "deviation": value}
        for row in rows if row["head"] == 0 for name, value in row.items() if name.startswith("after ")
    ]  # fmt: skip
    plots.lines(figure.subplots(), points, x="queries", y="deviation", by="layer", log_x=True)


# -- text against the full cache's -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is written.

    Attributes:
        copied: whether the prompt's passage begins once more at its end.
        prompt, new, prompts: tokens of a prompt and after it, and how many prompts.
    """

    prompt: int
    new: int
    prompts: int
    copied: bool = False


def _continuation(setup: Setup) -> Task:
    return setup.size(Task(512, 64, 16), Task(48, 8, 2))


def _reconstruction(setup: Setup) -> Task:
    return setup.size(Task(384, 64, 16, copied=True), Task(48, 8, 2, copied=True))


def _answer(setup: Setup) -> Task:
    return setup.size(Task(32, 256, 16), Task(16, 24, 2))


CUE = 16
"""Tokens of a passage that are repeated before the model goes on to copy."""


@lru_cache(4)
def _prompts(setup: Setup, task: Task) -> Tensor:
    import torch

    from kvdsl.generation.models import windows

    if not task.copied:
        return windows(setup.tokenizer, setup.text, task.prompt, task.prompts)
    passages = windows(setup.tokenizer, setup.text, task.prompt - CUE, task.prompts)
    begins = 0 if setup.tokenizer.bos_token_id is None else 1
    return torch.cat([passages, passages[:, begins : begins + CUE]], 1)


@lru_cache(4)
def _full_text(setup: Setup, task: Task) -> list[list[int]]:
    from transformers import DynamicCache

    from kvdsl.generation.generate import greedy

    found: list[list[int]] = greedy(
        setup.model, _prompts(setup, task), task.new, DynamicCache(config=setup.model.config)
    ).tolist()
    return found


def _scores(setup: Setup, task: Task, cache: Any, block: int) -> Row:
    from kvdsl.generation.generate import greedy
    from kvdsl_lab.eval.fidelity import likeness
    from kvdsl_lab.eval.usage import Usage

    found, usage = greedy(setup.model, _prompts(setup, task), task.new, cache, block).tolist(), Usage()
    usage.see(cache)
    return likeness(setup.tokenizer, found, _full_text(setup, task)) | usage.row()


def _while_prompting(setup: Setup, task: Task, policy: str) -> list[Row]:
    cache = _policy(setup, VARIANTS / f"{policy}_prompt.kv", budget=task.prompt // 2)
    return [{"policy": policy, "tokens": task.prompt // 2, **_scores(setup, task, cache, BLOCK)}]


def _while_decoding(setup: Setup, task: Task, policy: str) -> list[Row]:
    budget = (task.prompt + task.new) // 2
    return [{"policy": policy, "tokens": budget, **_scores(setup, task, _policy(setup, policy, budget=budget), BLOCK)}]


def _summary_cells(setup: Setup) -> Iterator[Cell]:
    for policy in POLICIES:
        yield Cell(_NAMES[policy], partial(_while_prompting, task=_continuation(setup), policy=policy))


def _reconstruction_cells(setup: Setup) -> Iterator[Cell]:
    for policy in POLICIES:
        yield Cell(_NAMES[policy], partial(_while_prompting, task=_reconstruction(setup), policy=policy))


def _answer_cells(setup: Setup) -> Iterator[Cell]:
    for policy in POLICIES:
        yield Cell(_NAMES[policy], partial(_while_decoding, task=_answer(setup), policy=policy))


def _text_findings(rows: Sequence[Row]) -> list[Finding]:
    by = {row["policy"]: row for row in rows}
    ours, others = by["roco"], [row for row in rows if row["policy"] != "roco"]
    best = [name for name in SCORES if ours[name] > max(row[name] for row in others)]
    second = max(others, key=lambda row: row["bleu"])
    attentive = min((by[name] for name in ATTENTION), key=lambda row: row["bleu"])
    blind = max((by[name] for name in ("random", "streaming_llm")), key=lambda row: row["bleu"])
    return [
        Finding(
            "RoCo is nearest to the full cache's text by BLEU and every ROUGE", len(best) == len(SCORES),
            f"best by {len(best)} of {len(SCORES)}; BLEU {ours['bleu']:.1f}, {_NAMES[second['policy']]} {second['bleu']:.1f}",
        ),
        Finding(
            "RoCo, H2O and ScissorHands are above Random and StreamLLM by BLEU", attentive["bleu"] > blind["bleu"],
            f"{_NAMES[attentive['policy']]} {attentive['bleu']:.1f}, {_NAMES[blind['policy']]} {blind['bleu']:.1f}",
        ),
    ]  # fmt: skip


def _text_table(rows: Sequence[Row]) -> list[Row]:
    return _named(rows, "policy")


# -- Figure 4: scopes --------------------------------------------------------------------------------------------------


def _scope_cells(setup: Setup) -> Iterator[Cell]:
    for share in setup.size((0.1, 0.3, 0.5, 0.7, 0.9), (0.3, 0.7)):
        for policy in ("window_scope", "roco_prompt"):
            yield Cell(f"{_NAMES[policy]}, {share:.0%} protected", partial(_scope, policy=policy, share=share))


def _scope(setup: Setup, policy: str, share: float) -> list[Row]:
    task = _continuation(setup)
    budget = task.prompt // 2
    cache = _policy(setup, VARIANTS / f"{policy}.kv", budget=budget, protect=int(share * budget))
    scores = _scores(setup, task, cache, BLOCK)
    mean = statistics.geometric_mean([max(scores[name], 1e-9) for name in ("rouge1", "rouge2", "rougeL")])
    return [{"scope": policy, "protected": share, "rouge": round(mean, 4), **scores}]


def _scope_findings(rows: Sequence[Row]) -> list[Finding]:
    window, deviation = ([row["rouge"] for row in rows if row["scope"] == name] for name in ("window_scope", "roco_prompt"))
    above = sum(ours > theirs for ours, theirs in zip(deviation, window, strict=True))
    spread = [max(values) - min(values) for values in (deviation, window)]
    return [
        Finding("the scope by standard deviation is better at every size", above == len(window), f"at {above} of {len(window)} sizes"),
        Finding(
            "it is less sensitive to its size", spread[0] < spread[1],
            f"best minus worst: {spread[0]:.3f}, local window {spread[1]:.3f}",
        ),
    ]  # fmt: skip


def _scope_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows, "scope"), ["protected"], "scope", "rouge")


def _scope_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows, "scope"), x="protected", y="rouge", by="scope")


# -- Figure 5: perplexity ----------------------------------------------------------------------------------------------


def _perplexity_cells(setup: Setup) -> Iterator[Cell]:
    yield Cell("full cache", partial(_perplexity, policy="full", rate=None))
    for rate in setup.size((0.1, 0.15, 0.3, 0.5, 0.7), (0.3,)):
        for policy in POLICIES:
            yield Cell(f"{_NAMES[policy]} at {rate:g}", partial(_perplexity, policy=policy, rate=rate))


def _perplexity(setup: Setup, policy: str | Path, rate: float | None) -> list[Row]:
    import math

    from kvdsl_lab.eval.perplexity import token_losses
    from kvdsl_lab.eval.usage import Usage

    ids = _stretches(setup)
    given = {} if rate is None else {"budget": int(rate * ids.shape[1])}
    cache, usage = _policy(setup, policy, **given), Usage()
    losses = token_losses(setup.model, ids, cache, 1)
    usage.see(cache)
    return [
        {"policy": Path(policy).stem, "rate": rate, "ppl": round(math.exp(float(losses.double().mean())), 4), **usage.row()}
    ]


def _perplexity_findings(rows: Sequence[Row]) -> list[Finding]:
    by = {(row["policy"], row["rate"]): row["ppl"] for row in rows if row["rate"] is not None}
    rates = sorted({rate for _, rate in by})
    found = []
    for other in POLICIES[:-1]:
        verdicts = [below(by["roco", rate], by[other, rate]) for rate in rates]
        told = ", ".join(f"{by['roco', rate]:.4g} against {by[other, rate]:.4g} at {rate:g}" for rate in rates)
        holds = all_of([*verdicts, *([None] if len(rates) == 1 else [])])  # one rate cannot tell of every one
        found.append(Finding(f"RoCo is below {_NAMES[other]} at every rate", holds, told))
    return found


def _perplexity_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(_named(rows, "policy"), ["policy"], "rate", "ppl")


def _perplexity_plot(figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(figure.subplots(), _named(rows, "policy"), x="rate", y="ppl", by="policy")


# -- Figure 5: score and scope apart -----------------------------------------------------------------------------------

CROSSED: dict[tuple[str, str], str | Path] = {
    ("mean", "deviation"): "roco", ("mean", "last tokens"): VARIANTS / "mean_window.kv",
    ("sum", "deviation"): VARIANTS / "sum_deviation.kv", ("sum", "last tokens"): "h2o",
}  # fmt: skip
"""RoCo and H2O, and what has the score of one and the scope of the other."""


def _crossed_cells(setup: Setup) -> Iterator[Cell]:
    for rate in setup.size((0.1, 0.5), (0.3,), (0.5,)):
        for score, scope in CROSSED:
            yield Cell(f"{score}, {scope} at {rate:g}", partial(_crossed, score=score, scope=scope, rate=rate))


def _crossed(setup: Setup, score: str, scope: str, rate: float) -> list[Row]:
    return [{**row, "score": score, "scope": scope} for row in _perplexity(setup, CROSSED[score, scope], rate)]


def _crossed_table(rows: Sequence[Row]) -> list[Row]:
    return tables.pivot(rows, ["rate", "score"], "scope", "ppl")


# -- Tables 6 and 9: blocks --------------------------------------------------------------------------------------------


def _block_cells(setup: Setup) -> Iterator[Cell]:
    for block in setup.size((2, 4, 8, 16), (2, 8)):
        yield Cell(f"blocks of {block}", partial(_blocks, block=block))


def _blocks(setup: Setup, block: int) -> list[Row]:
    """What the text and the time of a prompt in blocks are; times in turns with a prompt that comes token by token.

    What evicts while it reads a prompt takes single tokens for decoded ones, so that nothing is evicted there.
    """
    from kvdsl_lab.bench import measure

    task = _continuation(setup)
    cache = _policy(setup, VARIANTS / "roco_prompt.kv", budget=task.prompt // 2)
    scores = _scores(setup, task, cache, block)
    timed = [(_prompt_ms(setup, 1), _prompt_ms(setup, block)) for _ in range(setup.repeats)]
    ones, ours = (list(times) for times in zip(*timed, strict=True))
    return [
        {"block": block, **scores, **measure.summary("ms", ours), **measure.summary("speedup", measure.ratios(ones, ours))}
    ]


def _prompt_ms(setup: Setup, block: int) -> float:
    import time

    from kvdsl.generation.generate import feed

    ids = _prompts(setup, _continuation(setup))[:1, : setup.size(128, 24)]
    cache = _policy(setup, VARIANTS / "roco_prompt.kv", budget=ids.shape[1] // 2)
    begun = time.perf_counter()
    feed(setup.model, ids.to(setup.model.device), cache, block).tolist()
    return (time.perf_counter() - begun) * 1e3


def _block_findings(rows: Sequence[Row]) -> list[Finding]:
    smallest, largest = rows[0], rows[-1]
    faster = all(more["speedup"] > less["speedup"] for less, more in pairwise(rows))
    return [
        Finding(
            f"blocks of {largest['block']} cost at most 2 points of BLEU", smallest["bleu"] - largest["bleu"] <= 2,
            f"{smallest['bleu']:.1f} in blocks of {smallest['block']}, {largest['bleu']:.1f}",
        ),
        Finding(
            "larger blocks are faster (the paper counts steps, here it is time)", faster,
            ", ".join(f"{row['block']}: {row['speedup']:.1f}x" for row in rows),
        ),
    ]  # fmt: skip


def _block_table(rows: Sequence[Row]) -> list[Row]:
    columns = ("block", "bleu", "rouge2", "ms", "ms_q1", "ms_q3", "speedup", "speedup_q1", "speedup_q3")
    return [{name: row[name] for name in columns} for row in rows]


PAPER = Paper(
    "roco", "On the efficacy of eviction policy for key-value constrained generative language model inference (Ren and Zhu, 2024)",
    (
        Experiment(
            "figure2", "Jaccard consistency of scores with their full-cache versions", "Figure 2", _consistency_cells,
            says="MAS is above LTAS, LTAS above AAS, AAS above AQAS; MAS has over 0.9 at a budget of 0.3.",
            findings=_consistency_findings, table=_consistency_table, plot=_consistency_plot,
        ),
        Experiment(
            "figure3", "Deviation of the attention that a token receives, by the queries that saw it", "Figure 3", _persistence_cells,
            says="it rises briefly, for many tokens no more than 50 steps, then declines steadily, in every layer and head.",
            findings=_persistence_findings, plot=_persistence_plot,
        ),
        Experiment(
            "figure4", "Mean attention with a local window and with a scope by deviation, by the share that is protected (geometric "
            "mean of ROUGE-1, 2 and L)", "Figure 4", _scope_cells,
            says="the scope by deviation is better, and less sensitive to its size.",
            findings=_scope_findings, table=_scope_table, plot=_scope_plot,
        ),
        Experiment(
            "figure5", "Perplexity against the budget's rate, token by token", "Figure 5", _perplexity_cells,
            says="RoCo is lowest at every rate; H2O is 0.2 above it at 0.15.",
            findings=_perplexity_findings, table=_perplexity_table, plot=_perplexity_plot,
        ),
        Experiment(
            "crossed", "Perplexity with the score of one and the scope of the other, of RoCo and H2O", "Figure 5, taken apart",
            _crossed_cells, table=_crossed_table,
        ),
        Experiment(
            "table2", "Continuations of prompts encoded at half the cache, against the full cache's", "Table 2 (and 7)", _summary_cells,
            says="RoCo 43.4 BLEU, H2O 37.3, ScissorHands 29.3, TOVA 20.5, Random 16.7, StreamLLM 11.9 (XSum, LLaMa2-7B-Chat).",
            findings=_text_findings, table=_text_table,
        ),
        Experiment(
            "table3", "Passages copied from half the cache, against the full cache's copy", "Table 3", _reconstruction_cells,
            says="RoCo 28.1 BLEU, H2O 20.8, ScissorHands 16.9, StreamLLM 15.1, TOVA 11.2, Random 4.9 (LLaMa2-7B-Chat).",
            findings=_text_findings, table=_text_table,
        ),
        Experiment(
            "table4", "Long texts from short prompts, eviction while decoding only", "Table 4", _answer_cells,
            says="RoCo 66.3 BLEU, H2O 63.0, ScissorHands 62.1, TOVA 60.1, StreamLLM 47.3, Random 45.6 (LLaMa2-7B-Chat).",
            findings=_text_findings, table=_text_table,
        ),
        Experiment(
            "table6", "RoCo's prompts in blocks: text and time", "Tables 6 and 9", _block_cells,
            says="blocks of 16 cost one point of BLEU (41.2 to 40.2) or none (Zephyr), and take a sixteenth of the steps.",
            findings=_block_findings, table=_block_table,
        ),
    ),
)  # fmt: skip
