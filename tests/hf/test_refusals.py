"""What cannot work is refused with one clear line, and the model is left as it was."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.hf.versions import cache_of, with_cache
from tests.hf import policies, zoo


def cache_for(model: Any, **options: Any) -> Any:
    """A cache of a policy that observes attention."""
    return policies.make(policies.OBSERVING, model, **{"budget": 16, **options})


@contextmanager
def refused(match: str) -> Iterator[pytest.ExceptionInfo[KvdslError]]:
    """A KvdslError is raised, with a short message of one line."""
    with pytest.raises(KvdslError, match=match) as error:
        yield error
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


# -- models ------------------------------------------------------------------------------------------------------------

OUT_OF_REACH: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: zoo.NOT_YET[family] for family in ("gptj", "codegen") if family in zoo.NOT_YET},
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "gpt_neo": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
    "xglm": ("XGLM", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
}


@pytest.mark.parametrize("family", OUT_OF_REACH)
def test_attention_that_cannot_be_reached(family: str) -> None:
    stem, extra = OUT_OF_REACH[family]
    model = zoo.make(stem, **extra)
    own = model.config._attn_implementation
    with refused(f"{type(model).__name__} cannot be reached"):
        cache_for(model)
    assert model.config._attn_implementation == own


def test_chunked_attention() -> None:
    model = zoo.make("Llama4Text", head_dim=16, intermediate_size_mlp=64, num_local_experts=1, attention_chunk_size=16)
    with refused("chunk"):
        cache_for(model)


def test_compressed_latents() -> None:
    """DeepSeek's cached latents become keys after caching; releases up to 5.12 cache expanded keys, which works."""
    sizes = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    model = zoo.make("DeepseekV3", **sizes, **experts, num_key_value_heads=4)
    own = model.config._attn_implementation
    latents: list[bool] = []

    class Tap(transformers.DynamicCache):
        def update(self, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            latents.append(key.shape[1] == 1)
            return super().update(key, *args, **kwargs)

    model(zoo.prompt(1, 4), **with_cache(Tap()))
    if not latents[0]:
        assert cache_for(model).managed == [0, 1]
        return
    with refused("did not reach"):
        cache_for(model)
    assert model.config._attn_implementation == own
    model(zoo.prompt(1, 4))


def test_encoder_decoder() -> None:
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with refused("encoder-decoder"):
        cache_for(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("thing", ["gpt2", None, 3, torch.nn.Linear(2, 2), transformers.LlamaForCausalLM])
def test_what_is_no_model(thing: Any) -> None:
    with refused("must be a transformers model"):
        cache_for(thing)


def test_float64_model() -> None:
    with refused(r"float64.*float32, bfloat16, float16"):
        cache_for(zoo.make("Llama").double())


@pytest.mark.parametrize(("stem", "masks", "told"), [
    ("Mistral", "create_causal_mask", "masked to see the whole text, but .* would give it 8 tokens in layer 0"),
    ("Llama", "create_sliding_window_causal_mask", "masked to see 8 tokens, but .* would give it the whole text in layer 0"),
])  # fmt: skip
def test_a_mask_with_another_window_than_the_cache(
    stem: str, masks: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Moshi's, whose prompt sees the whole text and whose tokens behind it see a window; text within it would not show that."""
    modeling = importlib.import_module(f"transformers.models.{stem.lower()}.modeling_{stem.lower()}")
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(modeling, name, getattr(masking_utils, masks), raising=False)
    model = zoo.make(stem, sliding_window=8, **({"layer_types": ["full_attention"] * 2} if stem == "Llama" else {}))
    own = model.config._attn_implementation
    with refused(f"cannot be served: {stem}Attention is {told}"):
        cache_for(model)
    assert model.config._attn_implementation == own


@pytest.mark.skipif(not hasattr(transformers, "MiniMaxM3VLTextConfig"), reason="this release does not know the model")
def test_layers_that_choose_blocks() -> None:
    """They stay transformers' own, with the mask that they make of the one for the layers that are managed."""
    blocks = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 16}
    kinds = ["full_attention", "minimax_m3_sparse"]
    config = transformers.MiniMaxM3VLTextConfig(**{**zoo._SMALL, **blocks, **experts, "layer_types": kinds})
    modeling = importlib.import_module("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    torch.manual_seed(7)
    model = modeling.MiniMaxM3VLForCausalLM(config).eval()
    rows = zoo.prompt(2, 40)
    inputs = zoo.left_padded([rows[0], rows[1, :21]])
    cache = policies.make("full", model)
    assert cache.managed == [0]
    theirs = zoo.greedy(model, inputs, 12, cache=transformers.DynamicCache(config=config))
    zoo.assert_same_text(zoo.greedy(model, inputs, 12, cache=cache), theirs)


class _Unfaithful(transformers.LlamaForCausalLM):
    """Reaches attention, but with something on top that kvdsl cannot know: the self-test must notice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if isinstance(cache_of(kwargs), KVCache):
            out.logits = out.logits.flip(-1)
        return out


def test_self_test_compares_logits() -> None:
    model = _Unfaithful(zoo.model("llama").config.__class__(**zoo.untouched("llama").config.to_dict())).eval()
    own = model.config._attn_implementation
    with refused("differ by"):
        cache_for(model)
    assert model.config._attn_implementation == own


# -- params ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -1, -0.5, 1.5, 64.5, math.nan, math.inf, "abc", "512", True, [512], 2 + 1j])
def test_budgets_that_are_none(budget: Any) -> None:
    with refused(r"budget.*number of tokens"):
        cache_for(zoo.model("llama"), budget=budget)


def test_keeps_that_exceed_the_budget() -> None:
    with refused(r"protects 300 tokens.*holds 16"):
        cache_for(zoo.model("llama"), recent=300)
    late = cache_for(zoo.model("llama"), budget=0.25, recent=10)  # fits a prompt of 40 tokens and more
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 60)), 2, cache=late)
    late.reset()
    with refused(r"protects 10 tokens.*holds 5"):
        zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 20)), 2, cache=late)
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 60)), 2, cache=late)


def test_keeps_that_exceed_the_budget_of_a_layer() -> None:
    """The layer is named, and the smallest budget that would do."""
    model = zoo.make("Llama", num_hidden_layers=4)
    with refused(r"holds 3 in layer 3 of 4; raise the budget to at least 640 tokens"):
        zoo.greedy(model, zoo.plain(zoo.prompt(1, 100)), 2, cache=policies.cache_class("pyramidkv")(model, budget=64))
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 100)), 2, cache=policies.cache_class("pyramidkv")(model, budget=640))


def test_unknown_param_and_backend() -> None:
    with pytest.raises(TypeError, match="bugdet"):
        cache_for(zoo.model("llama"), bugdet=3)
    with refused("backend `cuda-graphs`"):
        cache_for(zoo.model("llama"), backend="cuda-graphs")


# -- ways of use -------------------------------------------------------------------------------------------------------


def test_output_attentions() -> None:
    model = zoo.model("llama")
    options = {"max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True}
    with pytest.raises((KvdslError, ValueError), match="output_attentions"):
        model.generate(**zoo.plain(zoo.prompt(1, 9)), **options, **with_cache(cache_for(model)))
    with pytest.raises((KvdslError, ValueError), match="output_attentions"):
        model(zoo.prompt(1, 9), **with_cache(cache_for(model)), output_attentions=True)


def test_attention_in_both_directions() -> None:
    model = zoo.make("Llama")
    cache = cache_for(model)
    model.model.layers[1].self_attn.is_causal = False
    with refused("attends in both directions"):
        model(zoo.prompt(1, 6), **with_cache(cache))


def used(family: str = "llama", length: int = 20) -> tuple[Any, Any]:
    """A model and a cache that has text in it: 20 tokens of a prompt and 5 of 6 generated."""
    model = zoo.model(family)
    cache = cache_for(model)
    zoo.greedy(model, zoo.plain(zoo.prompt(1, length)), 6, cache=cache)
    return model, cache


@pytest.mark.parametrize("length", [2, 12, 13, 24, 25])
def test_unrelated_prompt_that_is_not_longer(length: int) -> None:
    model, cache = used()
    with pytest.raises((KvdslError, IndexError), match=r"reset|out of bounds") as error:
        zoo.greedy(model, zoo.plain(zoo.prompt(1, length, seed=9)), 3, cache=cache)
    if not zoo.EARLY:  # these stop before they ask the cache
        assert "reset()" in str(error.value)
    cache.reset()
    zoo.greedy(model, zoo.plain(zoo.prompt(1, length, seed=9)), 3, cache=cache)


def test_unrelated_prompt_in_a_bare_forward() -> None:
    model, cache = used()
    ids = zoo.prompt(1, 7)
    with refused(r"mask covers 7.*25 are cached.*reset\(\)"):
        model(ids, attention_mask=torch.ones_like(ids), **with_cache(cache))
    with refused(r"does not continue.*reset\(\)"):
        model(ids, position_ids=torch.arange(7)[None], **with_cache(cache))
    model(ids, **with_cache(cache))  # says nothing about its place, so it continues


def test_padding_that_was_padding_when_it_came_is_left_out_again() -> None:
    model = zoo.model("llama")
    cache, ids, mask = cache_for(model), zoo.prompt(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :6] = mask[0, 18:20] = 0
    for start, end in ((0, 20), (20, 24), (24, 25)):
        model(ids[:, start:end], attention_mask=mask[:, :end], **with_cache(cache))
    mask[1, 12] = 0
    with pytest.raises(KvdslError, match="row 1 of the attention mask leaves out 1 of 19 tokens"):
        model(ids[:, 25:], attention_mask=mask, **with_cache(cache))


def test_a_row_that_ended_early_cannot_be_gone_on_with() -> None:
    """What `generate` wrote behind a row's end is cached; a mask that says it is padding comes too late."""
    model = zoo.model("llama")
    cache, prompts = cache_for(model), zoo.prompt(2, 12)
    written = zoo.greedy(model, zoo.plain(prompts), 8, cache=cache)[0]
    text = torch.cat([prompts, written, zoo.prompt(2, 5, seed=3)], 1)
    mask = torch.ones_like(text)
    mask[0, 15:20] = 0
    with pytest.raises(KvdslError, match=r"row 0 .* leaves out 4 of 19"):
        zoo.greedy(model, {"input_ids": text, "attention_mask": mask}, 3, cache=cache)


def test_a_prompt_that_was_refused_leaves_nothing() -> None:
    """Of what a policy scores over the whole text, too: the next prompt's tokens are all that it sees."""
    model = zoo.model("llama")
    fresh, late = (policies.cache_class("expected_attention")(model, budget=0.1) for _ in range(2))
    with pytest.raises(KvdslError, match="protects"):
        zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 2, cache=late)
    for cache in (late, fresh):
        zoo.greedy(model, zoo.plain(zoo.prompt(1, 200, seed=3)), 2, cache=cache)
    assert all(late.positions(layer).equal(fresh.positions(layer)) for layer in range(2))


@pytest.mark.parametrize("share", ["0.25", "0.25 * prompt"])
def test_a_share_by_default_of_a_prompt_of_one_token(share: str) -> None:
    model = zoo.model("llama")
    text = f'kv 1\npolicy Mine {{\n  "A test."\n  param budget = {share}\n  score position\n}}\n'
    cache = kvdsl.compile(text)(model)
    with refused("`budget` of Mine is by default a ratio of the prompt, and one token has come"):
        zoo.greedy(model, zoo.plain(zoo.prompt(1, 1)), 4, cache=cache)
    cache.reset()
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 4, cache=cache)
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 1)), 4, cache=kvdsl.compile(text)(model, budget=1))


