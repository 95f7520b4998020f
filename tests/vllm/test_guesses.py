"""vLLM guesses tokens from n-grams, and a page forgets the wrong ones: answers are those of a request that is not guessed at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.refusals import refuse_configuration
from kvdsl.integrations.vllm.settings import Settings
from kvdsl.runtime.state.undo import UndoLog
from tests.vllm.test_serving import LAYERS, NEAR, alone, engine, logprobs, wanted

GUESSES, NEW = 4, 40


@pytest.fixture(scope="module", params=["h2o", "roco", "streaming_llm"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    guesses = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(request.param, speculative_config=guesses)
    yield request.param, llm
    del llm
    gc.collect()


def repeating() -> list[list[int]]:
    """Texts that say the same again and again, so that there is something to guess from."""
    rng = np.random.default_rng(2)
    return [
        (rng.integers(10, 4000, size=period).tolist() * 60)[:length] for period, length in ((5, 30), (12, 100), (30, 240))
    ]


def answered(llm: LLM) -> list[tuple[list[int], list[float]]]:
    return logprobs(llm.generate([{"prompt_token_ids": text} for text in repeating()], wanted(NEW), use_tqdm=False))


def test_guesses_change_no_answer(served: tuple[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, llm = served
    noted, taken = [], []
    note, take_back = UndoLog.note, UndoLog.take_back

    def noting(log: UndoLog, *rest: Any) -> None:
        noted.append(1)
        note(log, *rest)

    def taking(log: UndoLog, state: Any, steps: int) -> None:
        taken.append(steps)
        take_back(log, state, steps)

    monkeypatch.setattr(UndoLog, "note", noting)
    monkeypatch.setattr(UndoLog, "take_back", taking)
    answers = answered(llm)
    assert sum(taken) >= 10 * LAYERS  # some guesses were wrong, and some were right
    assert len(noted) >= sum(taken) + 10 * LAYERS
    for text, (tokens, found) in zip(repeating(), answers, strict=True):
        assert np.abs(np.array(found) - alone(policy, text, tokens)[0]).max() < NEAR


def test_wrong_guesses_would_be_seen(served: tuple[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with guesses that stay, answers are others."""
    policy, llm = served
    monkeypatch.setattr(UndoLog, "take_back", lambda log, state, steps: None)
    far = [
        np.abs(np.array(found) - alone(policy, text, tokens)[0]).max()
        for text, (tokens, found) in zip(repeating(), answered(llm), strict=True)
    ]
    assert max(far) > 100 * NEAR


def test_guesses_by_a_model_are_refused() -> None:
    with pytest.raises(KvdslError, match="by n-grams only, not by `eagle`"):
        refuse_configuration(SimpleNamespace(speculative_config=SimpleNamespace(method="eagle")), Settings("h2o", ()).spec)
