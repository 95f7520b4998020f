"""Pages in few bits hold what transformers holds in the same `kv_dtype`.

Rounding has steps: where keys of two engines differ in the last place of a float32, some codes differ by one, and log-probabilities by a
hundred times more than in the model's dtype. So transformers reads the queries, keys and values that vLLM's layers got, which differ from
its own as two orders of summation do. The rest is compared as in `test_serving`: log-probabilities, and positions held.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM

from kvdsl.integrations.vllm.attention import PolicyAttention
from kvdsl.runtime.hf.layer import SlotLayer
from tests.hf import zoo
from tests.vllm.alone import NEAR, NEW, alone
from tests.vllm.test_serving import AT_ONCE, LAYERS, LONGEST, answered, check, engine, kept_in_pages, logprobs, wanted
from tests.vllm.texts import prompts

SERVED = [
    ("h2o", "int8", LONGEST),
    ("h2o", "int4", 64),
    ("roco", "int8", AT_ONCE),
    ("roco", "int4", LONGEST),
    ("streaming_llm", "int8", 64),
    ("streaming_llm", "int4", AT_ONCE),
    ("quest", "fp8", AT_ONCE),
]


class Heard:
    """The queries, keys and values that vLLM's layers have got, request by request."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int | None, int], list[tuple[Tensor, ...]]] = {}
        """By layer and page, of the request that has the page or was the last one."""
        self._whole: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
        """By the tokens that a request has read, its layers' vectors, [tokens, heads, dim] each."""

    def step(self, layer: int | None, step: Any, vectors: tuple[Tensor, ...]) -> None:
        """Hear a step of a layer."""
        for prompt in step.prompts():
            if prompt.begins:
                self._parts[layer, prompt.page] = []
            self._parts[layer, prompt.page].append(tuple(x[prompt.first : prompt.last].clone() for x in vectors))
        for decoded in step.decoded:
            for page, row in zip(decoded.pages.tolist(), decoded.rows.tolist(), strict=True):
                self._parts[layer, page].append(tuple(x[row : row + 1].clone() for x in vectors))

    def end(self) -> None:
        """All requests have ended; no two have read equally many tokens."""
        for parts in (self._parts[key] for key in sorted(self._parts, key=str)):
            whole = tuple(map(torch.cat, zip(*parts, strict=True)))
            self._whole[len(whole[0])].append(whole)

    def of(self, layer: int, prompt: int) -> tuple[Tensor, ...]:
        """A layer's vectors of the request with so long a prompt."""
        found = self._whole[prompt + NEW - 1]
        assert len(found) == LAYERS
        return found[layer]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Note what vLLM's layers get, and have transformers' layers read it."""
    alone("full", [5, 6, 7], [8])  # transformers' first cache for a model tries it out
    found, attend, read = Heard(), PolicyAttention._attend, SlotLayer.attend_eagerly
    prompt: dict[int, int] = {}

    def noting(self: PolicyAttention, step: Any, vectors: Any, *rest: Any) -> None:
        found.step(self._layer, step, vectors)
        attend(self, step, vectors, *rest)

    def reading(self: SlotLayer, module: Any, call: Any, positions: Any) -> Tensor:
        at, tokens = self.length, call.query.shape[2]
        if at == 0:
            prompt[self.state.layer] = tokens
        vectors = [x[at : at + tokens].transpose(0, 1)[None] for x in found.of(self.state.layer, prompt[self.state.layer])]
        for own, other in zip(call[:3], vectors, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=NEAR)
        query, key, value = vectors
        return read(self, module, call._replace(query=query, key=key, value=value), positions)

    monkeypatch.setattr(PolicyAttention, "_attend", noting)
    monkeypatch.setattr(SlotLayer, "attend_eagerly", reading)
    return found


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, LLM]]:
    policy, kv_dtype, at_once = request.param
    llm = engine(policy, at_once, kv_dtype=kv_dtype)
    yield policy, kv_dtype, llm
    del llm
    gc.collect()


def test_requests_together_are_what_they_are_alone(served: tuple[str, str, LLM], heard: Heard) -> None:
    policy, kv_dtype, llm = served
    answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in prompts()], wanted(), use_tqdm=False))
    heard.end()
    left = check(policy, prompts(), answers, kept_in_pages(llm), kv_dtype=kv_dtype)
    assert left > 0 or policy == "quest"


def test_in_the_models_dtype_a_text_is_another(served: tuple[str, str, LLM]) -> None:
    """The comparison above can fail."""
    policy, _, llm = served
    text = prompts()[-1]
    ((tokens, found),) = logprobs(llm.generate([{"prompt_token_ids": text}], wanted(), use_tqdm=False))
    assert np.abs(np.array(found) - alone(policy, text, tokens)[0]).max() > 100 * NEAR


def test_requests_that_lose_their_pages_go_on_as_if_they_had_not(served: tuple[str, str, LLM], heard: Heard) -> None:
    """All pages are taken away amid the answers: each request reads its prompt again, and its answer so far token by token.

    What was said before the loss is of the first reading, whose keys may have been rounded to other codes.
    """
    policy, kv_dtype, llm = served
    core, answers, said = llm.llm_engine, {}, 0
    for name, text in enumerate(prompts()):
        core.add_request(str(name), {"prompt_token_ids": text}, wanted())
    while core.has_unfinished_requests():
        answers |= {int(out.request_id): out for out in core.step() if out.finished}
        if not said and answered(llm) >= 8:
            said = answered(llm)
            assert core.reset_prefix_cache(reset_running_requests=True)
    assert 8 <= said < NEW / 2
    heard.end()
    for name, text in enumerate(prompts()):
        tokens, found = logprobs([answers[name]])[0]
        expected, _ = alone(policy, text, tokens, kv_dtype=kv_dtype)
        assert np.abs(np.array(found) - expected)[said:].max() < NEAR


@pytest.mark.parametrize("norm", [15.9, 16.1])
def test_pages_of_keys_with_a_large_bias_are_refused(norm: float, tmp_path: Path) -> None:
    """Before any request, once the weights are there; below 4 times the root of 16 dims, a bias is rounded with its key."""
    model = zoo.make("Qwen2", vocab_size=4096)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[16:].fill_(norm / 4)
    model.save_pretrained(tmp_path)
    told = f"adds a bias to keys .*: 1 \\({norm:.4g}\\)\\. .* leave `kv_dtype` out"
    with nullcontext() if norm < 16 else pytest.raises(Exception, match=told):
        engine("h2o", model=tmp_path, kv_dtype="int8", skip_tokenizer_init=True)
