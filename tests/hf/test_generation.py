"""What `generate` can do: chat, sampling, beams, streams, pipelines, prompts in chunks, embeddings."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer, pipeline

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import policies, zoo
from tests.quick import few

BUDGETS = [12, 200]


def caches(budget: int, count: int = 1, family: str = "llama") -> list[Any]:
    """Fresh caches of a policy that observes attention."""
    return [policies.make(policies.OBSERVING, zoo.model(family), budget=budget) for _ in range(count)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w100."""
    words = {f"w{index}": index for index in range(zoo.VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2")


# -- chat --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(["llama", "gemma2", "mistral-windowed"], "llama"))
def test_chat_on_one_cache_is_the_whole_text(family: str) -> None:
    model, other = zoo.model(family), zoo.untouched(family)
    cache = policies.make(policies.OBSERVING, model, budget=200)
    text = zoo.prompt(1, 14)
    for turn in range(3):
        theirs = zoo.greedy(other, zoo.plain(text), 6)
        ours = zoo.greedy(model, zoo.plain(text), 6, cache=cache)
        zoo.assert_same_text(ours, theirs)
        text = torch.cat([text, theirs[0], zoo.prompt(1, 5, seed=turn + 20)], 1)
    assert cache.get_seq_length() == text.shape[1] - 6


@pytest.mark.parametrize("policy", few(policies.NAMES, "h2o", "streaming_llm"))
def test_chat_with_left_padding(policy: str) -> None:
    model, other = zoo.model("llama"), zoo.untouched("llama")
    cache = policies.make(policy, model, budget=200)
    rows = zoo.prompt(2, 14)
    inputs = zoo.left_padded([rows[0], rows[1, :8]])
    for turn in range(2):
        theirs = zoo.greedy(other, inputs, 6)
        zoo.assert_same_text(zoo.greedy(model, inputs, 6, cache=cache), theirs)
        ids = torch.cat([inputs["input_ids"], theirs[0], zoo.prompt(2, 5, seed=turn)], 1)
        more = torch.ones(2, ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], more], 1)}


def test_padding_between_two_turns() -> None:
    """Rows whose second prompts differ in length are padded in the middle of their texts."""
    model, other = zoo.model("llama"), zoo.untouched("llama")
    first, second = zoo.prompt(2, 14), zoo.prompt(2, 6, seed=2)
    masks = torch.ones(2, 20, dtype=torch.long)
    masks[1, :4], masks[0, 14:17] = 0, 0
    ours, theirs = caches(200)[0], DynamicCache()
    for begin, end, ids in ((0, 14, first), (14, 20, second)):
        mask = masks[:, :end]
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        with torch.no_grad():
            found = model(ids, attention_mask=mask, position_ids=positions, **with_cache(ours)).logits
            expected = other(ids, attention_mask=mask, position_ids=positions, **with_cache(theirs)).logits
        assert (found - expected)[masks[:, begin:end].bool()].abs().max() < 1e-4


def forwards(cache: Any, ids: Tensor, *ends: int) -> Tensor:
    """Run a text in forwards that end there: the logits of the last one."""
    model, begin = zoo.model("llama"), 0
    with torch.no_grad():
        for end in ends:
            logits: Tensor = model(ids[:, begin:end], **with_cache(cache)).logits
            begin = end
    return logits


def held(cache: Any, row: int = 0) -> list[int]:
    """How many tokens each KV head of the first layer holds."""
    return [int(count) for count in (cache.positions(0)[row] >= 0).sum(-1)]


def test_a_rate_is_of_all_tokens_up_to_the_last_prompts_end() -> None:
    """A greeting of 4 tokens, 3 that were generated, a document of 53: half of 60. And what is generated makes no room."""
    (cache,) = caches(0.5)
    ids = zoo.prompt(1, 70)
    forwards(cache, ids, 4, 5, 6, 7)
    assert held(cache) == [2, 2]
    forwards_from(cache, ids, 7, 60)
    assert held(cache) == [30, 30]
    forwards_from(cache, ids, 60, *range(61, 71))
    assert held(cache) == [30, 30]


def forwards_from(cache: Any, ids: Tensor, begin: int, *ends: int) -> None:
    """Go on with a text."""
    forwards(cache, ids[:, begin:], *(end - begin for end in ends))


