"""How much something computes, in calls of functions: the same on every machine, however busy, unlike its time."""

from __future__ import annotations

import cProfile
from collections.abc import Callable


def calls(action: Callable[[], object]) -> int:
    """How many functions, of Python's and built-in ones, are called by an action."""
    profile = cProfile.Profile()
    profile.runcall(action)
    return sum(entry.callcount for entry in profile.getstats())
