"""Texts of a given length in which something is hidden: sentences of a book, or ones that say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from kvdsl.errors import KvdslError

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""RULER's sentences that say nothing."""

_SENTENCE_END = re.compile(r"(?<=[.!?][\"'”’])\s+|(?<=[.!?])\s+")


def sentences(book: str) -> list[str]:
    """A book's sentences, each on one line."""
    return [" ".join(piece.split()) for piece in _SENTENCE_END.split(book) if piece.strip()]


def from_book(rng: np.random.Generator, book: Sequence[str], count: int) -> list[str]:
    """`count` sentences in their order, from a random one on; a book that ends goes on from its beginning."""
    start = int(rng.integers(len(book)))
    return [book[(start + index) % len(book)] for index in range(count)]


def noise(count: int) -> list[str]:
    """`count` sentences that say nothing."""
    return [NOISE[index % len(NOISE)] for index in range(count)]


def hide(rng: np.random.Generator, hay: Sequence[str], needles: Sequence[str], depth: float | None = None) -> list[str]:
    """The hay with the needles between its sentences: at `depth` (0 to 1), or at places of their own, in the order of the needles."""
    places = [round(depth * len(hay))] * len(needles) if depth is not None else (
        sorted(int(at) for at in rng.integers(0, len(hay) + 1, size=len(needles)))
    )  # fmt: skip
    out, used = [], 0
    for at, needle in zip(places, needles, strict=True):
        out += [*hay[used:at], needle]
        used = at
    return [*out, *hay[used:]]


def fitted(make: Callable[[int], str], tokens: int, count: Callable[[str], int]) -> str:
    """The text of the largest size that has at most `tokens` tokens.

    Args:
        make: a text by its size, 1 or more; a larger size is never shorter.
        count: how many tokens a text has.

    Raises:
        KvdslError: if the smallest is too long.
    """
    if count(make(1)) > tokens:
        raise KvdslError(
            f"{tokens} tokens are too few for this task: it needs at least {count(make(1))}; ask for longer texts"
        )
    low, high = 1, 2
    while count(make(high)) <= tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(make(middle)) <= tokens else (low, middle)
    return make(low)
