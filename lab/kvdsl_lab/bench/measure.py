"""Interleaved timing: what is compared runs in turns, so that a noisy machine disturbs all of it alike."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdsl.generation.report import quartiles


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Attributes:
        run: one call.
        calls: how many calls one sample averages, for what takes microseconds.
        every: run it in every n-th round only, for what takes long.
    """

    run: Callable[[], object]
    calls: int = 1
    every: int = 1


def calibrated(
    run: Callable[[], object], *, at_least_ms: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> Candidate:
    """A candidate whose samples last long enough for the clock and for the threads to be awake."""
    run()
    begun = clock()
    run()
    once = max((clock() - begun) * 1e3, 1e-4)
    return Candidate(run, calls=max(1, min(1000, round(at_least_ms / once))))


def interleaved(
    candidates: Mapping[str, Candidate],
    repeats: int,
    warmup: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of every candidate in every round, NaN where it sat the round out.

    The order within a round turns by one candidate a round, so that nobody always runs behind the same neighbour.

    Args:
        warmup: rounds that are not recorded.
        tick: called after every round, for a progress bar.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            ms = math.nan
            if turn % candidates[name].every == 0:
                ms = _sample(candidates[name], clock)
            if turn >= 0:
                times[name].append(ms)
        tick()
    return times


def _sample(candidate: Candidate, clock: Callable[[], float]) -> float:
    begun = clock()
    for _ in range(candidate.calls):
        candidate.run()
    return (clock() - begun) * 1e3 / candidate.calls


def summary(name: str, values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """`name`, `name_q1` and `name_q3`."""
    first, median, third = (round(value, digits) for value in quartiles(values))
    return {name: median, f"{name}_q1": first, f"{name}_q3": third}


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Pairwise quotients, round by round; NaN where one of the two sat out."""
    return [x / y for x, y in zip(of, to, strict=True)]


def rates(count: int, times: Sequence[float]) -> list[float]:
    """10^9 a second (GB/s for bytes) out of milliseconds."""
    return [count / ms / 1e6 for ms in times]


def taken(values: Sequence[float]) -> int:
    """How many rounds a candidate ran in."""
    return sum(not math.isnan(value) for value in values)


def finite(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same with None for NaN: JSON has no NaN."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in result.items()}


# -- memory ------------------------------------------------------------------------------------------------------------

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much the process's resident memory grows at most during a call, its result included; None if nothing tells.

    Memory that the allocator has kept from before is given back first, because its use would not show.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # the peak begins anew
    except (OSError, AttributeError):
        return None
    before = _resident("VmRSS")
    result = run()
    grown = _resident("VmHWM") - before
    del result
    return grown


def _resident(which: str) -> int:
    found = re.search(rf"^{which}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def free_memory() -> int:
    """Bytes that a process could still take; 0 if nothing tells."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
