"""The order of eviction, against a sort written out."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvdsl.interp.settle import victims
from kvdsl.runtime.torch.settle import (
    Ballot,
    Protection,
    agreed,
    eviction_order,
    mean_score,
    overflow,
    overflow_before_placing,
    shared_order,
)

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


def test_room_under_a_hard_cap() -> None:
    """One more token must fit into C + slack; if it would not, a prune makes room as if the token were there."""
    live = torch.tensor([[[99]], [[100]], [[104]], [[110]]])
    assert overflow_before_placing(live, _numbers(capacity=100)).flatten().tolist() == [0, 1, 5, 11]
    lazy = _numbers(capacity=100, slack=4, max_drop=3)
    assert overflow_before_placing(live, lazy).flatten().tolist() == [0, 0, 3, 7]


def test_heads_that_agree_rank_by_the_mean() -> None:
    """Two layers of one head: a condition of one holds for both, what a line ranks by is averaged, a NaN stays one."""
    position = torch.tensor([[[0, 1, 2, 3, 4]]], dtype=torch.int32)
    ranked = [torch.tensor([[[[9.0, 0.0, 1.0, 0.0, 0.0]]]]), torch.tensor([[[[0.0, 0.0, 1.0, 8.0, 0.0]]]])]
    conditions = [position.unsqueeze(2) == 1, position.unsqueeze(2) < 0]
    ballots = [Ballot(position) for _ in ranked]
    for ballot, by, condition in zip(ballots, ranked, conditions, strict=True):
        ballot.top(by, 1)
        ballot.where(condition)
        ballot.last(1)
    for own in range(2):
        assert agreed(ballots, own).mask.tolist() == [[[True, True, False, False, True]]]
    score = mean_score([torch.tensor([[[[1.0, math.nan]]]]), 3.0], [position[..., :2]] * 2)
    assert score[0, 0, 0] == 2
    assert score[0, 0, 1].isnan()


@settings(max_examples=300, deadline=None)
@given(st.lists(heads(), min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 9))
def test_heads_that_share_lose_the_lowest_of_all(
    given_heads: list[tuple[list[float], list[int], list[bool]]], floor: int, excess: int
) -> None:
    """Against a sort written out: a head's last `floor` stay; of the others of all heads the least wanted leave first."""
    slots = max(len(score) for score, _, _ in given_heads)
    score, position, protected = (
        torch.tensor([[[*head[part], *[filler] * (slots - len(head[part]))] for head in given_heads]])
        for part, filler in ((0, 0.0), (1, -1), (2, False))
    )
    protection = Protection(position.int())
    protection.where(protected.unsqueeze(2))
    order = shared_order(score.unsqueeze(2), protection, torch.full((1, 1, 1), float(floor)))
    willing = []
    for head, (values, places, marks) in enumerate(given_heads):
        newest, own = max(places), []
        for value, place, marked in zip(values, places, marks, strict=True):
            worth = (0, 0.0) if math.isnan(value) else (1, value)
            own.append(((1 + (place == newest)) * marked, *worth, place, head))
        live = sorted(one for one in own if one[-2] >= 0)
        willing += live[: max(0, len(live) - floor)]
    excess = min(excess, len(willing))
    expected = {(head, place) for *_, place, head in sorted(willing)[:excess]}
    assert {(h, int(position[0, h, s])) for _, h, s in (order < excess).nonzero().tolist()} == expected