@pytest.mark.parametrize("seed", [1.5, "a", -1, 2**32, True])
def test_a_seed_is_a_whole_number_of_32_bits(seed: Any) -> None:
    with pytest.raises(KvdslError, match=r"`seed` is .*; give a whole number in 0\.\.4294967295"):
        policies.cache_class("h2o")(zoo.model("llama"), budget=8, seed=seed)


def test_a_share_of_a_row_of_one_token() -> None:
    """Beside a longer row, too: it would hold a single token for ever. A row of which nothing comes is no text."""
    model, ids, mask = zoo.model("llama"), zoo.prompt(3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[1, :19] = mask[2] = 0
    cache = policies.cache_class("h2o")(model, budget=0.5)
    with torch.no_grad():
        model(ids, attention_mask=mask, **with_cache(cache))
        with pytest.raises(
            KvdslError, match=r"is 0\.5, a ratio of the prompt, and one token has come as the prompt of row 1:"
        ):
            model(ids[:, :1], attention_mask=torch.cat((mask, torch.ones(3, 1)), 1), **with_cache(cache))
        cache.reset()
        mask[1, :18] = 1
        model(ids, attention_mask=mask, **with_cache(cache))
        for _ in range(3):
            mask = torch.cat((mask, torch.tensor([[1], [1], [0]])), 1)
            model(ids[:, :1], attention_mask=mask, **with_cache(cache))


@pytest.mark.parametrize("chunk", [None, 5])
def test_an_unrelated_longer_prompt(chunk: int | None) -> None:
    """Its beginning is not the text that is cached; where they part is said, also where the rest would come in chunks."""
    model, cache = used()
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    ids = zoo.prompt(1, 40, seed=9)
    ids[:, :13] = zoo.prompt(1, 20)[:, :13]
    differs = int((ids[:, :20] != zoo.prompt(1, 20)).int().argmax())
    where = f"differ in token {differs}: "
    if chunk is not None and zoo.EARLY:  # these run the whole text again, in chunks
        where = "covers 5 tokens, but 25 are cached and 5 are new: pass the mask of the whole text, or "
    with refused(where + r"call `cache\.reset\(\)`"):
        zoo.greedy(model, zoo.plain(ids), 3, cache=cache, **options)
    assert cache.get_seq_length() == 25
    cache.reset()
    zoo.greedy(model, zoo.plain(ids), 3, cache=cache, **options)


@pytest.mark.skipif(zoo.EARLY, reason="earlier releases of transformers run the whole text again, which is refused")
def test_a_text_goes_on_in_chunks() -> None:
    model = zoo.model("llama")
    whole, cut = (cache_for(model, budget=64) for _ in range(2))
    text = zoo.plain(zoo.prompt(1, 20))
    more = torch.cat([model.generate(**text, **with_cache(whole), max_new_tokens=4), zoo.prompt(1, 9, seed=3)], 1)
    model.generate(**text, **with_cache(cut), max_new_tokens=4)
    plain = zoo.greedy(model, zoo.plain(more), 4, cache=whole)
    zoo.assert_same_text(zoo.greedy(model, zoo.plain(more), 4, cache=cut, prefill_chunk_size=5), plain)


def test_unrelated_embeddings() -> None:
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"))
    embedded = [model.get_input_embeddings()(zoo.prompt(1, length, seed=seed)) for length, seed in ((12, 1), (20, 9))]
    model.generate(inputs_embeds=embedded[0], **with_cache(cache), max_new_tokens=3)
    with pytest.raises(KvdslError, match="differ in token 0"):
        model.generate(inputs_embeds=embedded[1], **with_cache(cache), max_new_tokens=3)


def test_texts_that_continue_whatever_happened_between() -> None:
    """Tokens that came without `generate`, in a compiled forward, or to the model's inner part are not known, and not asked for."""
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"), budget=64)
    ids = zoo.prompt(2, 60)
    with torch.no_grad():
        model(ids[:, :10], **with_cache(cache))
        model.model(ids[:, 10:20], **with_cache(cache))
        model(input_ids=ids[:, 20:22], **with_cache(cache))
    out = model.generate(ids[:, :30], **with_cache(cache), max_new_tokens=3)
    cache.reorder_cache(torch.tensor([1, 0]))
    out = out[[1, 0]]
    out = model.generate(torch.cat([out, ids[:, 30:34]], 1), **with_cache(cache), max_new_tokens=3)
    changed = out.clone()
    changed[1, 31] += 1
    with pytest.raises(KvdslError, match="differ in token 31"):
        model.generate(torch.cat([changed, ids[:, 34:40]], 1), **with_cache(cache), max_new_tokens=3)
    cache.reset()
    several = model.generate(ids[:1, :30], **with_cache(cache), max_new_tokens=3, do_sample=True, num_return_sequences=2)
    model.generate(torch.cat([several, ids[:, 34:40]], 1), **with_cache(cache), max_new_tokens=3)


def test_a_text_that_beam_search_has_returned() -> None:
    """The cache's rows are other beams; where one of them holds the text, its number is said, and that is all it takes to go on."""
    model, seen = zoo.model("llama"), set()
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    for seed in range(4):
        cache, prompt, question = (
            policies.make("full", model),
            zoo.prompt(1, 20, seed=40 + seed),
            zoo.prompt(1, 4, seed=80 + seed),
        )
        text = torch.cat([model.generate(**zoo.plain(prompt), **options, **with_cache(cache)), question], 1)
        expected = model.generate(**zoo.plain(text), **options)
        try:
            found = model.generate(**zoo.plain(text), **options, **with_cache(cache))
        except KvdslError as error:
            told = re.search(r"call `cache\.batch_select_indices\(torch\.tensor\((\[.*?\])\)\)` first", str(error))
            assert len(str(error)) < 400
            assert told or "beam search does not always leave the text that it returns in the cache" in str(error)
            seen.add(told is None)
            cache.batch_select_indices(torch.tensor(json.loads(told[1]))) if told else cache.reset()
            found = model.generate(**zoo.plain(text), **options, **with_cache(cache))
        assert torch.equal(found, expected)
    assert seen == {True, False}


def test_rows_that_have_changed_places() -> None:
    """A text of every row is cached, and in which one is said; also for fewer rows than the cache holds."""
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"), budget=64)
    out = model.generate(**zoo.plain(zoo.prompt(2, 20)), **with_cache(cache), max_new_tokens=3, do_sample=False)
    text = torch.cat([out, zoo.prompt(2, 4, seed=9)], 1)
    for rows in ([1, 0], [1]):
        with pytest.raises(KvdslError, match=rf"continues other rows.*torch\.tensor\({re.escape(str(rows))}\)"):
            zoo.greedy(model, zoo.plain(text[rows]), 3, cache=cache)
    cache.batch_select_indices(torch.tensor([1]))
    zoo.greedy(model, zoo.plain(text[1:]), 3, cache=cache)


def test_padding_on_the_right() -> None:
    """Named when the prompt comes, with a mask or without; to score a prompt it may be there."""
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"))
    ids, mask = zoo.prompt(2, 18), torch.ones(2, 18, dtype=torch.long)
    ids[1, -4:] = mask[1, -4:] = 0
    for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}):
        with refused(r"row 1 .* padded on the right.*pad on the left"):
            model.generate(**inputs, **with_cache(cache), max_new_tokens=3)
    assert cache.get_seq_length() == 0
    model(ids, attention_mask=mask, **with_cache(cache))


