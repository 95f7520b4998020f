"""Policies in vLLM do what they do in transformers: the same log-probabilities and the same kept tokens, whoever else is served."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvdsl.integrations.vllm.attention import PolicyAttention
from kvdsl.integrations.vllm.ledger import Ledger
from kvdsl.integrations.vllm.step import SHORT, Batch, Prompt, batches
from kvdsl_lab.assets import reference_model_path
from tests.vllm.alone import NEAR, NEW, alone, params, reference
from tests.vllm.texts import AT_A_TIME, LENGTHS, drawn, prompts

LONGEST = 1024
AT_ONCE = 192
"""Tokens of a step: long prompts come in parts, whose bounds depend on who else is served."""

LAYERS = 5
"""Of the model that comes with kvdsl-lab."""


def engine(
    policy: str | None, at_once: int = AT_ONCE, model: Path | None = None, kv_dtype: str = "model", **more: Any
) -> LLM:
    told = {"policy": policy, "kv_dtype": kv_dtype, **params(policy or "")}
    asked = {} if policy is None else {"additional_config": {"kvdsl": told}}
    return LLM(
        str(model or reference_model_path()), dtype="float32", max_model_len=LONGEST, max_num_batched_tokens=at_once, enforce_eager=True,
        max_num_seqs=len(LENGTHS), **asked, **more,
    )  # fmt: skip


SERVED = [("h2o", LONGEST), ("h2o", AT_ONCE), ("roco", AT_ONCE), ("tova", AT_ONCE), ("streaming_llm", AT_ONCE)]


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    policy, at_once = request.param
    llm = engine(policy, at_once)
    yield policy, llm
    del llm
    gc.collect()


def logprobs(outputs: Any) -> list[tuple[list[int], list[float]]]:
    """Every request's new tokens, and what the engine thought of each."""
    answers = [request.outputs[0] for request in outputs]
    return [(list(one.token_ids), thought_of(one)) for one in answers]


