"""How near the text under a policy is to the full cache's greedy text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy
from kvdsl.generation.report import same_prefix
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.usage import Usage

ROUGE = ("rouge1", "rouge2", "rougeL")
Row = dict[str, Any]


def fidelities(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    new_tokens: int,
    policies: Policies,
    budgets: Sequence[float],
    chunk: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for every policy and budget: `policy, budget, rouge1, rouge2, rougeL, bleu, same_prefix_tokens`, and `Usage.row`.

    Args:
        ids: prompts of equal length, [prompts, length].
    """
    from transformers import DynamicCache

    check_installed()
    policies.release(model)
    wanted = greedy(model, ids, new_tokens, DynamicCache(config=model.config)).tolist()
    tick()
    rows: list[Row] = []
    for name, budget in policies.pairs(budgets):
        cache, usage = policies.make(name, model, budget), Usage()
        found = greedy(model, ids, new_tokens, cache, chunk).tolist()
        usage.see(cache)
        rows.append({"policy": name, "budget": budget, **likeness(tokenizer, found, wanted), **usage.row()})
        tick()
    return rows


def likeness(tokenizer: Any, found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Row:
    """How near texts are to others, text by text: `rouge1, rouge2, rougeL, bleu, same_prefix_tokens`."""
    scores = text_scores([tokenizer.decode(one) for one in found], [tokenizer.decode(one) for one in wanted])
    prefix = statistics.fmean(same_prefix(a, b) for a, b in zip(found, wanted, strict=True))
    return {**scores, "same_prefix_tokens": round(prefix, 2)}


def check_installed() -> None:
    """Raise KvdslError, with what to install, where a scorer is missing."""
    try:
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise KvdslError(f"fidelity needs {error.name}, which is not installed: pip install 'kvdsl[lab]'") from error


def rouge_l(found: str, wanted: str) -> float:
    """The F-measure of the longest common subsequence of words, 0..1."""
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"]).score(wanted, found)["rougeL"].fmeasure)


def text_scores(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F-measures in 0..1 and the corpus' BLEU in 0..100."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    each = [scorer.score(target, prediction) for prediction, target in zip(found, wanted, strict=True)]
    scores = {name: round(statistics.fmean(score[name].fmeasure for score in each), 4) for name in ROUGE}
    return {**scores, "bleu": round(sacrebleu.corpus_bleu(list(found), [list(wanted)]).score, 2)}
