"""vLLM guesses tokens from n-grams, and a page forgets the wrong ones: answers are those of a request that is not guessed at."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")

from tests.vllm.alone import NEAR, alone
from tests.vllm.guessing import repeating
from tests.vllm.test_answers import POLICIES
from tests.vllm.test_serving import LAYERS


@pytest.mark.parametrize("policy", ["h2o", "roco", "streaming_llm", "quest", "sparcas", *POLICIES])
def test_guesses_change_no_answer(policy: str) -> None:
    """Unless wrong ones stay: so the comparison can fail."""
    command = [sys.executable, "-m", "tests.vllm.guessing", policy]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    assert found["taken"] >= 10 * LAYERS  # some guesses were wrong
    assert found["noted"] >= found["taken"] + 10 * LAYERS  # and some were right
    assert max(_distances(policy, found["answers"])) < NEAR
    assert max(_distances(policy, found["stained"])) > 100 * NEAR


def _distances(policy: str, answers: list[tuple[list[int], list[float]]]) -> list[float]:
    """By how much log-probabilities differ from those of the same answers in transformers."""
    return [
        float(np.abs(np.array(found) - alone(policy, text, tokens)[0]).max())
        for text, (tokens, found) in zip(repeating(), answers, strict=True)
    ]
