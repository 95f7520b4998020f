"""Interleaving and the arithmetic of medians; no test looks at a real clock."""

from __future__ import annotations

import math

import pytest

from kvdsl_lab.bench import measure
from kvdsl_lab.bench.measure import Candidate


class Clock:
    """Time passes only inside candidates."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: float):
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


def test_rounds_hold_everybody_once_and_the_order_turns():
    clock = Clock()
    runs = {name: Candidate(clock.taking(name, 0.001)) for name in "abc"}
    times = measure.interleaved(runs, repeats=3, warmup=0, clock=clock)
    assert clock.log == list("abc") + list("bca") + list("cab")
    assert times == {name: pytest.approx([1.0, 1.0, 1.0]) for name in "abc"}


def test_warm_up_is_run_but_not_recorded():
    clock, ticks = Clock(), []
    times = measure.interleaved(
        {"a": Candidate(clock.taking("a", 0.5))}, repeats=2, warmup=3, clock=clock, tick=lambda: ticks.append(1)
    )
    assert len(clock.log) == 5 and len(times["a"]) == 2 and len(ticks) == 5


def test_seldom_candidates_sit_out():
    clock = Clock()
    runs = {"a": Candidate(clock.taking("a", 0.001)), "slow": Candidate(clock.taking("slow", 1.0), every=3)}
    times = measure.interleaved(runs, repeats=6, warmup=1, clock=clock)
    assert [not math.isnan(ms) for ms in times["slow"]] == [True, False, False] * 2
    assert measure.taken(times["slow"]) == 2 and measure.taken(times["a"]) == 6


def test_a_sample_averages_its_calls():
    clock = Clock()
    times = measure.interleaved({"a": Candidate(clock.taking("a", 0.002), calls=5)}, repeats=1, warmup=0, clock=clock)
    assert len(clock.log) == 5
    assert times["a"] == pytest.approx([2.0])


def test_calibration_aims_at_the_wanted_length():
    clock = Clock()
    assert measure.calibrated(clock.taking("a", 0.0001), at_least_ms=2.0, clock=clock).calls == 20
    assert measure.calibrated(clock.taking("a", 1.0), at_least_ms=2.0, clock=clock).calls == 1


def test_quartiles():
    assert measure.quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert measure.quartiles([5, math.nan, 1, 3]) == (2, 3, 4)
    assert measure.quartiles([7.0]) == (7, 7, 7)
    assert all(math.isnan(value) for value in measure.quartiles([math.nan]))


def test_ratios_pair_the_rounds():
    ratios = measure.ratios([4.0, math.nan, 9.0], [2.0, 2.0, 3.0])
    assert ratios[0] == 2 and math.isnan(ratios[1]) and ratios[2] == 3


def test_rates_are_gigabytes_a_second():
    assert measure.rates(10**9, [1000.0]) == [1.0]


def test_summary_and_json():
    found = measure.finite(
        {**measure.summary("ms", [1.0, 2.0, 3.0]), **measure.summary("eager_ms", [math.nan]), "name": "x"}
    )
    assert found == {
        "ms": 2.0, "ms_q1": 1.5, "ms_q3": 2.5, "eager_ms": None, "eager_ms_q1": None, "eager_ms_q3": None, "name": "x",
    }  # fmt: skip