def test_a_later_prompt_is_one() -> None:
    """Its tokens attend to each other before any leaves, as if all had come at once, and not one by one."""
    whole, cut, single = caches(12, 3)
    ids = zoo.prompt(1, 30)
    prompt = forwards(whole, ids, 30)[:, -1]
    for before in ([1], [10], [9, 10]):  # all of which fits
        cut.reset()
        assert (forwards(cut, ids, *before, 30)[:, -1] - prompt).abs().max() < 1e-4
        assert cut.positions(0).equal(whole.positions(0))
    assert (forwards(single, ids, *range(1, 31))[:, -1] - prompt).abs().max() > 1e-2


@pytest.mark.parametrize("noted", [False, True])
def test_a_text_that_is_scored_acts_as_if_its_tokens_came_one_by_one(noted: bool) -> None:
    whole, single = caches(12, 2)
    if noted:
        whole.activate_past_recording(9)
    ids = zoo.prompt(1, 30)
    with whole.one_by_one():
        together = forwards(whole, ids, 20, 29)
    forwards(single, ids, 20)
    steps = [forwards(single, ids[:, at:], 1) for at in range(20, 29)]
    assert (together - torch.cat(steps, 1)).abs().max() < 1e-4
    assert whole.positions(0).sort(-1).values.equal(single.positions(0).sort(-1).values)
    if noted:
        whole.crop(-9)
    forwards(whole, ids[:, 20:], 10)  # a prompt again
    assert held(whole) == [12, 12]


def test_a_row_without_a_new_token_keeps_its_rate() -> None:
    (cache,) = caches(0.5)
    first, second = zoo.prompt(2, 20), zoo.prompt(2, 12, seed=3)
    mask = torch.ones(2, 34, dtype=torch.long)
    mask[1, 22:] = 0
    with torch.no_grad():
        for ids, end in ((first, 20), (second[:, :1], 21), (second[:, 1:2], 22), (second, 34)):
            positions = (mask[:, :end].cumsum(1) - 1)[:, end - ids.shape[1] :]
            zoo.model("llama")(ids, attention_mask=mask[:, :end], position_ids=positions, **with_cache(cache))
    assert (held(cache, 0), held(cache, 1)) == ([17, 17], [10, 10])


def test_a_prompt_that_comes_token_by_token_has_no_rate() -> None:
    (cache,) = caches(0.25)
    options = {"cache": cache, "prefill_chunk_size": 1}
    with pytest.raises(
        KvdslError, match=r"is 0.25, a ratio of the prompt, and one token has come.*`prefill_chunk_size` of 2"
    ):
        zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 20)), 4, **options)
    cache.reset()
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 20)), 4, cache=cache, prefill_chunk_size=2)
    assert held(cache) == ([4, 4] if zoo.EARLY else [5, 5])  # earlier releases pass the last token alone, which is decoded
    with pytest.raises(KvdslError, match=r"call `cache.reset\(\)` first"):
        cache.expect_prompt(20)
    cache.reset()
    cache.expect_prompt(20)
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 20)), 4, **options)
    assert held(cache) == [5, 5]


@pytest.mark.parametrize("tokens", [0, -3, True, 2.5, "all"])
def test_lengths_that_no_prompt_has(tokens: Any) -> None:
    with pytest.raises(KvdslError, match="give how many tokens the prompt will have"):
        caches(0.25)[0].expect_prompt(tokens)


def test_tensors_that_fit_a_later_prompt_stay_where_they_are() -> None:
    """So that a graph of the first turn serves the next."""
    (cache,) = caches(12)
    ids = zoo.prompt(1, 60)
    state = cache.layers[0].state
    forwards(cache, ids, 20, 21)
    before = {name: tensor.data_ptr() for name, tensor in state.tensors().items()}
    forwards_from(cache, ids, 21, 50, 51)
    assert {name: tensor.data_ptr() for name, tensor in state.tensors().items()} == before


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_who_evicts_in_prompts_does_so_in_later_ones(policy: str) -> None:
    cache = policies.cache_class(policy)(zoo.model("llama"), budget=40)
    ids = zoo.prompt(1, 200)
    forwards(cache, ids, 100, 101, 102)
    assert sum(held(cache)) == 2 * 42
    forwards_from(cache, ids, 102, 190)
    assert sum(held(cache)) == 2 * 40
    forwards_from(cache, ids, 190, 191, 192)
    assert sum(held(cache)) == 2 * 42


