"""Rings, pages and pools against loops over slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdsl.runtime.torch import neighbours, pages, rings

VALUES = st.sampled_from([0.0, 1.0, -2.0, 3.5, 7.0, math.nan, math.inf, -math.inf])


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[float], list[bool]]:
    """Positions of up to nine slots in any order (-1: free), with gaps; a value and a mark each."""
    n = draw(st.integers(1, 9))
    places = draw(st.permutations(range(0, 2 * n)))[:n]
    free = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    values = draw(st.lists(VALUES, min_size=n, max_size=n))
    marks = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return [-1 if gone else place for gone, place in zip(free, places, strict=True)], values, marks


def same(got: list[float], expected: list[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(got, expected, strict=True))


@settings(max_examples=400, deadline=None)
@given(texts(), st.sampled_from(["max", "mean"]), st.sampled_from([0, 1, 2, 3, 5.9, 100]))
def test_pools(text: tuple[list[int], list[float], list[bool]], op: str, size: float) -> None:
    position, values, marks = text
    apart = [place < 0 or mark for place, mark in zip(position, marks, strict=True)]
    got = neighbours.pool(
        op,
        torch.tensor([[values]]),
        torch.tensor([[position]], dtype=torch.int32),
        torch.tensor([[apart]]),
        torch.tensor(size),
    )[0, 0]
    order = sorted((place, slot) for slot, place in enumerate(position) if not apart[slot])
    expected = list(values)
    for rank, (_, slot) in enumerate(order):
        radius = max(1, int(size)) // 2
        near = [values[other] for _, other in order[max(0, rank - radius) : rank + radius + 1]]
        fold = max(near) if op == "max" else float(torch.tensor(sum(near)) / len(near))  # sums are exact here
        expected[slot] = math.nan if any(map(math.isnan, near)) else fold
    assert same(got.tolist(), expected)


@settings(max_examples=300, deadline=None)
@given(texts(), st.sampled_from(["max", "min"]), st.integers(1, 6))
def test_pages(text: tuple[list[int], list[float], list[bool]], op: str, size: int) -> None:
    position, values, visible = text
    page = pages.page_of(torch.tensor([[position]]), {"page": torch.tensor([[[size]]])})
    got = pages.spread(op, torch.tensor([[values]]), torch.tensor([[visible]]), pages.numbered(page), -1)[0, 0].tolist()
    for slot, place in enumerate(position):
        if not visible[slot]:  # what it has means nothing
            continue
        mates = [values[other] for other, its in enumerate(position) if its // size == place // size and visible[other]]
        expected = math.nan if any(map(math.isnan, mates)) else (max if op == "max" else min)(mates)
        assert same([got[slot]], [expected])


@settings(max_examples=200, deadline=None)
@given(texts(), st.sampled_from(["max", "min", "sum"]), st.integers(1, 6), st.integers(0, 9))
def test_next_pages(text: tuple[list[int], list[float], list[bool]], op: str, size: int, after: int) -> None:
    """Pages of which nothing is there are skipped over by nobody."""
    position, values, _ = text
    values = [value if math.isfinite(value) else 0.0 for value in values]
    numbers = {"page": torch.tensor([[[size]]]), "page_after": torch.tensor([[[after]]])}
    page = pages.page_of(torch.tensor([[position]]), numbers)
    index, x = pages.numbered(page), torch.tensor([[values]], dtype=torch.float64)
    own = pages.spread(op, x, torch.ones_like(page, dtype=torch.bool), index, -1)
    got = pages.following(op, own, page, index, -1)[0, 0].tolist()
    nothing, fold = {"max": (-math.inf, max), "min": (math.inf, min), "sum": (0.0, math.fsum)}[op]
    for slot, place in enumerate(position):
        if place < 0:  # what a free slot has means nothing
            continue
        behind = [
            values[other]
            for other, its in enumerate(position)
            if its >= 0 and (its - after) // size == (place - after) // size + 1
        ]
        assert got[slot] == pytest.approx(fold(behind) if behind else nothing)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5)])
def test_rings(sizes: tuple[int, int], window: int | None) -> None:
    """Blocks of queries are written to two rows' rings; what is valid is what the newest ones gave, and nothing else."""
    rows, slots, tokens = max(sizes), 9, 9
    size, position = torch.tensor(sizes).view(2, 1), torch.arange(slots).expand(2, 1, slots)
    ring = torch.full((rows, 2, 1, slots), math.nan)
    for begin, end in [(0, 2), (2, 3), (3, 9)]:
        query = torch.arange(begin, end).expand(2, -1)
        writer = rings.writers(rows, size, query)
        for row in range(2):
            for place, which in enumerate(writer[row].tolist()):
                for slot in range(slots):
                    age = begin + which - slot
                    if which >= 0 and age >= 0 and (window is None or age < window):
                        ring[place, row, 0, slot] = begin + which
        newest = torch.full((2, 1, 1), end - 1)
        valid = rings.valid(rows, size[..., None], newest, position, window)
        for row, n in enumerate(sizes):
            for slot in range(end):
                seen = [t for t in range(max(slot, end - n), end) if window is None or t - slot < window]
                held = ring[:, row, 0, slot][valid[:, row, 0, slot]].tolist()
                assert sorted(held) == seen, f"row {row}, slot {slot}, after query {end - 1} of {tokens}"


def test_padding_writes_no_ring() -> None:
    assert rings.writers(3, torch.tensor([[3]]), torch.tensor([[-1, -1]])).tolist() == [[-1, -1, -1]]
    assert rings.writers(2, torch.tensor([[2]]), torch.tensor([[-1, 4, -1, 5]])).tolist() == [[1, 3]]
