"""Policies as language models feel them: the loss of unseen text, token by token through the cache.

All policies read the same stretches. A difference is a mean over stretches, with the middle 95 % of bootstrap draws; whether a policy
is better than the best seed says a paired test of the stretches (signs flipped at random), at 2.5 % divided by how often that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvdsl_lab.search.store import Store

LEAST = 6
"""Of fewer stretches no test of signs can tell at 2.5 %, and a bootstrap's interval is too narrow."""
DRAWS = 20_000
ALL_SIGNS = 14
"""Stretches up to which the test goes through all signs, and draws none."""
LEVEL = 0.025

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """A policy at a budget.

    Attributes:
        loss: nats a token.
        behind: how much more than the best seed's, the difference's mean and the ends of its interval, None of fewer stretches than
            `LEAST`; less than 0 is better.
        better: whether the paired test says that it is better than the best seed; None of so few stretches that it never could.
        is_seed: whether it is a policy that the search began with.
    """

    name: str
    budget: int
    loss: float
    behind: tuple[float, float | None, float | None]
    better: bool | None
    is_seed: bool


@dataclass(frozen=True)
class Contestant:
    """A policy that is proven.

    Attributes:
        key: what the store knows it by.
        file: a shipped policy's name, or a file.
    """

    name: str
    key: str
    file: str | Path
    is_seed: bool


class Proof:
    """Losses of policies on stretches of a text; what a store knows is not measured again.

    Args:
        ids: the stretches, int64 [stretches, tokens].
        text: what the store calls them.
    """

    def __init__(self, model: Any, ids: Tensor, text: str, store: Store) -> None:
        self._model, self._ids, self._text, self._store = model, ids, text, store

    def measure(self, contestants: Sequence[Contestant], budgets: Sequence[int]) -> None:
        """Policies at every budget, all at once."""
        for budget in budgets:
            todo = [one for one in contestants if self._store.loss(one.key, self._text, budget, len(self._ids) - 1) is None]
            for one, losses in zip(todo, self._losses([one.file for one in todo], budget), strict=True):
                for stretch, loss in enumerate(losses):
                    self._store.prove(one.key, self._text, budget, stretch, loss)

    def _losses(self, files: Sequence[str | Path], budget: int) -> list[list[float]]:
        """Of every policy, of every stretch: nats a token behind the first `budget`."""
        from kvdsl.loading import load
        from kvdsl_lab.eval.perplexity import losses_of_each

        classes: list[Any] = [load(file) for file in files]
        caches = [cache_class(self._model, budget=budget) for cache_class in classes]
        return [
            [float(row[budget:].double().mean()) for row in losses]
            for losses in losses_of_each(self._model, self._ids, caches, 1)
        ]

    def _of_stretches(self, one: Contestant, budget: int) -> Floats:
        """The loss of every stretch, [stretches]: what is one observation, since its tokens share what was evicted."""
        found = [self._store.loss(one.key, self._text, budget, stretch) for stretch in range(len(self._ids))]
        return np.array(found, dtype=np.float64)

    def rows(self, measured: Sequence[Contestant], budgets: Sequence[int]) -> Iterator[Row]:
        """The table of what was measured, the best first within a budget."""
        compared = sum(not one.is_seed for one in measured) * len(budgets)
        for budget in budgets:
            losses = {one: self._of_stretches(one, budget) for one in measured}
            best = min((one for one in measured if one.is_seed), key=lambda one: float(losses[one].mean()))
            rows = [self._row(one, budget, own, losses[best], compared) for one, own in losses.items()]
            yield from sorted(rows, key=lambda row: row.loss)

    @staticmethod
    def _row(one: Contestant, budget: int, own: Floats, best: Floats, compared: int) -> Row:
        difference, rng = own - best, np.random.default_rng(0)
        drawn = rng.choice(difference, size=(DRAWS, len(difference))).mean(1)
        low, high = (float(end) if len(difference) >= LEAST else None for end in np.quantile(drawn, [0.025, 0.975]))
        flipped = _signs(rng, len(difference)) @ difference / len(difference)
        mean, level = float(difference.mean()), LEVEL / max(1, compared)
        better = mean < 0 and float(np.mean(flipped <= mean + 1e-12)) < level
        told = False if one.is_seed else better if 0.5 ** len(difference) < level else None
        return Row(one.name, budget, float(own.mean()), (mean, low, high), told, one.is_seed)


def _signs(rng: np.random.Generator, count: int) -> Floats:
    """Of so many differences all ways to flip their signs, [ways, count], or some of them."""
    if count > ALL_SIGNS:
        return rng.choice([-1.0, 1.0], size=(DRAWS, count))
    return np.array(list(product((-1.0, 1.0), repeat=count)))


def ranks(values: Sequence[float]) -> Floats:
    """The place of each, from 0 on; equal values share the mean of theirs."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return np.array((np.cumsum(sizes) - (sizes + 1) / 2)[group], dtype=np.float64)


def agreement(errors: Mapping[str, float], losses: Mapping[str, float]) -> float | None:
    """How well the judge's errors order policies as their losses do: Spearman's correlation of ranks.

    None of fewer than three policies, or where one side is the same for all.
    """
    names = [name for name in errors if name in losses]
    if len(names) < 3:
        return None
    ours, theirs = (ranks([of[name] for name in names]) for of in (errors, losses))
    if not (np.ptp(ours) and np.ptp(theirs)):
        return None
    return round(float(np.corrcoef(ours, theirs)[0, 1]), 4)