# -- ways of choosing tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returned", [1, 3])
def test_beams(returned: int) -> None:
    rows = zoo.prompt(2, 15)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "num_return_sequences": returned}
    theirs = zoo.untouched("llama").generate(**inputs, **options)
    ours = zoo.model("llama").generate(**inputs, **options, **with_cache(caches(200)[0]))
    assert ours.tolist() == theirs.tolist()


@torch.no_grad()
def test_beams_under_eviction_score_what_a_single_run_of_their_text_scores() -> None:
    """Each beam's slots must follow its own ancestors: replaying the winner alone gives its score."""
    model, (cache, replay) = zoo.model("llama"), caches(12, 2)
    ids = zoo.prompt(1, 25)
    options = {"max_new_tokens": 12, "num_beams": 4, "do_sample": False, "length_penalty": 0.0}
    out = model.generate(**zoo.plain(ids), **options, **with_cache(cache), return_dict_in_generate=True, output_scores=True)
    text, total = out.sequences, 0.0
    logits = model(ids, **with_cache(replay)).logits[:, -1]
    for at in range(ids.shape[1], text.shape[1]):
        total += float(logits.log_softmax(-1)[0, text[0, at]])
        logits = model(text[:, at : at + 1], **with_cache(replay)).logits[:, -1]
    assert abs(total - float(out.sequences_scores[0])) < 1e-3


def test_several_sequences_per_prompt() -> None:
    ids = zoo.prompt(1, 15)
    options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 4}
    other, model, cache = zoo.untouched("llama"), zoo.model("llama"), caches(200)[0]  # what makes a model sets the seed
    torch.manual_seed(5)
    theirs = other.generate(**zoo.plain(ids), **options)
    torch.manual_seed(5)
    ours = model.generate(**zoo.plain(ids), **options, **with_cache(cache))
    assert ours.tolist() == theirs.tolist()


# -- ways of giving and taking text ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_streamers() -> None:
    ids, tok = zoo.prompt(1, 15), tokenizer()
    plain = zoo.model("llama").generate(**zoo.plain(ids), max_new_tokens=9, do_sample=False, **with_cache(caches(12)[0]))
    streamer = TextIteratorStreamer(tok, skip_prompt=True)
    zoo.model("llama").generate(
        **zoo.plain(ids), max_new_tokens=9, do_sample=False, **with_cache(caches(12)[0]), streamer=streamer
    )
    assert "".join(streamer).split() == tok.decode(plain[0, 15:]).split()
    assert issubclass(TextIteratorStreamer, TextStreamer)


@pytest.mark.nightly
def test_pipeline() -> None:
    tok = tokenizer()
    prompt = " ".join(f"w{index}" for index in zoo.prompt(1, 15)[0].tolist())
    results = []
    for model, cache in ((zoo.untouched("llama"), None), (zoo.model("llama"), caches(200)[0])):
        generator = pipeline("text-generation", model=model, tokenizer=tok)
        more = {} if cache is None else with_cache(cache)
        results.append(generator(prompt, max_new_tokens=8, do_sample=False, **more)[0]["generated_text"])
    assert results[0] == results[1]
    assert results[1].count("w") == 23


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_prompt_in_chunks(chunk: int) -> None:
    rows = zoo.prompt(2, 23)
    inputs = zoo.left_padded([rows[0], rows[1, :15]])
    theirs = zoo.greedy(
        zoo.untouched("llama"), inputs, 8, cache=DynamicCache(), prefill_chunk_size=chunk
    )  # 4.57 itself forgets the padding's positions here
    ours = zoo.greedy(zoo.model("llama"), inputs, 8, cache=caches(200)[0], prefill_chunk_size=chunk)
    zoo.assert_same_text(ours, theirs)


