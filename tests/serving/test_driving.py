"""What is simulated but for vLLM's scheduler: who comes when, how long a step takes, and what is told of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, pstdev

import pytest

from kvdsl.errors import KvdslError
from kvdsl_lab.serving.driving import serve
from kvdsl_lab.serving.machine import DataSheet, Machine, Model, Work, fitted
from kvdsl_lab.serving.traffic import CONVERSATION, Asked

MACHINE = Machine(step=1e-3, weights=2e-2, token=5e-4, request=3e-4, byte=1e-9, pair=2e-7)


def test_a_step_takes_what_the_formula_says() -> None:
    idle = Work(tokens=1, decoding=0, read=0, pairs=0)
    assert MACHINE.seconds(idle) == pytest.approx(0.021)
    assert MACHINE.seconds(replace(idle, tokens=40)) == pytest.approx(0.021), (
        "as many tokens are multiplied while weights are read"
    )
    assert MACHINE.seconds(replace(idle, tokens=100)) == pytest.approx(0.051)
    assert MACHINE.seconds(replace(idle, decoding=10)) == pytest.approx(0.024)
    assert MACHINE.seconds(replace(idle, read=5_000_000)) == pytest.approx(0.026)
    assert MACHINE.seconds(replace(idle, pairs=50_000)) == pytest.approx(0.031)


def test_the_constants_of_a_data_sheet() -> None:
    """Two devices that read 1 TB/s and multiply at 100 TFLOPS, half of each reached; a billion parameters of 2 bytes."""
    sheet = DataSheet(1e12, 1e14, devices=2, of_bandwidth=0.5, of_operations=0.5, step=1e-3)
    machine = sheet.machine(Model(parameters=1e9, layers=10, heads=8, dim=64))
    assert machine.weights == pytest.approx(2e9 / 1e12) and machine.byte == pytest.approx(1e-12)
    assert machine.token == pytest.approx(2e9 / 1e14)
    assert machine.pair == pytest.approx(2 * 2 * 10 * 8 * 64 / 1e14), (
        "a product with a key and one with a value, of two operations each"
    )


def test_constants_are_found_from_steps_that_they_have_made() -> None:
    draw = random.Random(0)
    works = []
    for _ in range(300):
        decoding, prompt = draw.randint(1, 60), draw.choice([0, 0, draw.randint(20, 800)])
        works.append(
            Work(decoding + prompt, decoding, decoding * draw.randint(10_000, 10_000_000), prompt * (prompt + 1) // 2)
        )
    found = fitted(works, [MACHINE.seconds(work) * draw.uniform(0.998, 1.002) for work in works])
    assert found.weights + found.step == pytest.approx(MACHINE.weights + MACHINE.step, rel=0.05)
    for name in ("token", "byte", "pair"):
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=0.1), name
    with pytest.raises(KvdslError, match="at least 20"):
        fitted(works[:5], [1.0] * 5)


def test_requests_are_as_long_as_the_trace_s_and_come_by_chance() -> None:
    found = CONVERSATION.requests(20_000, rate=5.0, longest=1_000_000, seed=3)
    assert median(one.prompt for one in found) == pytest.approx(1020, rel=0.02)
    assert mean(one.prompt for one in found) == pytest.approx(1154.7, rel=0.02)
    assert median(one.new for one in found) == pytest.approx(129, rel=0.03)
    assert mean(one.new for one in found) == pytest.approx(211.1, rel=0.03)
    gaps = [after.arrival - before.arrival for before, after in pairwise(found)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.03) and pstdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert found == CONVERSATION.requests(20_000, rate=5.0, longest=1_000_000, seed=3)
    cut = CONVERSATION.requests(2_000, math.inf, longest=512, seed=3)
    assert max(one.prompt for one in cut) == 256 and max(one.prompt + one.new for one in cut) == 512
    assert {one.arrival for one in cut} == {0.0}


class OneByOne:
    """Answers a token of one request in a second."""

    seconds, preemptions = 0.0, 0

    def __init__(self) -> None:
        self.left: dict[int, int] = {}

    def add(self, number: int, asked: Asked) -> None:
        self.left[number] = asked.new

    def step(self) -> Iterable[tuple[int, bool]]:
        self.seconds += 1.0
        number = next(iter(self.left))
        self.left[number] -= 1
        ended = not self.left[number]
        if ended:
            del self.left[number]
        return [(number, ended)]

    def running(self) -> int:
        return min(1, len(self.left))


def test_what_is_told_of_requests() -> None:
    """The second waits for the first; before the third nothing is there for 7 seconds."""
    served = serve(OneByOne(), [Asked(0.0, 1, 3), Asked(1.0, 1, 2), Asked(12.0, 1, 1)])
    assert (served.requests, served.tokens, served.steps) == (3, 6, 6)
    assert served.seconds == 13.0 and served.throughput == pytest.approx(6 / 13)
    assert served.ttft[0] == 1.0 and served.ttft[1] == pytest.approx(3.0, rel=0.02), "1, 3 and 1 seconds"
    assert served.tpot[0] == 1.0
