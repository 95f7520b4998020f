"""The attacks on long texts and many caches, at sizes of a test."""

from __future__ import annotations

import pytest

from scripts.torture import long_runs
from scripts.torture.registry import Attack


@pytest.mark.parametrize(
    ("one", "count"), [(long_runs.long_kernels, 2_000), (long_runs.dropped_caches, 16)], ids=["kernels", "caches"]
)
def test_nothing_grows_drifts_or_stays(one: Attack, count: int) -> None:
    counts = one.run(1, count, lambda: None)
    assert counts.tried and counts.survived == counts.tried, counts.notes


def test_a_column_that_drifts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs.Shadow, "drift", lambda shadow: 2 * long_runs.DRIFT)
    counts = long_runs.long_kernels.run(1, 1_000, lambda: None)
    assert (counts.tried, counts.survived) == (1, 0)