def test_prompt_of_embeddings() -> None:
    ids = zoo.prompt(1, 15)
    model, other = zoo.model("llama"), zoo.untouched("llama")
    theirs = other.generate(inputs_embeds=other.get_input_embeddings()(ids), max_new_tokens=8, do_sample=False)
    ours = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=8, do_sample=False, **with_cache(caches(200)[0])
    )
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_prompts(length: int) -> None:
    inputs = zoo.plain(zoo.prompt(2, length))
    theirs = zoo.greedy(zoo.untouched("llama"), inputs, 8)
    zoo.assert_same_text(zoo.greedy(zoo.model("llama"), inputs, 8, cache=caches(200)[0]), theirs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_modes_may_change_between_calls(budget: int) -> None:
    """Slots written in inference mode are updated without it, and with gradients on."""
    model, (mixed, plain) = zoo.model("llama"), caches(budget, 2)
    ids = zoo.prompt(1, 20)
    with torch.inference_mode():
        model(ids[:, :15], **with_cache(mixed))
    for at in range(15, 20):
        with torch.set_grad_enabled(at % 2 == 0):
            last = model(ids[:, at : at + 1], **with_cache(mixed)).logits
    with torch.no_grad():
        model(ids[:, :15], **with_cache(plain))
        for at in range(15, 20):
            expected = model(ids[:, at : at + 1], **with_cache(plain)).logits
    assert (last - expected).abs().max() < 1e-5
    assert not any(getattr(mixed.layers[0].state, name).requires_grad for name in ("keys", "values", "columns"))


def test_gradients_are_refused_when_asked_for() -> None:
    """A forward without `no_grad` is right; a backward through it, by whatever way, says that there is none. And no graph is kept."""
    model, ids = zoo.make("Llama"), zoo.prompt(1, 20)
    cache = policies.make(policies.OBSERVING, model, budget=12)
    graph: list[Any] = []  # of which the residual stream would be part
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: graph.append(weakref.ref(args[-1])))
    logits = [model(ids, **with_cache(cache)).logits, model(ids[:, :1], **with_cache(cache)).logits]
    for found in logits:
        for weights in (model.model.embed_tokens.weight, model.model.layers[-1].self_attn.q_proj.weight):
            with pytest.raises(KvdslError, match=r"gradients do not pass.*`torch\.no_grad\(\)`"):
                torch.autograd.grad(found.sum(), weights, retain_graph=True)
        with pytest.raises(KvdslError, match="gradients do not pass"):
            found.sum().backward()
    assert all(weights.grad is None for weights in model.model.layers[0].parameters())
    del logits, found
    assert len(graph) >= 2
    assert all(hidden() is None for hidden in graph)

    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)  # behind all attention, of which it needs no gradient
    cache.reset()
    model(ids[:, :1], **with_cache(cache)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    embedded = model.get_input_embeddings()(ids[:, :1]).requires_grad_(True)
    with pytest.raises(KvdslError, match="gradients do not pass"):
        model(inputs_embeds=embedded, **with_cache(cache)).logits.sum().backward()


def trained(model: Any, *weights: Tensor) -> Any:
    """The model with these weights alone to be trained."""
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_gradients_of_what_an_earlier_forward_cached_are_refused(backend: str) -> None:
    """A soft prompt, and behind it text that asks for none of the cache's: the graph of the first forward is gone."""
    model, ids = zoo.make("Llama"), zoo.prompt(1, 6)
    trained(model, model.lm_head.weight)
    soft = model.get_input_embeddings()(ids).requires_grad_(True)
    cache = policies.make(policies.OBSERVING, model, budget=12, backend=backend)
    model(inputs_embeds=soft, **with_cache(cache))
    for held in (cache, copy.deepcopy(cache), copy.copy(cache)):
        found = model(ids, **with_cache(held)).logits  # right, as long as nobody asks
        with pytest.raises(KvdslError, match=r"gradients do not pass.*those that filled it"):
            found.sum().backward()
    assert soft.grad is None
    loaded = pickle.loads(pickle.dumps(cache))  # of another process, for all that it knows
    loaded.attach(model)
    cache.reset()
    for held in (loaded, cache):
        model.lm_head.weight.grad = None
        model(ids, **with_cache(held)).logits.sum().backward()
        assert model.lm_head.weight.grad is not None


def test_gradients_are_not_of_what_was_cached_without() -> None:
    """What came under `no_grad`, or asked for nothing, stands in nobody's way."""
    model, ids = zoo.make("Llama"), zoo.prompt(1, 6)
    cache = policies.make(policies.OBSERVING, model, budget=12)
    with torch.no_grad():
        model(ids, **with_cache(cache))
    trained(model, model.lm_head.weight)
    model(ids, **with_cache(cache))
    model(ids, **with_cache(cache)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_gradients_of_sinks_are_refused() -> None:
    """They enter with the attention's softmax, and nothing else of it may be trained."""
    types = ["full_attention"] * 2
    model = zoo.make("GptOss", head_dim=16, num_local_experts=2, num_experts_per_tok=1, layer_types=types)
    ids, last = zoo.prompt(1, 9), model.model.layers[-1].self_attn.sinks
    trained(model, last, model.lm_head.weight)
    cache = policies.make(policies.OBSERVING, model, budget=12)
    logits = [model(ids, **with_cache(cache)).logits, model(ids[:, :1], **with_cache(cache)).logits]
    for found in logits:
        with pytest.raises(KvdslError, match="gradients do not pass"):
            torch.autograd.grad(found.sum(), last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = zoo.make("Llama").to(dtype)
    inputs = zoo.plain(zoo.prompt(2, 20))
    theirs = zoo.greedy(model, inputs, 1)
    cache = policies.make(policies.OBSERVING, model, budget=200)
    ours = zoo.greedy(model, inputs, 1, cache=cache)
    assert (ours[1] - theirs[1]).abs().max() < 0.1 * theirs[1].abs().max()
    assert cache.layers[0].state.keys.dtype == dtype
    small = policies.make(policies.OBSERVING, model, budget=8)
    zoo.greedy(model, inputs, 6, cache=small)
    assert (small.positions(0) >= 0).sum(-1).unique().tolist() == [8]


def test_autocast() -> None:
    model, cache = zoo.model("llama"), caches(12)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, logits = zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 6, cache=cache)
    assert torch.isfinite(logits).all()
    assert cache.layers[0].state.keys.dtype == torch.bfloat16


def test_right_padding_in_one_forward() -> None:
    """Not what `generate` is for, but a scoring forward may do it."""
    model, other = zoo.model("llama"), zoo.untouched("llama")
    ids = zoo.prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, **with_cache(caches(200)[0])).logits
        theirs = other(ids, attention_mask=mask).logits
    assert (ours - theirs)[mask.bool()].abs().max() < 1e-4


def test_copied_cache_continues_one_prompt_several_times() -> None:
    model, shared = zoo.model("gemma2"), caches(12, family="gemma2")[0]
    ids = zoo.prompt(1, 25)
    with torch.no_grad():
        model(ids, **with_cache(shared))
        branches = [copy.deepcopy(shared) for _ in range(2)]
        before = shared.positions(1)
        first = [model(ids[:, at : at + 1], **with_cache(branches[0])).logits for at in range(6)]
        second = [model(ids[:, at : at + 1], **with_cache(branches[1])).logits for at in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(shared.positions(1), before)
    assert shared.get_seq_length() == 25


def test_what_is_cached_keeps_its_dtype() -> None:
    """A forward in another dtype (autocast on or off in between) must not be read as the cache's bytes."""
    model = zoo.model("llama")
    ids = torch.arange(12)[None] % 50
    for first, second in ((True, False), (False, True)):
        (cache,) = caches(8)
        with torch.no_grad():
            for autocast, part in ((first, ids[:, :10]), (second, ids[:, 10:11]), (second, ids[:, 11:])):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(part, **with_cache(cache)).logits
        assert logits.isfinite().all()
        assert logits.abs().sum() > 0


def test_sampling() -> None:
    ids = zoo.prompt(2, 15)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}
    untouched, model, cache = zoo.untouched("llama"), zoo.model("llama"), caches(200)[0]  # making a model seeds torch
    torch.manual_seed(3)
    theirs = untouched.generate(**zoo.plain(ids), **options)
    torch.manual_seed(3)
    ours = model.generate(**zoo.plain(ids), **options, **with_cache(cache))
    assert ours.tolist() == theirs.tolist()
