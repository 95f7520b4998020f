"""The order of eviction, against a sort written out."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvdsl.interp.settle import victims
from kvdsl.runtime.settle import Protection, eviction_order, overflow

SCORES = st.sampled_from([0.0, -0.0, 0.25, 1.0, -1.0, math.inf, -math.inf, math.nan])


@st.composite
def heads(draw: st.DrawFn) -> tuple[list[float], list[int], list[bool]]:
    """Scores, positions in any order (-1: free) and protections of up to eight slots."""
    n = draw(st.integers(1, 8))
    position = draw(st.permutations(range(n)))
    free = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    score = draw(st.lists(SCORES, min_size=n, max_size=n))
    protected = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return score, [-1 if gone else p for p, gone in zip(position, free, strict=True)], protected


@settings(max_examples=500, deadline=None)
@given(heads(), st.integers(0, 8))
def test_order_is_the_interpreters(head: tuple[list[float], list[int], list[bool]], leaving: int) -> None:
    score, position, protected = head
    protection = Protection(torch.tensor([[position]], dtype=torch.int32))
    protection.where(torch.tensor([[[protected]]]))
    order = eviction_order(torch.tensor([[[score]]]), protection)[0, 0]
    live = [i for i, p in enumerate(position) if p >= 0]
    assume(live)
    leaving = min(leaving, len(live))
    got = {position[i] for i in range(len(position)) if order[i] < leaving}

    places = np.array([position[i] for i in live], dtype=np.int64)
    chosen = victims(np.array([score[i] for i in live]), np.array([protected[i] for i in live], dtype=bool), places, leaving)
    assert got == {int(p) for p in places[chosen]}


def test_scopes() -> None:
    position = torch.tensor([[[7, -1, 2, 9, 4]]], dtype=torch.int32)
    by = torch.tensor([[[[1.0, 99.0, 3.0, 1.0, math.nan]]]])
    for scope, expected in {
        "first": lambda keep: keep.first(2),
        "last": lambda keep: keep.last(2),
        "top": lambda keep: keep.top(by, 2),
        "where": lambda keep: keep.where(by > 0.5),
    }.items():
        keep = Protection(position)
        expected(keep)
        kept = {"first": {2, 4}, "last": {7, 9}, "top": {2, 9}, "where": {7, 2, 9}}[scope]
        assert {int(p) for p in position[keep.mask]} == kept, scope


def _numbers(**given: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([[[float(value)]]], dtype=torch.float64) for name, value in given.items()}


def test_lazy_pruning() -> None:
    """Algorithm 1 of the Lazy paper: nothing before the trigger, then down to the staged target."""
    live = torch.tensor([[[100]], [[131]], [[132]]])
    lazy = _numbers(capacity=100, trigger=32, slack=24, max_drop=8)
    assert overflow(live, lazy).flatten().tolist() == [0, 0, 8]
    assert overflow(live, _numbers(capacity=100, trigger=32)).flatten().tolist() == [0, 0, 32]
    assert overflow(live, _numbers(capacity=100, trigger=32, slack=16, max_drop=8)).flatten().tolist() == [0, 0, 16]
    assert overflow(live, _numbers(capacity=100, trigger=0)).flatten().tolist() == [0, 0, 0]
