"""How far scores that only know what the cache held agree with those of the full cache (RoCo, section 4.3 and figure 2).

A text is fed token by token through a policy that keeps the highest-scored tokens and nothing else, and beside it the same score
is taken from the full cache's attention. After every token that made another one leave, what the policy keeps is compared with
the same number of tokens that rank highest under the full cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.torch.settle import grade
from kvdsl_lab.eval.recording import Recording, record

Row = dict[str, Any]
POLICIES = Path(__file__).with_name("importance")
SCORES = ("aas", "aqas", "ltas", "mas")
PAPERS_ORDER = ("mas", "ltas", "aas", "aqas")
"""From the most consistent to the least, as figure 2 has it."""


class FullScores:
    """What the full cache's attention says of the tokens of one layer, query by query."""

    def __init__(self, like: Tensor) -> None:
        """Nothing has been observed; `like`: any tensor [rows, kv_heads, length]."""
        self._sum, self._above = torch.zeros_like(like), torch.zeros_like(like)

    def observe(self, attn: Tensor) -> dict[str, Tensor]:
        """The scores after one more query.

        Args:
            attn: [rows, kv_heads, tokens], what the newest query gives each token, its own the last.

        Returns:
            Name -> [rows, kv_heads, tokens].
        """
        tokens = attn.shape[-1]
        total, above = self._sum[..., :tokens], self._above[..., :tokens]
        total += attn
        above += attn > attn.mean(-1, keepdim=True)
        seen_by = torch.arange(tokens, 0, -1, device=attn.device)
        return {"aas": total, "aqas": above, "ltas": attn, "mas": total / seen_by}


def jaccard(kept: Tensor, score: Tensor, count: int) -> Tensor:
    """How much a set of `count` tokens has in common with those that score highest, of equals the newer: [rows].

    Args:
        kept: int32 [rows, kv_heads, slots], positions of distinct tokens; -1 is a free slot.
        score: [rows, kv_heads, tokens].
    """
    position = torch.arange(score.shape[-1], device=score.device, dtype=torch.int32).expand_as(score)
    highest = grade(score, position).topk(count, -1).indices
    wanted = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, highest, value=True)
    shared = (wanted.gather(-1, kept.clamp(min=0).long()) & (kept >= 0)).sum(-1)
    return (shared / (2 * count - shared)).double().mean(1)


def slots_at(rate: float, length: int) -> int:
    """The budget in tokens of a rate of the text.

    Raises:
        KvdslError: if it holds nothing, or everything.
    """
    budget = int(rate * length)
    if not 1 <= budget < length:
        raise KvdslError(
            f"a budget rate of {rate:g} keeps {budget} of {length} tokens, so there is nothing to compare; give a rate between 0 and 1"
        )
    return budget


def steps(length: int, scores: Sequence[str], rates: Sequence[float]) -> int:
    """How often `consistencies` ticks."""
    return length * len(scores) * len(rates)


def consistencies(
    model: Any,
    ids: Tensor,
    scores: Sequence[str] = SCORES,
    rates: Sequence[float] = (0.3, 0.4, 0.5, 0.6),
    *,
    backend: str = "auto",
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for every score and rate: `score, budget, tokens, jaccard, jaccard_sd`.

    `budget` is the rate of the text, `tokens` what that is, `jaccard` the mean over tokens, layers, KV heads and stretches, and
    `jaccard_sd` the standard deviation over stretches (None for a single one).

    Args:
        ids: stretches of a text, [rows, length].

    Raises:
        KvdslError: if a score is unknown or a rate compares nothing.
    """
    unknown = [name for name in scores if name not in SCORES]
    if unknown:
        raise KvdslError(f"there is no score `{unknown[0]}`; choose of {', '.join(SCORES)}")
    budgets = {rate: slots_at(rate, ids.shape[1]) for rate in rates}
    runs = [_Run(model, name, rate, budget, backend) for name in scores for rate, budget in budgets.items()]
    ids = ids.to(model.device)
    recordings = record(model, ids)
    full = [FullScores(found.key[..., 0]) for found in recordings]
    with torch.inference_mode():
        for newest in range(ids.shape[1]):
            wanted = [_after(one, found, newest) for one, found in zip(full, recordings, strict=True)]
            for run in runs:
                run.step(ids[:, newest : newest + 1], newest, wanted)
                tick()
    return [run.row() for run in runs]


def _after(scores: FullScores, found: Recording, newest: int) -> dict[str, Tensor]:
    return scores.observe(found.attention(newest, newest + 1)[..., 0, :])


class _Run:
    """One score at one rate: the text so far through its policy, and what it had in common with the full cache."""

    def __init__(self, model: Any, score: str, rate: float, budget: int, backend: str) -> None:
        cache_class: Any = load(POLICIES / f"{score}.kv")
        self.model, self.score, self.rate, self.budget = model, score, rate, budget
        self.cache = cache_class(model, budget=budget, backend=backend)
        self.found: list[Tensor] = []

    def step(self, token: Tensor, newest: int, wanted: Sequence[dict[str, Tensor]]) -> None:
        """Feed the token at `newest`, [rows, 1]; `wanted` has the full cache's scores after it, layer by layer."""
        self.model(input_ids=token, **with_cache(self.cache), use_cache=True, logits_to_keep=1)
        if newest < self.budget:
            return  # nothing has left yet
        each = [
            jaccard(self.cache.positions(layer), scores[self.score], self.budget)
            for layer, scores in zip(self.cache.managed, wanted, strict=True)
        ]
        self.found.append(torch.stack(each).mean(0))

    def row(self) -> Row:
        stretches = torch.stack(self.found).mean(0).tolist()
        return {
            "score": self.score, "budget": self.rate, "tokens": self.budget, "jaccard": round(statistics.fmean(stretches), 4),
            "jaccard_sd": round(statistics.stdev(stretches), 4) if len(stretches) > 1 else None,
        }  # fmt: skip


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether figure 2's order holds, pair by pair of `PAPERS_ORDER`, and at how many of the budgets."""
    by = {(row["score"], row["budget"]): row["jaccard"] for row in rows}
    found = {}
    for better, worse in combinations(PAPERS_ORDER, 2):
        held = [by[better, rate] > by[worse, rate] for name, rate in by if name == better and (worse, rate) in by]
        if held:
            found[f"{better} above {worse}"] = {"holds": all(held), "budgets": len(held), "held": sum(held)}
    return found
