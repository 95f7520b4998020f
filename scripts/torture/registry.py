"""What an attack is, and how it is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MOST_NOTES = 20

Progress = Callable[[], None]
"""To be called after each trial."""


class NotHere(Exception):
    """An attack that cannot run on this machine, and why."""


@dataclass
class Counts:
    """How often something was tried, and how often it was survived."""

    tried: int = 0
    survived: int = 0
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Count what the block does: an exception means that it was not survived, and is noted."""
        self.tried += 1
        try:
            yield
        except Exception as error:
            self.note(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
        else:
            self.survived += 1

    def note(self, text: str) -> None:
        """Something for the report."""
        if len(self.notes) < MOST_NOTES:
            self.notes.append(text)


@dataclass(frozen=True)
class Attack:
    """One thing that is tried many times.

    Attributes:
        group: the module that registered it.
        what: its purpose, in one line.
        count, quick: how often the full run and `--quick` try it.
    """

    group: str
    name: str
    what: str
    count: int
    quick: int
    run: Callable[[int, int, Progress], Counts]


ATTACKS: list[Attack] = []


def attack(name: str, what: str, *, count: int, quick: int) -> Callable[[Callable[[int, int, Progress], Counts]], Attack]:
    """Register a function of (seed, count, progress) as an attack."""

    def register(function: Callable[[int, int, Progress], Counts]) -> Attack:
        ATTACKS.append(Attack(function.__module__.rpartition(".")[2], name, what, count, quick, function))
        return ATTACKS[-1]

    return register


def carry_out(one: Attack, seed: int, count: int, progress: Progress) -> dict[str, Any]:
    """The attack's row of the report."""
    begun = time.perf_counter()
    try:
        counts = one.run(seed, count, progress)
    except NotHere as reason:
        counts = Counts(notes=[f"not run: {reason}"])
    except Exception as error:  # the attack itself is broken: that is no survival
        counts = Counts(tried=1, notes=[f"the attack failed: {type(error).__name__}: {str(error).strip()[:300]}"])
    return {
        "group": one.group, "attack": one.name, "what": one.what, "seed": seed, "tried": counts.tried, "survived": counts.survived,
        "seconds": round(time.perf_counter() - begun, 1), "notes": counts.notes,
    }  # fmt: skip
