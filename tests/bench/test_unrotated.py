"""Llama without rotation, and with a bias that grows with the distance: policies in place say what they say with a cache that is
shifted for every token (EQUIP, appendices D.4 and B.3), and what the model itself says with a mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.bench.shapes import shaped_model
from kvdsl_lab.bench.shifting import ShiftedCache, twin
from kvdsl_lab.bench.unrotated import bias, is_rotated, slopes, without_rotation
from kvdsl_lab.eval.recording import record
from tests.hf import zoo

BUDGET, STEPS = 12, 40
COMPACT = {"streaming_llm": {"sinks": 2}, "equip_streaming": {"sinks": 2}, "equip_h2o": {"recent": 5}}


def model(*, biased: bool, layers: int = 2) -> Any:
    made = without_rotation(shaped_model(f"tiny:{layers}"), biased=biased)
    made.generation_config.eos_token_id = None
    return made


def prompt(tokens: int) -> Tensor:
    return torch.randint(128, (2, tokens), generator=torch.Generator().manual_seed(tokens))


def logits(model: Any, cache: Any, ids: Tensor, tokens: Tensor) -> Tensor:
    """Behind the prompt and behind each of the tokens, [1 + tokens, rows, vocabulary]."""
    with torch.inference_mode():
        parts = [ids, *tokens.split(1, dim=1)]
        return torch.stack([model(input_ids=part, **with_cache(cache), use_cache=True).logits[:, -1] for part in parts])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("policy", COMPACT)
def test_in_place_says_what_shift_and_append_says(policy: str, biased: bool, backend: str) -> None:
    made, ids = model(biased=biased), prompt(30)
    other, given = twin(made), {"budget": BUDGET, **COMPACT[policy]}
    ours = kvdsl.load(policy)(made, backend=backend, **given)
    said = made.generate(ids, **with_cache(ours), max_new_tokens=STEPS, do_sample=False)[:, 30:]
    for fresh in (False, True):
        theirs = logits(other, ShiftedCache(other, kvdsl.load(policy).spec, given, fresh=fresh), ids, said[:, :-1])
        assert torch.equal(theirs.argmax(-1).T, said)
        again = kvdsl.load(policy)(made, backend=backend, **given)
        torch.testing.assert_close(logits(made, again, ids, said[:, :-1]), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "equip_h2o"])
def test_a_bias_counts_places_of_the_text_or_of_the_cache(policy: str, backend: str) -> None:
    """Of one layer, whose keys nothing that was evicted has touched: the model's own attention with a mask, or a bias by ranks."""
    made, ids = model(biased=True, layers=1), prompt(50)
    plain = model(biased=True, layers=1)
    cache = kvdsl.load(policy)(made, budget=BUDGET, backend=backend)
    compact = kvdsl.load(policy).spec.compact
    found = logits(made, cache, ids[:, :20], ids[:, 20:40])
    for at in range(40, 50):
        held = cache.positions(0)
        with torch.inference_mode():
            here = made(input_ids=ids[:, at : at + 1], **with_cache(cache), use_cache=True).logits[:, -1]
            mask = torch.stack([torch.stack([_mask(head, at, compact) for head in row]) for row in held])
            mask = mask.repeat_interleave(plain.config.num_attention_heads // mask.shape[1], 1)
            everything = torch.full((*mask.shape[:2], at + 1, at + 1), -torch.inf).triu(1)
            everything[:, :, -1] = mask + (_ranked(held, at) if compact else 0.0)
            expected = plain(input_ids=ids[:, : at + 1], attention_mask=everything, use_cache=False).logits[:, -1]
        torch.testing.assert_close(here, expected, atol=1e-5, rtol=1e-5)
    assert len(found) == 21


def _mask(held: Tensor, at: int, compact: bool) -> Tensor:
    """What a query at `at` adds to the logits of the text's tokens, [at + 1]: those that are not held are hidden."""
    mask = torch.full((at + 1,), -torch.inf)
    mask[held[held >= 0].long()] = 0.0
    mask[at] = 0.0
    return mask


def _ranked(held: Tensor, at: int) -> Tensor:
    """By how much less the bias takes where it counts places in the cache, [rows, heads, at + 1], of tokens that are held."""
    gained = torch.zeros(*held.shape[:2], at + 1)
    for row, heads in enumerate(held):
        for head, positions in enumerate(heads):
            live = positions[positions >= 0].sort().values
            for rank, position in enumerate(live.tolist()):
                gained[row, head, position] = (at - position) - (len(live) - rank)
    by = slopes(4).view(gained.shape[1], -1)
    return (gained[:, :, None] * by[None, :, :, None]).flatten(1, 2)


def test_the_full_cache_is_the_model_itself_also_with_padding() -> None:
    made, ids = model(biased=True), prompt(20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model(biased=True).generate(ids, **options)
    for backend in ("torch", "cpu"):
        cache = kvdsl.load("full")(made, backend=backend)
        assert torch.equal(made.generate(ids, **options, **with_cache(cache)), expected)
    alone = model(biased=True).generate(ids[1:, 7:], max_new_tokens=12, do_sample=False)
    assert torch.equal(expected[1:, 20:], alone[:, 13:])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_compiled_step_is_an_eager_one(backend: str) -> None:
    made, ids = model(biased=True), prompt(20)
    said = []
    for compiled in (False, True):
        cache = kvdsl.load("equip_h2o")(made, budget=BUDGET, recent=5, backend=backend)
        forward = torch.compile(made.forward, fullgraph=True, dynamic=False, backend="eager") if compiled else made
        with torch.no_grad():
            found = [made(ids, **with_cache(cache)).logits[:, -1]]
            for step, token in enumerate(prompt(6).split(1, dim=1)):
                found.append(forward(token, **with_cache(cache), **zoo.place(made, 20 + step)).logits[:, -1])
        said.append(torch.stack(found))
    torch.testing.assert_close(said[1], said[0], atol=1e-5, rtol=1e-5)


def test_recorded_attention_has_the_bias() -> None:
    made, ids = model(biased=True), prompt(20)
    expected: list[Tensor] = []
    plain = model(biased=True)
    for layer in plain.model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, out: expected.append(out[1]))
    with torch.inference_mode():
        plain(ids, use_cache=False)
    for found, weights in zip(record(made, ids), expected, strict=True):
        ours = found.attention(5, 20)
        torch.testing.assert_close(ours, weights[:, :, 5:].unflatten(1, (ours.shape[1], -1)).mean(2), atol=1e-5, rtol=1e-4)


def test_the_bias_matters() -> None:
    """What the other tests compare would show it if a slope were forgotten."""
    ids = prompt(20)
    with torch.inference_mode():
        biased, plain = model(biased=True)(ids).logits, model(biased=False)(ids).logits
    assert not torch.allclose(biased, plain, atol=1e-2)
    assert bias(slopes(8), 1, 3)[0, 0].tolist() == [-1.0, -0.5, 0.0]
    assert not is_rotated(model(biased=False))
    assert is_rotated(shaped_model("tiny:2"))


def test_slopes_that_are_not_one_for_each_head_are_refused() -> None:
    made = model(biased=True)
    cache = kvdsl.load("h2o")(made, budget=BUDGET)
    made.model.layers[1].self_attn.slopes = torch.ones(2, 4)
    with pytest.raises(
        KvdslError, match=r"`alibi_slopes` is \[2, 4\], but a cache of slots takes one for each of 4 query heads"
    ):
        logits(made, cache, prompt(5), prompt(1))


def test_a_model_whose_own_attention_forgets_them_is_refused() -> None:
    """transformers' `sdpa` does not know slopes, so with a cache of ours the model would be another."""
    made = model(biased=True)
    made.set_attn_implementation("sdpa")
    with pytest.raises(KvdslError, match="its logits differ by"):
        kvdsl.load("h2o")(made, budget=BUDGET)


def test_shift_and_append_does_not_know_places_in_the_text() -> None:
    made = model(biased=True)
    other = twin(made)
    cache = ShiftedCache(other, kvdsl.load("h2o").spec, {"budget": BUDGET}, fresh=False)
    with pytest.raises(KvdslError, match="does not know where tokens stood in the text"):
        logits(other, cache, prompt(20), prompt(4))
