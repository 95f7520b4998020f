"""What a policy forgets: pass-keys and named numbers hidden in a text, asked for at its end.

The tasks are those of `kvdsl_lab.assets.retrieval`, in whose words the reference model was trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy
from kvdsl.generation.models import encode
from kvdsl_lab.assets.retrieval import Recall, key_values, lay_out, pass_key
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.usage import Usage

TASKS = ("pass-key", "key-value")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Row = dict[str, Any]


@dataclass(frozen=True)
class Trials:
    """Prompts of equal length about one task at one depth, and their answers.

    Attributes:
        new_tokens: as many as the longest answer has, encoded by itself, where some tokenizers put a space before it.
    """

    task: str
    depth: float
    prompts: Tensor
    answers: tuple[str, ...]
    new_tokens: int
    tokenizer: Any


def make_task(name: str, rng: np.random.Generator, depth: float, pairs: int) -> Recall:
    """A task whose asked-for fact stands at `depth`."""
    if name == "pass-key":
        return pass_key(rng, depth)
    task = key_values(rng, pairs, asked=1)
    subject = task.questions[0][0].strip()
    return replace(task, facts=tuple((depth if subject in text else at, text) for at, text in task.facts))


def make_trials(tokenizer: Any, text: str, length: int, count: int, seed: int = 0, pairs: int = 8) -> list[Trials]:
    """`count` trials for every task and depth.

    Raises:
        KvdslError: if the text or the prompt is too short.
    """
    rng = np.random.default_rng(seed)
    ids = encode(tokenizer, text)
    if len(ids) < length:
        raise KvdslError(
            f"the text has {len(ids)} tokens, fewer than the {length} of a prompt; give a longer text or shorter prompts"
        )
    cached = lru_cache(4096)(lambda piece: tuple(encode(tokenizer, piece)))
    try:
        return [
            _trials(name, depth, rng, ids, length, count, pairs, cached, tokenizer) for name in TASKS for depth in DEPTHS
        ]
    except ValueError as error:
        raise KvdslError(f"{error}; ask for longer prompts") from error


def _trials(
    name: str, depth: float, rng: np.random.Generator, ids: list[int], length: int, count: int, pairs: int,
    cached: Callable[[str], Sequence[int]], tokenizer: Any,
) -> Trials:  # fmt: skip
    prompts, answers = [], []
    for _ in range(count):
        task = make_task(name, rng, depth, pairs)
        start = int(rng.integers(0, len(ids) - length + 1))
        prompts.append(lay_out(task, ids[start : start + length], length, cached, tokenizer.bos_token_id, answered=False))
        answers.append(task.questions[-1][1])
    longest = max(len(cached(answer)) for answer in answers)
    return Trials(name, depth, torch.tensor(prompts), tuple(answers), longest, tokenizer)


def accuracy(
    model: Any, trials: Trials, make_cache: Callable[[], Any], chunk: int | None, batch: int = 10, usage: Usage | None = None
) -> float:
    """Share of answers that greedy decoding gives in full; `usage` sees the caches."""
    right: list[bool] = []
    for at in range(0, len(trials.answers), batch):
        cache = make_cache()
        found = greedy(model, trials.prompts[at : at + batch], trials.new_tokens, cache, chunk).tolist()
        if usage is not None:
            usage.see(cache)
        right += [
            trials.tokenizer.decode(row).lstrip().startswith(answer)
            for row, answer in zip(found, trials.answers[at : at + batch], strict=True)
        ]
    return statistics.fmean(right)


def retrievals(
    model: Any,
    trials: Sequence[Trials],
    policies: Policies,
    budgets: Sequence[float],
    chunk: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for every policy, budget and task: `policy, budget, task, accuracy`, the accuracies by depth, and `Usage.row`."""
    rows: list[Row] = []
    for name, budget in policies.pairs(budgets):
        for task in dict.fromkeys(one.task for one in trials):
            shares: dict[float, float] = {}
            usage = Usage()
            for one in (found for found in trials if found.task == task):
                shares[one.depth] = accuracy(model, one, lambda: policies.make(name, model, budget), chunk, usage=usage)  # noqa: B023
                tick()
            mean = round(statistics.fmean(shares.values()), 4)
            rows.append({
                "policy": name, "budget": budget, "task": task, "accuracy": mean,
                "depths": list(shares), "by_depth": [round(share, 4) for share in shares.values()], **usage.row(),
            })  # fmt: skip
    return rows
