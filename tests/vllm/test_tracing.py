"""A request of a server as a page of `kvdsl trace`: the same as without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM, SamplingParams

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.generation.models import load_model
from kvdsl_lab.assets import reference_model_path
from kvdsl_lab.eval.trace import Trace, as_data, trace

PROMPTS = [list(range(300, 420)), list(range(700, 730)), list(range(100, 290))]
NEW = 20


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "one.html"


@pytest.fixture(scope="module")
def served(out: Path) -> Any:
    return LLM(
        str(reference_model_path()), dtype="float32", max_model_len=512, max_num_batched_tokens=512, enforce_eager=True,
        additional_config={"kvdsl": {"policy": "h2o", "budget": 48}, "kvdsl_trace": str(out)},
    )  # fmt: skip


def answers(served: Any, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    found = served.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def finished(served: Any) -> None:
    """An engine that is no server hears of a request's end with the next one."""
    answers(served, [[7, 8, 9]])


def alone(policy: str = "h2o", budget: int = 48) -> Trace:
    """The first prompt's, without a server."""
    model, _ = load_model(None)
    return trace(model, PROMPTS[0], NEW, kvdsl.load(policy)(model, budget=budget))


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_request_among_others_is_what_it_is_alone(served: Any, out: Path) -> None:
    answers(served, PROMPTS)
    finished(served)
    found = data_of(out)
    wanted = as_data(alone(), load_model(None)[1])
    assert {name: found[name] for name in ("tokens", "prompt_tokens", "seen", "layers", "gone")} == {
        name: wanted[name] for name in ("tokens", "prompt_tokens", "seen", "layers", "gone")
    }
    assert any(step >= 0 for layer in found["gone"] for head in layer for step in head)
    assert (found["policy"], found["settings"]) == ("H2O", "budget=48")


def test_the_next_is_followed_when_the_file_is_gone(served: Any, out: Path) -> None:
    answers(served, PROMPTS[:1])
    before = out.read_bytes()
    answers(served, PROMPTS[1:2])
    finished(served)
    assert out.read_bytes() == before
    out.unlink()
    answers(served, PROMPTS[1:2])
    finished(served)
    assert data_of(out)["prompt_tokens"] == len(PROMPTS[1])


def test_a_request_that_moves_in_the_batch_is_followed(served: Any, out: Path) -> None:
    """It comes second, while the first is answered, and goes on behind its end."""
    out.touch()
    engine = served.llm_engine
    for number, tokens in ((2, 6), (0, NEW)):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(f"moving {number}", {"prompt_token_ids": PROMPTS[number]}, params)
        engine.step()
        out.unlink(missing_ok=True)
    while engine.has_unfinished_requests():
        engine.step()
    finished(served)
    found = data_of(out)
    assert (found["prompt_tokens"], found["gone"]) == (len(PROMPTS[0]), alone().gone.tolist())


def test_without_what_it_needs_it_is_refused(served: Any, tmp_path: Path) -> None:
    from kvdsl.integrations.vllm.refusals import refuse_trace

    config = served.llm_engine.vllm_config
    refuse_trace(config)
    known = config.additional_config
    try:
        config.additional_config = known | {"kvdsl_trace": str(tmp_path / "no" / "folder.html")}
        with pytest.raises(KvdslError, match="there is no folder for the trace"):
            refuse_trace(config)
    finally:
        config.additional_config = known


def test_an_answer_behind_a_shared_prompt_is_that_of_a_text_that_is_alone(tmp_path: Path) -> None:
    """The prompt, read or found in the cache, is held to the end; the answer is cut."""
    out = tmp_path / "one.html"
    llm = LLM(
        str(reference_model_path()), dtype="float32", max_model_len=512, max_num_batched_tokens=512, enforce_eager=True, block_size=16,
        additional_config={"kvdsl": {"policy": "h2o_answer", "budget": 12}, "kvdsl_trace": str(out)},
    )  # fmt: skip
    wanted = alone("h2o_answer", 12)
    for _ in range(2):
        out.unlink(missing_ok=True)
        answers(llm, PROMPTS)
        finished(llm)
        found = data_of(out)
        assert (found["prompt_tokens"], found["gone"]) == (len(PROMPTS[0]), wanted.gone.tolist())
    assert int((wanted.gone >= 0).sum()) == (NEW - 1 - 12) * wanted.gone.shape[0] * wanted.gone.shape[1]