def thought_of(answer: Any) -> list[float]:
    """The log-probability of every token of an answer."""
    return [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def check(
    policy: str,
    texts: list[list[int]],
    answers: Any,
    pages: list[list[torch.Tensor]],
    model: Any = None,
    kv_dtype: str = "model",
) -> int:
    """That answers and pages are what each text gets alone; how many tokens have left."""
    left = 0
    for text, (tokens, found) in zip(texts, answers, strict=True):
        expected, held = alone(policy, text, tokens, model, kv_dtype)
        assert np.abs(np.array(found) - expected).max() < NEAR
        for layer, position in held.items():
            left += (len(text) + len(tokens) - 1) * len(position) - int((position >= 0).sum())
            assert sets(position) in [sets(page) for page in pages[layer]], (
                f"layer {layer} of the text of {len(text)} tokens"
            )
    return left


def kept_in_pages(llm: LLM) -> list[list[torch.Tensor]]:
    """The positions in every page that was ever used, layer by layer."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    parts = runner.compilation_config.static_forward_context.values()
    layers = [
        part.impl for part in parts if isinstance(part, AttentionLayerBase)
    ]  # there are mixtures of experts among them, too
    assert all(isinstance(impl, PolicyAttention) for impl in layers)
    return [[state.position[0] for state in impl.caches.states.values()] for impl in layers]


def sets(position: torch.Tensor) -> list[list[int]]:
    """The tokens that each KV head holds."""
    return [sorted(head[head >= 0].tolist()) for head in position]


def test_requests_together_are_what_they_are_alone(served: tuple[str, LLM]) -> None:
    policy, llm = served
    texts = prompts()
    ledger = Ledger.find(0)
    assert ledger is not None
    before = ledger.evicted
    answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in texts], SamplingParams(
        max_tokens=NEW, temperature=0, logprobs=0, ignore_eos=True), use_tqdm=False))  # fmt: skip
    pages = kept_in_pages(llm)
    assert ledger.evicted - before == check(policy, texts, answers, pages) > 0


@pytest.mark.parametrize("policy", ["full", "quest", "sparcas", "roco_sparcas", "snapkv"])
def test_policies_that_select_or_keep_what_is_decoded(policy: str) -> None:
    """Their pages have slots for the longest text; who comes second into a page gets what it gets alone."""
    llm = engine(policy)
    for texts in (prompts(), prompts()[::-1]):
        answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in texts], wanted(), use_tqdm=False))
        check(policy, texts, answers, kept_in_pages(llm))
    text, (tokens, found) = prompts()[-1], answers[0]
    full, _ = alone("full", text, tokens)
    differs = np.abs(np.array(found) - full).max()
    assert differs < NEAR if policy == "full" else differs > 100 * NEAR


@pytest.mark.parametrize("statement", ["layers 2..", "budget budget + 16 * layer", "prefill blocks of 64"])
def test_what_holds_more_in_some_layers_or_behind_a_prompt(statement: str, tmp_path: Path) -> None:
    policy = tmp_path / "layered.kv"
    policy.write_text(
        f"kv 1\npolicy Layered {{\n  param budget = 48\n  score sum(attn)\n  keep last 0.5 * budget\n  {statement}\n}}\n"
    )
    llm = engine(str(policy))
    answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in prompts()], wanted(), use_tqdm=False))
    assert check(str(policy), prompts(), answers, kept_in_pages(llm)) > 0


def test_short_prompts_are_read_in_one_pass(served: tuple[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them lose tokens, and some do not."""
    policy, llm = served
    texts = [drawn(length) for length in AT_A_TIME]
    together: list[int] = []
    read = PolicyAttention._read

    def noted(self: PolicyAttention, batch: Batch, *rest: Any) -> Any:
        together.append(len(batch.prompts))
        return read(self, batch, *rest)

    monkeypatch.setattr(PolicyAttention, "_read", noted)
    answers = logprobs(llm.generate([{"prompt_token_ids": text} for text in texts], wanted(), use_tqdm=False))
    assert check(policy, texts, answers, kept_in_pages(llm)) > 0
    assert together.count(3) == LAYERS
    assert together.count(2) == (
        LAYERS if llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == LONGEST else 0
    )


def test_which_prompts_are_read_together() -> None:
    def prompt(tokens: int, begins: bool = True, ends: bool = True) -> Prompt:
        return Prompt(0, tokens, 0, begins, ends)

    short = [prompt(1), prompt(64)]
    longer = [prompt(65), prompt(128)]
    rest = [prompt(5, begins=False), prompt(6, ends=False), prompt(SHORT + 1), prompt(SHORT + 2)]
    found = batches([short[0], longer[0], *rest, short[1], longer[1], prompt(SHORT)])
    assert [batch.prompts for batch in found] == [short, longer, *([one] for one in rest), [prompt(SHORT)]]


def test_a_batch_takes_the_tokens_of_its_prompts_and_gives_them_back() -> None:
    step = torch.arange(1, 13).view(12, 1)
    for batch in batches([Prompt(1, 4, 7, True, True), Prompt(6, 8, 5, True, True), Prompt(9, 12, 6, False, True)]):
        got = torch.zeros_like(step)
        batch.into_step(batch.of_step(step), got)
        where = [row for prompt in batch.prompts for row in range(prompt.first, prompt.last)]
        assert got.flatten().nonzero().flatten().tolist() == where
        assert torch.equal(got[where], step[where])


def test_a_page_shows_nothing_of_whom_it_was_before(served: tuple[str, LLM]) -> None:
    """The free slots of every page are made unreadable; a text says what it said before."""
    _, llm = served
    text = [{"prompt_token_ids": prompts()[2]}]
    wanted = SamplingParams(max_tokens=NEW, temperature=0, logprobs=0, ignore_eos=True)
    first = logprobs(llm.generate(text, wanted, use_tqdm=False))
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for kv_cache in runner.kv_caches:
        kv_cache.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, whatever the dtype
    assert logprobs(llm.generate(text, wanted, use_tqdm=False)) == first


def test_another_policy_says_other_things(served: tuple[str, LLM]) -> None:
    """The comparison above can fail: with the full cache the same text is other than under the policy."""
    _, llm = served
    text = prompts()[-1]
    ((tokens, found),) = logprobs(llm.generate([{"prompt_token_ids": text}], SamplingParams(
        max_tokens=NEW, temperature=0, logprobs=0, ignore_eos=True), use_tqdm=False))  # fmt: skip
    model, _ = reference()
    with torch.no_grad():
        logits = model(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1].log_softmax(-1)
    full = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    assert np.abs(np.array(found) - full).max() > 100 * NEAR


def test_several_answers_to_one_prompt(served: tuple[str, LLM]) -> None:
    policy, llm = served
    out = llm.generate([{"prompt_token_ids": prompts()[3]}], SamplingParams(
        n=3, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True), use_tqdm=False)  # fmt: skip
    for one in out[0].outputs:
        wanted, _ = alone(policy, prompts()[3], list(one.token_ids))
        assert np.abs(np.array(thought_of(one)) - wanted).max() < NEAR


def wanted(new: int = NEW) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, logprobs=0, ignore_eos=True)


