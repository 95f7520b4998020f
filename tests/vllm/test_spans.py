"""Policies that read spans, turns and tokens: in vLLM as in transformers with the same marks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.generation.spans import Thinking, mark_all
from kvdsl.integrations.vllm.refusals import refuse_layers
from kvdsl.integrations.vllm.settings import Settings, _answers, _spec
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.assets import reference_model_path
from tests.vllm.alone import NEAR, NEW, reference
from tests.vllm.test_serving import kept_in_pages, logprobs, sets
from tests.vllm.texts import drawn

LENGTHS = (47, 130, 301)
PARAMS = {
    "keep_system": {"budget": 48, "recent": 8},
    "decay_tools": {"budget": 48},
    "line_ends": {"budget": 48, "line_end": 31},
    "drop_thinking": {},
    "agent": {"budget": 48},
}
SPANS: dict[str, dict[str, Any]] = {
    "keep_system": {"system": [[0, 9], [20, 31]]},
    "decay_tools": {"tool": [[5, 21], [30, None]], "turns": [12, 33]},
    "line_ends": {},
    "drop_thinking": {"think": [[3, 11], [17, 24], [40, 44]], "turns": [15, 36]},
    "agent": {"think": [[3, 11], [40, 44]], "tool": [[12, 30]], "turns": [15, 36]},
}  # fmt: skip
AT_ONCE = 192
ROOT = Path(__file__).parent.parent.parent


def engine(policy: str, **more: Any) -> LLM:
    params = PARAMS.get(Path(policy).stem, {"budget": 12})
    return LLM(
        str(reference_model_path()), dtype="float32", max_model_len=1024, max_num_batched_tokens=AT_ONCE, enforce_eager=True,
        max_num_seqs=len(LENGTHS), additional_config={"kvdsl": {"policy": policy, **params, **more}},
    )  # fmt: skip


@pytest.fixture(scope="module", params=PARAMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    """A policy of the gallery, or the one that docs/howto/chats.md shows."""
    policy = request.param
    if policy == "agent":
        page = (ROOT / "docs" / "howto" / "chats.md").read_text(encoding="utf-8")
        place = tmp_path_factory.mktemp("policies") / "agent.kv"
        place.write_text(page.partition('title="agent.kv"\n')[2].partition("```")[0], encoding="utf-8")
        policy = str(place)
    llm = engine(policy)
    yield policy, llm
    del llm
    gc.collect()


def texts() -> list[list[int]]:
    """Prompts in which some tokens are ends of lines."""
    found = [drawn(length, 0) for length in LENGTHS]
    for text in found:
        text[4::13] = [31] * len(text[4::13])
    return found


def asking(spans: Any, **more: Any) -> SamplingParams:
    extra = None if spans is None else {"kvdsl_spans": spans}
    return SamplingParams(
        **({"max_tokens": NEW, "temperature": 0, "logprobs": 0, "ignore_eos": True} | more), extra_args=extra
    )


def answers(llm: LLM, spans: Any, **more: Any) -> Any:
    return logprobs(llm.generate([{"prompt_token_ids": text} for text in texts()], asking(spans, **more), use_tqdm=False))


def alone(
    policy: str, prompt: list[int], tokens: list[int], spans: dict[str, Any]
) -> tuple[list[float], dict[int, torch.Tensor]]:
    """What the text gets in transformers."""
    model, found = reference()[0], []
    cache = kvdsl.load(policy)(model, **PARAMS.get(Path(policy).stem, {"budget": 12}))
    mark_all(cache, spans)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **with_cache(cache)).logits[0, -1]
        for token in tokens:
            found.append(float(logits.log_softmax(-1)[token]))
            if len(found) < len(tokens):
                logits = model(torch.tensor([[token]]), **with_cache(cache)).logits[0, -1]
    return found, {index: cache.positions(index)[0] for index in cache.managed}


def check(policy: str, found: Any, spans: dict[str, Any], pages: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
    held = []
    for text, (tokens, thought) in zip(texts(), found, strict=True):
        expected, kept = alone(policy, text, tokens, spans)
        assert np.abs(np.array(thought) - expected).max() < NEAR, len(text)
        for layer, position in kept.items():
            assert sets(position) in [sets(page) for page in pages[layer]], (
                f"layer {layer} of the text of {len(text)} tokens"
            )
        held.append(kept)
    return held


@pytest.mark.parametrize("as_text", [False, True], ids=["dict", "JSON"])
def test_marks_are_what_they_are_in_transformers(served: tuple[str, LLM], as_text: bool) -> None:
    policy, llm = served
    spans = SPANS[Path(policy).stem]
    found = answers(llm, json.dumps(spans) if as_text else spans)
    marked = check(policy, found, spans, kept_in_pages(llm))
    if not spans or as_text:
        return
    unmarked = check(policy, answers(llm, None), {}, kept_in_pages(llm))
    assert any(sets(a[layer]) != sets(b[layer]) for a, b in zip(marked, unmarked, strict=True) for layer in a)


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ("[", "is no JSON"),
        ([1], "give stretches by name"),
        ({"tool": [[0, 4]]}, "has no span `tool` that could be marked: it reads `system`"),
        ({"system": [[0, 48]]}, "names place 48, and the prompt has 47 tokens"),
        ({"system": [[4, 4]]}, "holds no token"),
        ({"system": [4, 9]}, r"give \[start, end\]"),
        ({"system": 4}, "give a list"),
        ({"turns": [3]}, "reads no turns"),
        ({"prompt": [46, 1]}, "is of another prompt"),
    ],
)
def test_a_request_that_marks_what_it_has_not_is_refused_by_itself(served: tuple[str, LLM], spans: Any, says: str) -> None:
    policy, llm = served
    if policy != "keep_system":
        return
    engine, prompt = llm.llm_engine, {"prompt_token_ids": texts()[0]}
    engine.add_request("right", prompt, asking({"system": [[0, 9]]}))
    engine.step()
    with pytest.raises(VLLMValidationError, match=says):
        engine.add_request("wrong", prompt, asking(spans))
    found = []
    while engine.has_unfinished_requests():
        found += [one for one in engine.step() if one.finished]
    assert [len(one.outputs[0].token_ids) for one in found] == [NEW]


def writing_thoughts() -> Callable[[int], str]:
    """A tokenizer under which the fourth and fifth token that come begin thinking, and the sixteenth ends it."""
    pieces, read = {3: "<thi", 4: "nk>", 15: "</think>"}, count()
    return lambda token: pieces.get(next(read), "word")


THOUGHTS = """kv 2
policy Thoughts {
  "What is thought weighs more."
  param budget = 48
  input think from spans
  score mean(attn) * where(think, 8, 1)
  BUDGET
}
"""


@pytest.mark.parametrize(
    "kept", ["budget budget", "budget prompt + budget\n  keep where position < prompt"], ids=["pages", "answers"]
)
def test_what_is_thought_is_found_as_it_is_generated(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second token tells that the first, which is cached, began it."""
    policy = tmp_path / "thoughts.kv"
    policy.write_text(THOUGHTS.replace("BUDGET", kept))
    monkeypatch.setattr("kvdsl.integrations.vllm.texts._decoder", lambda config: writing_thoughts())
    llm, prompt = engine(str(policy)), texts()[0]
    ((again, found),) = logprobs(llm.generate([{"prompt_token_ids": prompt}], asking(None), use_tqdm=False))
    model = reference()[0]
    cache = kvdsl.load(str(policy))(model, budget=12)
    thinking = Thinking(writing_thoughts(), ("<think>", "</think>"), lambda *ends: cache.mark("think", *ends))
    expected = []
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **with_cache(cache)).logits[0, -1]
        for number, token in enumerate(again):
            expected.append(float(logits.log_softmax(-1)[token]))
            if number + 1 < len(again):
                thinking.read(token, len(prompt) + number)
                logits = model(torch.tensor([[token]]), **with_cache(cache)).logits[0, -1]
    assert np.abs(np.array(found) - expected).max() < NEAR
    position, thought = cache.positions(0)[0], cache.state(0)["given_think"][0].bool()
    begun, ended = len(prompt) + 3, len(prompt) + 16
    assert torch.equal(thought & (position >= 0), (position >= begun) & (position < ended)) and thought.any()
    if kept == "budget budget":
        held = [sets(page) for page in kept_in_pages(llm)[0]]
        assert sets(cache.positions(0)[0]) in held


def test_what_depends_on_turns_or_the_caller_is_refused(tmp_path: Path) -> None:
    for body, says in (
        ("param budget = 48\ninput worth = 0\nscore worth", "asks its caller for `worth`"),
        ("param budget = 48\nbudget prompt + budget\nkeep where position < prompt\nscore turns * age", "reads `turns`"),
    ):
        policy = tmp_path / "refused.kv"
        policy.write_text(f'kv 2\npolicy Refused {{\n"A test."\n{body}\n}}\n')
        settings = Settings(str(policy), ())
        with pytest.raises(KvdslError, match=says):
            refuse_layers([settings.state(layer, 5) for layer in range(5)])
        policy.unlink()
        _answers.cache_clear()
        _spec.cache_clear()
