"""Requests and an engine, real or simulated: who comes when, and what each of them had to wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvdsl_lab.serving.traffic import Asked

OUTSIDE = 20_000
"""With so many requests in an engine others wait outside of it, in the same order: a request takes memory of the host, too."""


class Engine(Protocol):
    """What answers. It does nothing between two steps."""

    seconds: float
    """All steps until now."""
    preemptions: int

    def add(self, number: int, asked: Asked) -> None:
        """A request has come."""

    def step(self) -> Iterable[tuple[int, bool]]:
        """One step: which requests got a token, and whether it was their last."""

    def running(self) -> int:
        """Requests that have a place in the cache."""


@dataclass(frozen=True)
class Served:
    """How requests were served. Times are in seconds.

    Attributes:
        requests, tokens: that were answered, and that these were answered with.
        seconds: from the first request's arrival to the last one's end.
        throughput: tokens of answers a second.
        ttft: from a request's arrival to its first token: the median, and what 99 % stay below.
        tpot: from then on for each token, likewise; of answers of more than one token.
        at_once: requests that had a place in the cache, over the time of all steps; and at most.
        preemptions: how often a request lost its place, and began anew.
    """

    requests: int
    tokens: int
    steps: int
    seconds: float
    throughput: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    at_once: tuple[float, int]
    preemptions: int


def serve(engine: Engine, requests: Sequence[Asked]) -> Served:
    """Have requests answered, which lie in the order of their arrivals."""
    first, last = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    come = there = steps = most = 0
    idle = area = 0.0
    while come < len(requests) or there:
        now = idle + engine.seconds
        if not there:
            now = max(now, requests[come].arrival)
            idle = now - engine.seconds
        while come < len(requests) and there < OUTSIDE and requests[come].arrival <= now:
            engine.add(come, requests[come])
            come, there = come + 1, there + 1
        tokens = list(engine.step())
        before, now = now, idle + engine.seconds
        # Requests that ended in the step had a place in it as well.
        running = engine.running() + sum(ended for _, ended in tokens)
        steps, most, area = steps + 1, max(most, running), area + running * (now - before)
        for number, ended in tokens:
            if np.isnan(first[number]):
                first[number] = now
            if ended:
                last[number] = now
                there -= 1
    arrived, new = np.array([one.arrival for one in requests]), np.array([one.new for one in requests])
    several = new > 1
    seconds = float(last.max() - arrived[0])
    return Served(
        len(requests), int(new.sum()), steps, seconds, float(new.sum()) / seconds, _high(first - arrived),
        _high((last - first)[several] / (new[several] - 1)), (area / engine.seconds, most), engine.preemptions,
    )  # fmt: skip


def _high(values: np.ndarray) -> tuple[float, float]:
    """The median, and the 99th of a hundred."""
    median, high = np.quantile(values, [0.5, 0.99]) if len(values) else (float("nan"),) * 2
    return float(median), float(high)
