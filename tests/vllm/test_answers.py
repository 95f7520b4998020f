"""Prompts in vLLM's own blocks, which requests share, and answers under a policy: what each request gets is what it gets in transformers,
beside any other requests, however its prompt is cut into parts, and after it lost its blocks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.answer_attention import AnswerAttention
from kvdsl.integrations.vllm.blocks import AnswerSpec
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.assets import reference_model_path
from tests.vllm.alone import NEAR, alone, params, reference
from tests.vllm.conftest import bound_to_processors
from tests.vllm.test_lora import RANK, adapt
from tests.vllm.texts import drawn

KEPT, NEW = 12, 40
"""Tokens of an answer that stay, and those that are generated."""

POLICIES = ("roco_easykv", "h2o_answer", "random_answer", "recent_answer")
LENGTHS = (1, 9, 47, 130, 301)
SIZE = 16
"""Tokens of a block."""


def engine(policy: str | None, at_once: int = 96, model: Path | None = None, dtype: str = "float32", **more: Any) -> LLM:
    asked = {} if policy is None else {"additional_config": {"kvdsl": {"policy": policy, **params(policy)}}}
    return LLM(
        str(model or reference_model_path()), dtype=dtype, max_num_batched_tokens=at_once,
        **{"max_num_seqs": 8, "max_model_len": 512, "enforce_eager": True, "block_size": SIZE if policy else 2 * SIZE, **asked, **more},
    )  # fmt: skip


def wanted(new: int = NEW, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, logprobs=0, ignore_eos=True, **more)


def texts() -> list[list[int]]:
    return [drawn(length) for length in LENGTHS]


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def layers(llm: LLM) -> list[AnswerAttention]:
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    parts = (layer.impl for layer in runner.compilation_config.static_forward_context.values() if hasattr(layer, "impl"))
    return [impl for impl in parts if isinstance(impl, AnswerAttention) and impl.serves_policy]


def blocks_of(llm: LLM, request: Any) -> list[int]:
    """A request's, in the layers that the policy serves; without a policy in the first ones."""
    here = scheduler(llm)
    groups = here.kv_cache_config.kv_cache_groups
    served = next((number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, AnswerSpec)), 0)
    return list(here.kv_cache_manager.get_block_ids(request.request_id)[served])


