"""Answers of an engine that guesses, as JSON: python -m tests.vllm.guessing POLICY

A process of its own, because vLLM 0.32 makes no second engine in one that has guessed: it looks through all modules, and stumbles over one
of those that its guesses load.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from vllm import LLM

import tests.vllm.conftest  # noqa: F401 - says how the engine runs
from kvdsl.integrations.vllm.guesses import Guesses
from kvdsl.runtime.state.undo import UndoLog
from tests.vllm import test_answers
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


def stain(log: Guesses, state: int, steps: int) -> None:
    """Forget wrong guesses, but for what they have placed, observed and evicted."""
    for _ in range(steps):
        before = log._noted[state].pop()
    for layer in test_answers.layers(LLMS[0]):
        if layer._undo is log:
            at = layer._lies.places["seen"]
            now, then = (block.flatten().view(torch.uint8)[at : at + 4] for block in (log._blocks[state], before.state))
            now.copy_(then)


LLMS: list[LLM] = []
"""The engine."""


def main() -> None:
    """Answers, how many guesses were noted and taken back for them, and answers where wrong guesses stay."""
    noted, taken = [], []
    guesses = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if sys.argv[1] in test_answers.POLICIES:
        llm, log, note = test_answers.engine(sys.argv[1], speculative_config=guesses), Guesses, Guesses.note
        LLMS.append(llm)

        def noting(log: Any, generated: Any, table: Any, *, first: bool) -> None:
            noted.extend([1] * (0 if first else len(generated.state)))
            note(log, generated, table, first=first)
    else:
        llm, log, note = engine(sys.argv[1], speculative_config=guesses), UndoLog, UndoLog.note

        def noting(log: Any, *rest: Any) -> None:
            noted.append(1)
            note(log, *rest)

    take_back = log.take_back

    def taking(log: Any, state: Any, steps: int) -> None:
        taken.append(steps)
        take_back(log, state, steps)

    log.note, log.take_back = noting, taking
    found = {"answers": answers(llm), "noted": len(noted), "taken": sum(taken)}
    log.take_back = stain if log is Guesses else lambda *_: None
    print(json.dumps({**found, "stained": answers(llm)}))


if __name__ == "__main__":
    main()
