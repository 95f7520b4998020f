"""Ranks: places in an order, of a KV head's slots or of a page's, in the interpreter and on torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvdsl.interp.evaluate import Scope, evaluate_slots, per_slot
from kvdsl.ir.nodes import Input, Rank
from kvdsl.runtime.torch.view import View

NAN, INF = float("nan"), float("inf")


def ranks(values: Sequence[float], position: Sequence[int], page: int | None = None) -> list[float]:
    """Of slots at these places in the text."""
    inputs = {"position": per_slot(position), "age": per_slot(values)}
    within = "all" if page is None else "page"
    scope = Scope(len(values), 1, inputs, {}, page=page or 1)
    return evaluate_slots(Rank(body=Input(name="age"), within=within), scope).tolist()


def on_torch(values: Sequence[float], position: Sequence[int], page: int | None = None) -> list[float]:
    """The same, of one row and KV head; a free slot has a negative place."""
    place = torch.tensor(position, dtype=torch.int32).view(1, 1, 1, -1)
    nothing = torch.zeros(1, 1, len(values), 1)
    view = View(
        visible=place >= 0, slot_position=place, query_position=place.amax(-1, keepdim=True)[:, 0], live=torch.zeros(1),
        window=None, numbers={"page": torch.full((1, 1, 1, 1), float(page or 1))}, columns={}, key=nothing, value=nothing,
        group="mean", random_key=(0, 0, 0),
    )  # fmt: skip
    x = torch.tensor(values).view(1, 1, 1, -1)
    found = view.rank(x) if page is None else view.rank_in_page(x)
    return found[place >= 0].tolist()


@pytest.mark.parametrize("rank", [ranks, on_torch])
def test_the_order_is_that_of_scores(rank: object) -> None:
    """NaN lowest, -0 as +0, of equals the older first, wherever their slots lie."""
    assert rank([3, NAN, -INF, 0.0, -0.0, INF], [5, 4, 3, 1, 2, 0]) == [4, 0, 1, 2, 3, 5]  # type: ignore[operator]
    assert rank([2, 2, 2], [7, 1, 4]) == [2, 0, 1]  # type: ignore[operator]


@pytest.mark.parametrize("rank", [ranks, on_torch])
def test_within_a_page_only_its_slots_count(rank: object) -> None:
    """Pages of four tokens, of which some have left."""
    values, position = [9, 1, 5, 5, NAN, 0, 7], [0, 3, 8, 4, 9, 7, 1]
    assert rank(values, position, 4) == [2, 0, 1, 1, 0, 0, 1]  # type: ignore[operator]


def test_free_slots_have_no_rank() -> None:
    assert on_torch([5, -9, 3, 4], [0, -1, 1, 2]) == [2, 0, 1]
    assert on_torch([5, -9, 3, 4], [0, -1, 1, 2], 2) == [1, 0, 0]


def test_any_order() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        values, position = random.integers(0, 5, 30).tolist(), random.permutation(90)[:30].tolist()
        for page in (None, 1, 7, 100):
            assert ranks(values, position, page) == on_torch(values, position, page)
            own = range(30) if page is None else None
            expected = [
                sum(
                    (values[b], position[b]) < (values[a], position[a])
                    for b in range(30)
                    if own or position[b] // (page or 1) == position[a] // (page or 1)
                )
                for a in range(30)
            ]
            assert ranks(values, position, page) == expected
