"""Answers of an engine that guesses, as JSON: python -m tests.vllm.guessing POLICY

A process of its own, because vLLM 0.32 makes no second engine in one that has guessed: it looks through all modules, and stumbles over one
of those that its guesses load.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from vllm import LLM

import tests.vllm.conftest  # noqa: F401 - says how the engine runs
from kvdsl.runtime.state.undo import UndoLog
from tests.vllm.test_serving import engine, logprobs, wanted

GUESSES, NEW = 4, 40


def repeating() -> list[list[int]]:
    """Texts that say the same again and again, so that there is something to guess from."""
    rng = np.random.default_rng(2)
    return [
        (rng.integers(10, 4000, size=period).tolist() * 60)[:length] for period, length in ((5, 30), (12, 100), (30, 240))
    ]


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    return logprobs(llm.generate([{"prompt_token_ids": text} for text in repeating()], wanted(NEW), use_tqdm=False))


def main() -> None:
    """Answers, how many guesses were noted and taken back for them, and answers where wrong guesses stay."""
    noted, taken = [], []
    note, take_back = UndoLog.note, UndoLog.take_back

    def noting(log: UndoLog, *rest: Any) -> None:
        noted.append(1)
        note(log, *rest)

    def taking(log: UndoLog, state: Any, steps: int) -> None:
        taken.append(steps)
        take_back(log, state, steps)

    guesses = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(sys.argv[1], speculative_config=guesses)
    UndoLog.note, UndoLog.take_back = noting, taking  # type: ignore[method-assign]
    found = {"answers": answers(llm), "noted": len(noted), "taken": sum(taken)}
    UndoLog.take_back = lambda *_: None  # type: ignore[method-assign]
    print(json.dumps({**found, "stained": answers(llm)}))


if __name__ == "__main__":
    main()
