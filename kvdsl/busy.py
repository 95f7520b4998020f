"""Choose thread counts on a machine that other programs use.

While they wait, OpenMP threads spin for milliseconds, both torch's and kvdsl's, because they share one library. Next to one busy core,
a token of SmolLM2 was 3× slower on two threads than on one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SPINS = "1000"
"""Spins of a waiting thread before it sleeps, a few microseconds; libgomp reads it when torch is imported."""

_STAT = Path("/proc/stat")
_LOOK = 0.2
"""Seconds of measuring the cores."""


def wait_passively() -> None:
    """Make waiting OpenMP threads sleep early, unless the user configured waiting. Call it before torch is imported."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ}:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def idle_cores() -> float | None:
    """Return how many of this process's cores are idle, from a short measurement; None if the system does not report it."""
    try:
        before = _ticks()
        time.sleep(_LOOK)
        after = _ticks()
    except (OSError, ValueError, AttributeError):
        return None
    shares = (
        (after[core][0] - idle) / max(1, after[core][1] - whole) for core, (idle, whole) in before.items() if core in after
    )
    return sum(shares)


def _ticks() -> dict[int, tuple[int, int]]:
    """Return the idle ticks and all ticks of each core that this process may use."""
    mine, found = os.sched_getaffinity(0), {}
    for line in _STAT.read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in mine:
            ticks = [*map(int, numbers)]
            found[int(name[3:])] = ticks[3] + ticks[4], sum(ticks[:8])
    return found


def threads(wanted: int) -> tuple[int, str | None]:
    """Return how many of the wanted threads to use, and a message if that is fewer. If `OMP_NUM_THREADS` is set, use all of them."""
    idle = idle_cores() if wanted > 1 and "OMP_NUM_THREADS" not in os.environ else None
    if idle is None or idle > wanted - 0.6:
        return wanted, None
    fewer = max(1, round(idle))
    of = f"{fewer} thread{'s' if fewer > 1 else ''}"
    return fewer, (
        f"other programs keep the cores busy: using {of} instead of {wanted}, which would wait for each other (--threads {wanted} "
        "forces them)"
    )


def use_threads(requested: int | None) -> str | None:
    """Use the requested number of threads, or by default fewer than torch on a busy machine. Return a message about it, if any."""
    import torch

    count, message = (requested, None) if requested else threads(torch.get_num_threads())
    torch.set_num_threads(count)
    return message