def test_a_prompt_that_ends_in_the_pad_token() -> None:
    """One row has nothing to be padded to, so that without a mask the token is text; at the front, pad tokens are padding."""
    model = zoo.model("llama")
    ids = zoo.prompt(1, 18)
    ids[0, -2:] = 0
    found = model.generate(ids, **with_cache(cache_for(model)), max_new_tokens=4, do_sample=False)
    expected = model.generate(**zoo.plain(ids), **with_cache(cache_for(model)), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    found = model.generate(padded, **with_cache(cache_for(model)), max_new_tokens=4, do_sample=False)
    assert torch.equal(found[:, 3:], expected)


def test_generation_without_a_cache_but_with_one() -> None:
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"))
    with refused(r"`use_cache=False`.*leave out one"):
        model.generate(zoo.prompt(1, 9), **with_cache(cache), use_cache=False, max_new_tokens=3)


def test_another_batch() -> None:
    model, cache = used()
    with refused(r"holds 1 rows.*2 came.*reset\(\)"):
        model(zoo.prompt(2, 3), **with_cache(cache))
    cache.reset()
    model(zoo.prompt(2, 3), **with_cache(cache))


def test_another_model() -> None:
    model, cache = zoo.model("llama"), cache_for(zoo.model("llama"))
    bound = zoo.make("Llama")
    own = cache_for(bound)
    with refused("made for another model"):
        bound(zoo.prompt(1, 5), **with_cache(cache))
    bound(zoo.prompt(1, 5), **with_cache(own))
    cache.reset()
    with refused("made for another model"):
        zoo.untouched("llama")(zoo.prompt(1, 5), **with_cache(cache))
    cache.reset()
    model(zoo.prompt(1, 5), **with_cache(cache))


def test_released_model() -> None:
    model = zoo.make("Llama")
    cache = cache_for(model)
    type(cache).release(model)
    with refused("`release` was called for the cache's model"):
        model(zoo.prompt(1, 5), **with_cache(cache))


def test_interrupted_forward() -> None:
    model = zoo.make("Llama")
    cache = cache_for(model)
    model(zoo.prompt(1, 5), **with_cache(cache))

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].mlp.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(zoo.prompt(1, 1), **with_cache(cache))
    hook.remove()
    with refused(r"interrupted.*reset\(\)"):
        model(zoo.prompt(1, 1), **with_cache(cache))
    cache.reset()
    model(zoo.prompt(1, 5), **with_cache(cache))


def test_dropout() -> None:
    model = zoo.make("Llama", attention_dropout=0.3)
    cache = cache_for(model)
    model.train()
    with refused(r"dropout.*eval\(\)"):
        model(zoo.prompt(1, 5), **with_cache(cache))


def test_questions_about_nothing() -> None:
    cache = cache_for(zoo.model("gemma2"))
    with refused("nothing is cached"):
        cache.positions(1)
    with refused("layer 0 is transformers' own"):
        cache.state(0)
    with refused("no layer 7"):
        cache.positions(7)


def test_offloading() -> None:
    _, cache = used()
    with refused("offloading"):
        cache.offload(0)
