"""Two processes, each with half of the KV heads, do what one does: the same log-probabilities and the same kept tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM

from kvdsl.integrations.vllm.ledger import Ledger
from tests.vllm.alone import NEAR, alone
from tests.vllm.conftest import bound_to_processors
from tests.vllm.test_serving import engine, logprobs, sets, wanted
from tests.vllm.texts import prompts

PROCESSES = 2

DRAWN = """kv 1
policy Drawn {
  param budget = 48
  score random()
  keep last 8
}
"""
"""Every head draws numbers of its own, which its number in the whole layer decides."""


def kept_by_worker(worker: Any) -> list[list[Any]]:
    """The positions in every page of a worker's heads that was ever used, layer by layer."""
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    return [[state.position[0] for state in layer.impl.caches.states.values()] for layer in layers]


@pytest.fixture(scope="module", params=["h2o", "drawn"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    policy = request.param
    if policy == "drawn":
        place = tmp_path_factory.mktemp("policies") / "drawn.kv"
        place.write_text(DRAWN)
        policy = str(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound_to_processors(PROCESSES))
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions may be sent to the workers
        llm = engine(policy, tensor_parallel_size=PROCESSES)
        yield policy, llm
    del llm
    gc.collect()


def test_two_processes_are_what_one_is(served: tuple[str, LLM]) -> None:
    policy, llm = served
    texts = prompts()
    answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in texts], wanted(), use_tqdm=False))
    workers = llm.collective_rpc(kept_by_worker)
    assert len(workers) == PROCESSES
    left, told_apart = 0, False
    for text, (tokens, found) in zip(texts, answers, strict=True):
        expected, held = alone(policy, text, tokens)
        assert np.abs(np.array(found) - expected).max() < NEAR
        for layer, position in held.items():
            left += (len(text) + len(tokens) - 1) * len(position) - int((position >= 0).sum())
            halves = position.chunk(PROCESSES)
            told_apart |= sets(halves[0]) != sets(halves[1])
            for worker, own in zip(workers, halves, strict=True):
                assert sets(own) in [sets(page) for page in worker[layer]]
    assert told_apart  # else the processes might have taken each other's heads for their own
    ledgers = [Ledger.find(0, rank) for rank in range(PROCESSES)]
    assert sum(ledger.evicted for ledger in ledgers if ledger is not None) == left > 0
