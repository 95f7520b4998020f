"""Named numbers in a book, by the depth at which the one that is asked for stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdsl_lab.leaderboard import haystacks
from kvdsl_lab.leaderboard.questions import Question
from kvdsl_lab.leaderboard.ruler import Material

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
PLACES = (
    "lighthouse", "harbour", "library", "castle", "garden", "station", "museum", "bakery", "chapel", "mill", "tower", "market", "theatre",
    "school", "bridge", "vineyard",
)  # fmt: skip


def depth_of(number: int) -> float:
    """How deep the code of an item stands, 0 (first) to 1 (last)."""
    return DEPTHS[number % len(DEPTHS)]


def fact(material: Material, number: int, among: int = 1) -> Question:
    """One of `among` secret codes of five digits, hidden in pages of a book; the item's number says how deep it stands."""
    rng, depth = material.rng, depth_of(number)
    places = [str(place) for place in rng.permutation(PLACES)[:among]]
    codes = [str(rng.integers(10**4, 10**5)) for _ in places]
    said = [f"The secret code of the {place} is {code}." for place, code in zip(places, codes, strict=True)]
    seed = int(rng.integers(2**32))
    text = material.fitted(lambda size: _hidden(seed, material.book, size, said, depth))
    return Question(
        text, f"What is the secret code of the {places[0]}?", f"The secret code of the {places[0]} is", [codes[0]], 12, depth, said[0]
    )  # fmt: skip


def _hidden(seed: int, book: Sequence[str], size: int, said: Sequence[str], depth: float) -> str:
    """Sentences of the book with the first code at `depth` and the others anywhere."""
    rng = np.random.default_rng(seed)
    hay = haystacks.hide(rng, haystacks.from_book(rng, book, size), [said[0]], depth)
    return " ".join(haystacks.hide(rng, hay, said[1:]))