def test_requests_that_lose_their_pages_go_on_as_if_they_had_not(served: tuple[str, LLM]) -> None:
    """Twice all pages are taken away: each request reads its prompt again, and its answer so far token by token."""
    policy, llm = served
    core = llm.llm_engine
    for name, text in enumerate(prompts()):
        core.add_request(str(name), {"prompt_token_ids": text}, wanted())
    answers, taken = {}, 0
    while core.has_unfinished_requests():
        answers |= {int(out.request_id): out for out in core.step() if out.finished}
        if taken < 2 and answered(llm) >= 8 * (taken + 1):
            assert core.reset_prefix_cache(reset_running_requests=True)
            taken += 1
    assert taken == 2
    for name, text in enumerate(prompts()):
        tokens, found = logprobs([answers[name]])[0]
        assert np.abs(np.array(found) - alone(policy, text, tokens)[0]).max() < NEAR


def answered(llm: LLM) -> int:
    """How many tokens have come of the answer that has most of them."""
    running = llm.llm_engine.engine_core.engine_core.scheduler.running
    return max((request.num_output_tokens for request in running), default=0)


def test_an_answer_read_as_part_of_a_prompt_is_another(served: tuple[str, LLM]) -> None:
    """The test above can fail: read as one prompt, the same tokens leave other ones in the cache."""
    policy, llm = served
    if policy == "streaming_llm":
        pytest.skip("who stays depends on positions alone, so the same tokens stay either way")
    text = prompts()[3]
    ((tokens, _),) = logprobs(llm.generate([{"prompt_token_ids": text}], wanted(), use_tqdm=False))
    found, _ = alone(policy, text, tokens)
    as_prompt, _ = alone(policy, text + tokens[:16], tokens[16:])
    assert np.abs(np.array(found[16:]) - as_prompt).max() > 100 * NEAR


def test_who_is_urgent_is_answered_first_and_nobody_loses_a_page() -> None:
    """Two pages for six requests: who has one keeps it, since none ever needs a second."""
    llm = engine("h2o", scheduling_policy="priority", num_gpu_blocks_override=3)
    core, urgency = llm.llm_engine, [5, 4, 3, 0, 1, 2]
    for name, (text, priority) in enumerate(zip(prompts(), urgency, strict=True)):
        core.add_request(str(name), {"prompt_token_ids": text}, wanted(), priority=priority)
    answers = {}
    while core.has_unfinished_requests():
        assert len(core.engine_core.engine_core.scheduler.running) <= 2
        answers |= {int(out.request_id): out for out in core.step() if out.finished}
    assert [sorted(list(answers)[at : at + 2]) for at in (0, 2, 4)] == [[3, 4], [2, 5], [0, 1]]
    for name, text in enumerate(prompts()):
        tokens, found = logprobs([answers[name]])[0]
        assert np.abs(np.array(found) - alone("h2o", text, tokens)[0]).max() < NEAR


@pytest.mark.parametrize(
    ("asked", "more", "said"),
    [
        ({"policy": "h2o", "budget": 0.25}, {}, "a ratio of each prompt"),
        ({"policy": "snapkv", "budget": 0.5}, {}, "a ratio of each prompt"),
        ({"policy": "adakv", "budget": 64}, {}, "shares a budget"),
        ({"policy": "kvzap", "budget": 256}, {}, "asks its caller for `importance`"),
        ({"policy": "h2o", "budgt": 64}, {}, "has no param `budgt`"),
        ({"policy": "h2o", "budget": "64"}, {}, "params are numbers"),
        ({"budget": 64}, {}, "names no policy"),
        ({"policy": "h2o", "budget": 64}, {"kv_cache_dtype": "bfloat16"}, "leave --kv-cache-dtype out"),
        ({"policy": "h2o", "budget": 64, "kv_dtype": "int2"}, {}, "use `model`, `int8`, `int4` or `fp8`"),
        ({"policy": "h2o_answer", "budget": 64, "kv_dtype": "int8"}, {}, "in vLLM's own blocks, in the model's dtype"),
    ],
)  # fmt: skip
def test_refusals(asked: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        LLM(
            str(reference_model_path()), dtype="float32", enforce_eager=True, additional_config={"kvdsl": asked},
            **{"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST, **more},
        )  # fmt: skip


ASKED = """
from tests.vllm.test_serving import engine
for policy in (None, "h2o", None, "h2o_answer", "h2o"):
    llm = engine(policy)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = [layer.impl for layer in runner.compilation_config.static_forward_context.values()]
    print("layers of", *{type(layer).__module__.rpartition(".")[2] for layer in layers})
"""


def test_every_engine_of_a_process_has_the_attention_that_it_asks_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import tests.vllm.conftest\n{ASKED}"], capture_output=True, text=True, check=True
    )
    found = [line.removeprefix("layers of ") for line in done.stdout.splitlines() if line.startswith("layers of ")]
    assert found == ["cpu_attn", "attention", "cpu_attn", "answer_attention", "attention"], done.stdout + done.stderr