class Served:
    """Requests in one engine, step by step.

    Attributes:
        held: by request, and by how many tokens of its answer it had read, what each layer held of these, by number: sets of places, a KV
            head each.
        steps: how many there were.
    """

    def __init__(self, llm: LLM, during: Callable[[Served], None] | None = None) -> None:
        self.llm, self.during, self.steps = llm, during, 0
        self.held: dict[str, dict[int, dict[int, list[list[int]]]]] = {}
        self.outputs: dict[str, Any] = {}

    def add(self, name: str, text: list[int], asked: SamplingParams | None = None, **more: Any) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": text}, asked or wanted(), **more)

    def run(self) -> Served:
        core, here = self.llm.llm_engine, scheduler(self.llm)
        while core.has_unfinished_requests():
            where = {one.request_id: one for one in here.running}
            for out in core.step():
                if out.finished:
                    self.outputs[out.request_id] = out
            for one in where.values():
                blocks = blocks_of(self.llm, one)
                if one in here.running and one.num_output_tokens >= 2 and one.num_computed_tokens == one.num_tokens - 1:
                    self.note(one.request_id.partition("-")[0], one.num_output_tokens - 1, blocks, one.num_prompt_tokens)
            self.steps += 1
            if self.during is not None:
                self.during(self)
        return self

    def note(self, name: str, read: int, blocks: list[int], prompt: int) -> None:
        served = layers(self.llm)
        if not served:  # an engine without a policy
            return
        state = blocks[-(-prompt // scheduler(self.llm).block_size)]
        self.held.setdefault(name, {})[read] = {
            layer.number: [sorted(place for place in head.tolist() if place >= 0) for head in layer.held(state)]
            for layer in served
        }


def check(policy: str, served: Served, texts: dict[str, list[int]], model: Any = None, near: float = NEAR) -> None:
    """That log-probabilities and what is held of an answer are those of the request alone."""
    for name, text in texts.items():
        answer = served.outputs[name].outputs[0]
        assert farthest(answer, text, policy, model) < near, name
        if name in served.held:
            compare_held(policy, text, list(answer.token_ids), served.held[name], model or reference()[0])


def farthest(answer: Any, text: list[int], policy: str, model: Any = None) -> float:
    """How much a log-probability of an answer differs from transformers' at most."""
    tokens = list(answer.token_ids)
    found = [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]
    expected, _ = alone(policy, text, tokens, model)
    return float(np.abs(np.array(found) - expected).max())


def compare_held(
    policy: str, text: list[int], tokens: list[int], held: dict[int, dict[int, list[list[int]]]], model: Any
) -> None:
    """That an answer holds at every step what it holds in transformers, but where two tokens are alike to the last digits.

    A head of the model that comes with kvdsl-lab gives its newest token but one all it has: sums of attention are alike there. Which of two
    leaves is a matter of the order in which numbers are added up, which differs.
    """
    made = kvdsl.load(policy)(model, **params(policy))
    parted, known = set[tuple[int, int]](), {}
    with torch.no_grad():
        model(torch.tensor([text]), **with_cache(made))
        for read, token in enumerate(tokens[: max(held)], 1):
            model(torch.tensor([[token]]), **with_cache(made))
            for layer, heads in held.get(read, {}).items():
                position, columns = made.positions(layer)[0], made.layers[layer].state.columns[:, 0]
                for head, ours in enumerate(heads):
                    here = {
                        int(place): columns[:, head, slot] for slot, place in enumerate(position[head]) if place >= len(text)
                    }
                    assert int((position[head] >= 0).sum()) == len(text) + len(here)
                    if (layer, head) not in parted and sorted(here) != ours:
                        (theirs,), (own,) = here.keys() - {*ours}, {*ours} - here.keys()
                        before = known[layer, head]
                        assert torch.allclose(before[theirs], before[own], rtol=2e-6, atol=0), (layer, head, theirs, own)
                        parted.add((layer, head))
                    known[layer, head] = here
    assert len(parted) <= 1


@pytest.fixture(scope="module", params=POLICIES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    llm = engine(request.param)
    yield request.param, llm
    del llm
    gc.collect()


def everyone(llm: LLM, during: Callable[[Served], None] | None = None) -> tuple[Served, dict[str, list[int]]]:
    named = {f"r{len(text)}": text for text in texts()}
    found = Served(llm, during)
    for name, text in named.items():
        found.add(name, text)
    return found.run(), named


def nothing_is_lost(llm: LLM) -> bool:
    pool = scheduler(llm).kv_cache_manager.block_pool
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)


def test_requests_together_are_what_they_are_alone(served: tuple[str, LLM]) -> None:
    """Prompts come in parts of at most 96 tokens; then once more, when they are in the cache."""
    policy, llm = served
    llm.reset_prefix_cache()
    for hits in (0, sum((length - 1) // SIZE * SIZE for length in LENGTHS)):
        found, named = everyone(llm)
        check(policy, found, named)
        assert len(found.held) == len(named)
        assert sum(out.num_cached_tokens for out in found.outputs.values()) == hits
    assert nothing_is_lost(llm)


def test_a_prompt_that_begins_as_another_shares_its_blocks(served: tuple[str, LLM]) -> None:
    policy, llm = served
    llm.reset_prefix_cache()
    common = drawn(130)
    named = {"first": [*common, *drawn(9)], "second": [*common, *drawn(47)]}
    found = Served(llm)
    for name, text in named.items():
        found.add(name, text)
        found.run()
    check(policy, found, named)
    assert found.outputs["second"].num_cached_tokens == 128


def test_an_answer_is_not_lent(served: tuple[str, LLM]) -> None:
    """A second turn finds the first one's prompt, and reads its answer anew, which the policy has cut."""
    policy, llm = served
    llm.reset_prefix_cache()
    first = Served(llm)
    first.add("first", drawn(47))
    first.run()
    text = [*drawn(47), *first.outputs["first"].outputs[0].token_ids, *drawn(9)]
    second = Served(llm)
    second.add("second", text)
    check(policy, second.run(), {"second": text})
    assert second.outputs["second"].num_cached_tokens == 32


def test_requests_beside_some_that_are_aborted(served: tuple[str, LLM]) -> None:
    """One amid its prompt, one amid its answer; their blocks are free for others at once."""
    policy, llm = served
    llm.reset_prefix_cache()

    def during(served: Served) -> None:
        if served.steps == 1:
            served.add("prompt", drawn(250))
            served.add("answer", drawn(7))
        if served.steps in (3, 18):
            served.llm.llm_engine.abort_request(["prompt" if served.steps == 3 else "answer"])

    found, named = everyone(llm, during)
    assert {"prompt", "answer"}.isdisjoint(found.outputs)
    check(policy, found, named)
    assert nothing_is_lost(llm)


def test_requests_that_lose_their_blocks_go_on_as_if_they_had_not(served: tuple[str, LLM]) -> None:
    """Twice: an answer is read again through the policy, several of its tokens in one step, behind what is found of the prompt."""
    policy, llm = served

    def during(served: Served) -> None:
        if served.steps in (16, 30):
            assert served.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    found, named = everyone(llm, during)
    check(policy, found, named)
    assert nothing_is_lost(llm)


def test_who_is_preempted_finds_its_prompt_and_not_its_answer_in_anothers(served: tuple[str, LLM]) -> None:
    """The other one's prompt has this one's answer in it, as full attention makes it."""
    policy, llm = served
    llm.reset_prefix_cache()
    text = drawn(128)

    def during(served: Served) -> None:
        here = scheduler(served.llm)
        one = next((one for one in here.requests.values() if one.request_id.startswith("r128")), None)
        if served.steps == 34 and one is not None:
            served.add("other", list(one.all_token_ids), wanted(2))
        if served.steps == 37 and one is not None:
            here.running.remove(one)
            here._preempt_request(one, 0.0)
            assert here.kv_cache_manager.get_computed_blocks(one)[1] == 128

    found = Served(llm, during)
    found.add("r128", text)
    found.run()
    assert "other" in found.outputs
    check(policy, found, {"r128": text})


def test_another_policy_says_other_things(served: tuple[str, LLM]) -> None:
    """The comparisons above can fail: under full attention the same text is another, as soon as somebody has left."""
    _, llm = served
    found = Served(llm)
    found.add("r47", drawn(47))
    answer = found.run().outputs["r47"].outputs[0]
    tokens = list(answer.token_ids)
    thought = np.array([step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)])
    model, _ = reference()
    with torch.no_grad():
        logits = model(torch.tensor([drawn(47) + tokens])).logits[0, 46:-1].log_softmax(-1)
    full = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    assert np.abs(thought - full).max() > 100 * NEAR
    assert np.abs(thought - full)[: KEPT + 1].max() < NEAR  # nobody has left yet


def test_several_answers_and_stop_strings(served: tuple[str, LLM]) -> None:
    policy, llm = served
    llm.reset_prefix_cache()
    three = SamplingParams(n=3, max_tokens=24, temperature=1.0, seed=None, logprobs=0, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": drawn(47)}], three, use_tqdm=False)[0]
    assert all(farthest(one, drawn(47), policy) < NEAR for one in out.outputs)
    (whole,) = llm.generate([{"prompt_token_ids": drawn(9)}], wanted(), use_tqdm=False)
    text = whole.outputs[0].text
    end = text[len(text) // 2 : len(text) // 2 + 4]
    (cut,) = llm.generate([{"prompt_token_ids": drawn(9)}], wanted(stop=[end]), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(end)]
    assert nothing_is_lost(llm)


def test_blocks_stop_growing_and_who_runs_keeps_them() -> None:
    """A small pool: an answer has its blocks as soon as its prompt has ended, so that nobody is preempted amid one; priorities hold."""
    llm = engine(
        "h2o_answer", max_model_len=352, num_gpu_blocks_override=27, scheduling_policy="priority", disable_log_stats=False
    )
    counts: dict[str, set[int]] = {}

    def during(served: Served) -> None:
        for one in scheduler(served.llm).running:
            if one.num_output_tokens:
                blocks = blocks_of(served.llm, one)
                counts.setdefault(one.request_id.partition("-")[0], set()).add(len(blocks))

    found = Served(llm, during)
    named = {f"r{len(text)}": text for text in texts()}
    for urgency, (name, text) in enumerate(reversed(named.items())):
        found.add(name, text, priority=urgency)
    found.run()
    check("h2o_answer", found, named)
    answer = 1 + -(-(KEPT + 1) // SIZE)
    assert counts == {name: {-(-len(text) // SIZE) + answer} for name, text in named.items()}
    assert next(iter(found.outputs)) == "r301"
    assert sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions") == 0
    assert nothing_is_lost(llm)


@pytest.mark.parametrize("at_once", [33, 512])
def test_whatever_the_parts_of_a_prompt(at_once: int) -> None:
    llm = engine("roco_easykv", at_once)
    found, named = everyone(llm)
    check("roco_easykv", found, named)


@pytest.mark.parametrize("policy", ["random_answer", "roco_easykv"])
def test_another_model(policy: str, tmp_path: Path) -> None:
    """Heads of other sizes, each KV head for itself, in blocks of vLLM's own size."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=512, initializer_range=0.12,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    llm = engine(policy, model=tmp_path, skip_tokenizer_init=True, block_size=None)
    found, named = everyone(llm)
    check(policy, found, named, model)


COMPILED = """
import json
from tests.vllm.test_answers import drawn, engine, wanted
if __name__ == "__main__":
    llm = engine("roco_easykv", enforce_eager=False, block_size=None)
    for _ in range(2):
        answers = llm.generate([{"prompt_token_ids": drawn(n)} for n in (9, 130, 301)], wanted(), use_tqdm=False)
    found = [[list(a.outputs[0].token_ids), [s[t].logprob for t, s in zip(a.outputs[0].token_ids, a.outputs[0].logprobs)]] for a in answers]
    print("told:", json.dumps([found, sum(a.num_cached_tokens for a in answers)]))
"""


def test_compiled_around_attention_and_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As `vllm serve` does it."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found, hits = json.loads(done.stdout.rpartition("told: ")[2])
    assert hits == 128 + 288  # in blocks of 32 tokens
    for length, (tokens, thought) in zip((9, 130, 301), found, strict=True):
        expected, _ = alone("roco_easykv", drawn(length), tokens)
        assert np.abs(np.array(thought) - expected).max() < NEAR


def test_two_processes_are_what_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head draws numbers of its own, which its number in the whole layer decides; prompts are found in both processes' blocks."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound_to_processors(2))
    llm = engine("random_answer", tensor_parallel_size=2)
    for hits in (0, 128 + 288):
        asked = [drawn(130), drawn(301)]
        answers = llm.generate([{"prompt_token_ids": text} for text in asked], wanted(), use_tqdm=False)
        assert sum(one.num_cached_tokens for one in answers) == hits
        for text, one in zip(asked, answers, strict=True):
            _compare_alone("random_answer", text, one)


def test_requests_with_an_adapter_share_prompts_among_themselves(tmp_path: Path) -> None:
    merged = adapt(tmp_path)
    llm = engine("recent_answer", enable_lora=True, max_lora_rank=RANK, max_loras=2)
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    for hits in (0, 128):
        for lora, model in ((adapter, merged), (None, reference()[0])):
            (one,) = llm.generate([{"prompt_token_ids": drawn(130)}], wanted(), lora_request=lora, use_tqdm=False)
            assert one.num_cached_tokens == hits
            _compare_alone("recent_answer", drawn(130), one, model)


def _compare_alone(policy: str, text: list[int], out: Any, model: Any = None) -> None:
    assert farthest(out.outputs[0], text, policy, model) < NEAR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_say_nearly_what_they_say_in_transformers(dtype: str) -> None:
    """As near as full attention is to transformers in that dtype, twice."""
    from kvdsl.assets import load_reference_model

    model = load_reference_model(getattr(torch, dtype))[0]
    far = {}
    for policy in (None, "random_answer"):
        llm = engine(policy, dtype=dtype)
        found, named = everyone(llm)
        far[policy] = max(_difference(found, name, text, policy or "full", model) for name, text in named.items())
        del llm
        gc.collect()
    assert 0 < far["random_answer"] < 2 * far[None]


def _difference(found: Served, name: str, text: list[int], policy: str, model: Any) -> float:
    answer = found.outputs[name].outputs[0]
    expected, _ = alone(policy, text, list(answer.token_ids), model)
    thought = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
    return float(np.median(np.abs(np.array(thought) - expected)))


def test_an_engine_without_a_policy_before_and_after_is_untouched() -> None:
    """In one process: an answer's blocks are hashed and found again there, and what is said is what is said without kvdsl."""

    def said(llm: LLM) -> tuple[list[int], list[float], int]:
        first = llm.generate([{"prompt_token_ids": drawn(47)}], wanted(), use_tqdm=False)[0].outputs[0]
        tokens = list(first.token_ids)
        again = llm.generate([{"prompt_token_ids": [*drawn(47), *tokens, 7]}], wanted(2), use_tqdm=False)[0]
        thought = [step[token].logprob for token, step in zip(tokens, first.logprobs, strict=True)]
        return tokens, thought, again.num_cached_tokens

    before = engine(None)  # in blocks of 32 tokens, which vLLM's own attention wants
    heard = said(before)
    assert heard[2] == 64
    ours = engine("h2o_answer")
    found = Served(ours)
    found.add("r47", drawn(47))
    check("h2o_answer", found.run(), {"r47": drawn(47)})
    after = engine(None)
    assert said(after) == heard
    before.reset_prefix_cache()
    assert said(before) == heard


def test_kv_events_tell_of_prompts_alone() -> None:
    """Who routes requests by them finds whole blocks of prompts, and hears when they are given up."""
    llm = engine(
        "h2o_answer", kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}, num_gpu_blocks_override=40
    )
    told: list[Any] = []
    scheduler(llm).kv_event_publisher.publish = lambda batch: told.extend(batch.events)
    found, named = everyone(llm)
    check("h2o_answer", found, named)
    stored = [one for one in told if isinstance(one, BlockStored)]
    assert sum(len(one.block_hashes) for one in stored) == sum(len(text) // SIZE for text in named.values())
    told_of = sorted(tuple(one.token_ids[at : at + SIZE]) for one in stored for at in range(0, len(one.token_ids), SIZE))
    whole = (text[at : at + SIZE] for text in named.values() for at in range(0, len(text) // SIZE * SIZE, SIZE))
    assert told_of == sorted(map(tuple, whole))
    gone = {number for one in told if isinstance(one, BlockRemoved) for number in one.block_hashes}
    assert gone <= {number for one in stored for number in one.block_hashes}


def test_async_scheduling_is_left_to_vllm() -> None:
    """It says that it has none on CPUs, or answers are what they are without."""
    llm = engine("h2o_answer", async_scheduling=True)
    found, named = everyone(llm)
    check("h2o_answer", found, named)


def test_a_prompt_that_goes_on_behind_its_answer_is_refused(served: tuple[str, LLM]) -> None:
    """vLLM's streamed input makes a prompt of what was answered; its blocks have lost tokens."""
    _, llm = served
    llm.llm_engine.add_request("grows", {"prompt_token_ids": drawn(47)}, wanted())
    for _ in range(3):
        llm.llm_engine.step()
    (one,) = scheduler(llm).running
    manager = scheduler(llm).kv_cache_manager.coordinator.single_type_managers[0]
    with pytest.raises(KvdslError, match="goes on behind an answer"):
        manager.remove_skipped_blocks(one.request_id, 50, 53)
    llm.llm_engine.abort_request(["grows"])
    assert nothing_is_lost(llm)


REFUSED = [
    ({"policy": "raas", "generated": 64}, {}, "line 19: `score .*over slots where position >= prompt"),
    ({"policy": "h2o_answer", "budget": 0.25}, {}, "a ratio of each prompt"),
    ({"policy": "roco_easykv", "generated": 1}, {}, "may protect more of an answer"),
    ({"policy": "h2o_answer", "budget": 64}, {"kv_cache_dtype": "bfloat16"}, "leave --kv-cache-dtype out"),
    ({"policy": "h2o_answer", "budget": 64}, {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
     "cannot be sent by a KV connector: leave --kv-transfer-config out"),
    ({"policy": "h2o_answer", "budget": 64}, {"kv_offloading_size": 1.0}, "cannot be sent by a KV connector"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "more", "why"), REFUSED, ids=str)
def test_refusals(asked: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        engine(None, **{"block_size": SIZE, **more}, additional_config={"kvdsl": asked})


def test_the_block_size_that_is_named_is_large_enough() -> None:
    asked = {"additional_config": {"kvdsl": {"policy": "roco_easykv", "generated": 1000}}, "max_model_len": 1100}
    with pytest.raises(KvdslError, match="--block-size") as caught:
        engine("roco_easykv", **asked)
    size = int(str(caught.value).partition("--block-size ")[2].partition(",")[0])
    for given, own in (({}, -(-size // 32) * 32), ({"generated": 12}, 32)):
        found = {"kvdsl": {"policy": "roco_easykv", "generated": 1000, **given}}
        llm = engine("roco_easykv", block_size=None, **{**asked, "additional_config": found})
        assert scheduler(llm).kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size == own
    llm = engine("roco_easykv", block_size=size, **asked)
    assert scheduler(llm).kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size == size
    with pytest.raises(KvdslError, match=f"--block-size {size}"):
        engine("roco_easykv", block_size=size - SIZE, **asked)
