"""The experiments: what each asks, and how long it may take. Numbers and order are those of the plan for fifteen minutes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        number: its place in the plan. seconds: its deadline.
    """

    number: int
    name: str
    seconds: int
    question: str

    @property
    def module(self) -> Any:
        """The module whose `run(setting, lines)` gives an exit code."""
        return importlib.import_module(f"scripts.gpu.{self.name}")


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            1, "step", 120, "how long is a step at 64 to 256 rows of 1,024 and 2,048 slots, beside cuDNN's attention?"
        ),
        Experiment(2, "parts", 75, "what do attend, settle, look and choose take, and does look wait for memory?"),
        Experiment(
            4, "cuts", 75, "is one launch faster than two, at which shapes, and which cut of attend and settle is best?"
        ),
        Experiment(5, "selection", 60, "is SparCas 3× faster than a dense step at 32,768 slots?"),
        Experiment(6, "served", 270, "does vLLM write twice the tokens a second where its cache is 4 GB?"),
        Experiment(7, "lazily", 30, "what would cuDNN's attention with statistics every 16th step cost?"),
        Experiment(8, "prompt", 45, "is a prompt's time the host's, attention's or observe's?"),
        Experiment(9, "right", 90, "are steps, prompts, graphs and texts right?"),
        Experiment(9, "language", 60, "do shipped, gallery and random policies do what the interpreter does?"),
    )
}
MOST_TELLING = ("served", "step")
"""What comes first where there is not time for all."""

LEFT_OUT = (
    "4, attend with keys as the left operand, settle in one pass, a dense loop for StreamingLLM",
    "5, look with a slot per thread, choose by radix",
    "9, racecheck of a cooperative launch",
)
"""Parts of the plan whose code does not exist."""


def in_time(names: list[str], seconds: int) -> list[str]:
    """Return the experiments whose deadlines fit, in order; the most telling first if not all do."""
    if sum(EXPERIMENTS[name].seconds for name in names) <= seconds:
        return names
    found: list[str] = []
    for name in sorted(names, key=lambda name: MOST_TELLING.index(name) if name in MOST_TELLING else len(MOST_TELLING)):
        if EXPERIMENTS[name].seconds <= seconds:
            found.append(name)
            seconds -= EXPERIMENTS[name].seconds
    return found
