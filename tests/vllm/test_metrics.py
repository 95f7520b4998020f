"""What the server says of kvdsl under `/metrics`: against requests of which it is known how many tokens leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from prometheus_client.parser import text_string_to_metric_families

from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.settings import Settings
from kvdsl_lab.assets import reference_model_path
from tests.vllm.conftest import bound_to_processors

BUDGET, LAYERS, HEADS = 48, 5, 4
"""The model that comes with kvdsl-lab has as many layers and KV heads."""

ANSWER, SIZE = 12, 16
"""Tokens of an answer that stay where prompts are shared, and of a block there."""


PAGES = {"policy": "h2o", "budget": BUDGET}


@pytest.fixture(
    scope="module",
    params=[("--api-server-count", "1"), ("--api-server-count", "2"), ("--tensor-parallel-size", "2")],
    ids=" ".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Where a server is, and over how many processes its KV heads are spread."""
    processes = 2 if "--tensor-parallel-size" in request.param else 1
    with server(PAGES, processes, request.param, tmp_path_factory.mktemp("serving") / "log") as address:
        yield address, processes


@contextmanager
def server(asked: dict[str, Any], processes: int, more: tuple[str, ...], log: Path) -> Iterator[str]:
    """The address of one that ends with the context."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [
        "serve", str(reference_model_path()), "--served-model-name", "small", "--additional-config", json.dumps({"kvdsl": asked}),
        "--port", str(port), "--dtype", "float32", "--max-model-len", "512",
        "--max-num-batched-tokens", "96", "--max-num-seqs", "4", "--enforce-eager",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if processes > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bound_to_processors(processes)
    with log.open("w") as out:
        command = [sys.executable, "-m", "kvdsl.integrations.vllm.launch", *words, *more]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        yield _ready(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()


def _ready(server: subprocess.Popen[bytes], address: str, log: Path) -> str:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health").close()
            return address
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(1)
    raise TimeoutError(log.read_text())


def answer(address: str, prompt: int, new: int) -> None:
    """Has a request of so many tokens answered by so many."""
    asked = {
        "model": "small",
        "prompt": list(range(10, 10 + prompt)),
        "max_tokens": new,
        "ignore_eos": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as got:
        assert json.load(got)["usage"]["completion_tokens"] == new


def said(address: str) -> dict[str, float]:
    """kvdsl's numbers."""
    with urllib.request.urlopen(f"{address}/metrics") as got:
        families = list(text_string_to_metric_families(got.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("kvdsl:")]
    assert all(sample.labels["model_name"] == "small" and sample.labels["engine"] == "0" for sample in samples)
    return {sample.name: sample.value for sample in samples if not sample.name.endswith("_created")}


def settled(address: str, evicted: int) -> dict[str, float]:
    """The numbers, once a server has told the last step's: that comes a moment after the answer."""
    for _ in range(100):
        if (found := said(address)).get("kvdsl:tokens_evicted_total") == evicted and not found.get("kvdsl:pages_in_use"):
            break
        time.sleep(0.1)
    return found


def test_the_numbers_are_those_of_requests_that_are_known(served: tuple[str, int]) -> None:
    """The last token of an answer is not read: a request of 130 and 24 tokens has read 153, and holds 48."""
    address, processes = served
    answer(address, 20, 20)
    assert settled(address, 0)["kvdsl:tokens_evicted_total"] == 0
    evicted = 0
    for prompt, new in ((130, 24), (47, 24), (48, 2), (300, 1), (130, 24)):
        answer(address, prompt, new)
        evicted += (prompt + new - 1 - BUDGET) * LAYERS * HEADS
        assert settled(address, evicted)["kvdsl:tokens_evicted_total"] == evicted
    found = said(address)
    one = page(Settings("h2o", (("budget", BUDGET),)), HEADS // processes, 64, torch.float32, layers=1, longest=1024)
    assert found["kvdsl:request_bytes"] == one.bytes * LAYERS * processes
    assert found["kvdsl:pages_in_use"] == 0


def test_pages_are_in_use_while_a_request_is_answered(served: tuple[str, int]) -> None:
    address, processes = served
    asked = {"model": "small", "prompt": [10, 11], "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as got:
        most = 0.0
        for line in got:
            if line.startswith(b"data: {"):
                most = max(most, said(address).get("kvdsl:pages_in_use", 0.0))
    assert most == 2 * LAYERS * processes


def test_the_numbers_of_answers_over_shared_prompts(tmp_path: Path) -> None:
    """Nobody leaves a prompt; pages there are none."""
    asked, evicted = {"policy": "h2o_answer", "budget": ANSWER}, 0
    with server(asked, 1, ("--block-size", str(SIZE)), tmp_path / "log") as address:
        for prompt, new in ((20, 8), (130, 24), (130, 24), (300, 14), (300, 1)):
            answer(address, prompt, new)
            evicted += max(0, new - 1 - ANSWER) * LAYERS * HEADS
            found = settled(address, evicted)
            assert found["kvdsl:tokens_evicted_total"] == evicted
        blocks = 1 + -(-(ANSWER + 1) // SIZE)  # of the state, and of the slots
        assert found["kvdsl:request_bytes"] == blocks * SIZE * 2 * HEADS * 64 * 4 * LAYERS
        assert "kvdsl:pages_in_use" not in found
