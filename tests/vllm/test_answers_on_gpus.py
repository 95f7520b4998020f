"""Shared prompts and answers as on a GPU, with the kernels in Triton's interpreter: requests get what they get alone in transformers."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from tests.vllm.alone import NEAR
from tests.vllm.test_rows import told


@pytest.mark.parametrize(("policy", "runner"), [("h2o_answer", "v2"), ("recent_answer", "v1")])
def test_requests_get_what_they_get_alone(policy: str, runner: str) -> None:
    """The process compares log-probabilities and positions: of prompts in parts, found in the cache, beside one that is aborted, and after
    a request lost its blocks. Under full attention the last request would say other things, by far.
    """
    found = told("tests.vllm.answers_on_gpus", policy, runner)
    assert found["hits"] == [0, 128, 0]
    assert all(count > 0 for count in found["steps"])
    assert found["other"] > 100 * NEAR


def test_replays_of_captured_steps_answer_the_same() -> None:
    """Also beside padding, and for requests that join, leave and lose their blocks. vLLM replays a graph for a prompt's last token, too, if
    the rest was found in the cache.
    """
    found = told("tests.vllm.answers_on_gpus", "h2o_answer", "graphs")
    assert found["hits"] == [0, 128, 0]
    assert {size for size, requests in found["replayed"] if requests < size} == {2, 4}
