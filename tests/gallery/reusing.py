"""The gallery's methods whose layers take over what others choose, by brute force: what layers choose, by each paper's formula.

Nothing in here knows the language or the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.interp.brute import Cache

Heads = Sequence[Cache]
"""The KV heads of a layer."""


@dataclass(frozen=True)
class Reusing:
    """A method with the numbers that a test gives it.

    Attributes:
        chooses: the tokens, by KV head or, where each chooses for itself, by query head, that a layer chooses for a decoded token.
        layers: those that choose.
        group: the query heads that share a KV head.
    """

    chooses: Callable[[Heads, int], list[list[int]]]
    layers: tuple[int, ...]
    given: dict[str, float] = field(default_factory=dict)
    prompt: int = 12
    group: int = 1


def scores(head: Cache, token: int) -> list[dict[int, float]]:
    """Of each query head, what it scores the cached tokens."""
    return [{one: float(query @ head.k[one]) / float(np.sqrt(len(query))) for one in head.kept} for query in head.q[token]]


def highest(score: dict[int, float], count: int) -> list[int]:
    """So many tokens, the highest first."""
    return sorted(score, key=lambda token: -score[token])[:count]


def tidaldecode(heads: Heads, token: int, count: int = 5) -> list[list[int]]:
    """Every query head's top k."""
    return [sorted(highest(score, count)) for head in heads for score in scores(head, token)]


def omnikv(heads: Heads, token: int, prompt: int = 12, count: int = 4) -> list[list[int]]:
    """Of the prompt the top k by the maximum over all query heads, and all that was generated."""
    asked = [score for head in heads for score in scores(head, token)]
    best = {one: max(score[one] for score in asked) for one in range(prompt)}
    chosen = sorted([*highest(best, count), *range(prompt, token + 1)])
    return [chosen for _ in heads]


def less_is_more(heads: Heads, token: int, tokens: int = 7, share: float = 0.3) -> list[list[int]]:
    """The top k of every query head but for the recent tokens, united place by place, the first k of these; and the recent ones."""
    middle = int(tokens * (1 - share))
    recent = range(token + 1 - (tokens - middle), token + 1)
    asked = [score for head in heads for score in scores(head, token)]
    best = [highest({one: score[one] for one in score if one not in recent}, middle) for score in asked]
    united = list(dict.fromkeys(own[place] for place in range(middle) for own in best))
    chosen = sorted([*united[:middle], *recent])
    return [chosen for _ in heads]


REUSING: dict[str, Reusing] = {
    "tidaldecode": Reusing(tidaldecode, (1, 3), {"tokens": 5, "start": 1, "again": 3}, group=2),
    "less_is_more": Reusing(less_is_more, (1, 3), {"tokens": 7, "share": 0.3, "start": 1, "again": 3}, group=3),
    "omnikv": Reusing(omnikv, (0, 2, 4), {"share": 0.4, "first": 0, "second": 2, "third": 4}, group=2),
}
"""The gallery's policies by stem."""
