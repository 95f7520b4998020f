"""Tokens that are taken back: cropping, assisted decoding and prompt lookup say and keep what plain greedy decoding does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import can_roll_back, with_cache
from tests.hf import policies, zoo
from tests.hf.test_eviction import kept
from tests.hf.test_refusals import refused
from tests.quick import few

POLICIES: dict[str, dict[str, float]] = {
    "h2o": {"budget": 12},
    "roco": {"budget": 12},
    "streaming_llm": {"budget": 12},
    "lazy_streaming": {"budget": 12, "R": 5, "sigma": 3, "delta": 2},
    "halves": {"budget": 12, "recent": 4},
    "vatp_scissorhands": {"budget": 12, "sinks": 2, "history": 8},
    "snapkv": {"budget": 34},
    "sparcas": {"tokens": 9, "dims": 4},
    "full": {},
    "lazy_eviction": {"budget": 12, "window": 3, "alpha": 0.1},
    "gkv": {"budget": 12, "window": 3, "buffer": 2},
}
NEW = 24
PAIRS = [(family, name) for family in ("llama", "mistral-windowed", "gpt_neox") for name in ("h2o", "halves", "roco")]


def cache_for(name: str, family: str = "llama", backend: str = "auto") -> Any:
    return policies.cache_class(name)(zoo.model(family), **POLICIES[name], backend=backend)


def repetitive() -> Tensor:
    """A prompt in which there is something to look up."""
    return zoo.prompt(1, 7).repeat(1, 6)


def generate(family: str, cache: Any, **how: Any) -> Tensor:
    """New tokens; the end of the text is a token that never comes, without which transformers 4.57 looks nothing up."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": zoo.VOCAB + 1, **how}
    inputs = zoo.plain(repetitive())
    if "prompt_lookup_num_tokens" in how or "assistant_model" in how:
        cache.activate_past_recording()  # as transformers 5 does by itself
    return zoo.model(family).generate(**inputs, **options, **with_cache(cache))[0, 42:]


def guesser(family: str) -> Any:
    """An assistant that guesses right now and then, so that some tokens are taken back and some stay."""
    model = copy.deepcopy(zoo.untouched(family))
    make = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.01 * weights.std().nan_to_num() * torch.randn(weights.shape, generator=make)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def same(found: Any, expected: Any) -> None:
    """Two caches that have seen one text, however it came in."""
    assert found.get_seq_length() == expected.get_seq_length()
    assert kept(found, 0) == kept(expected, 0)
    for layer in expected.managed:
        live = expected.positions(layer) >= 0
        theirs = expected.state(layer)
        for name, column in found.state(layer).items():
            order, other = (c.positions(layer).argsort(-1) for c in (found, expected))
            close = torch.isclose(_in_order(column, order), _in_order(theirs[name], other), atol=1e-4, equal_nan=True)
            assert close[live.gather(-1, other)].all(), name


def _in_order(column: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A column of numbers, or a ring, slot by slot in this order."""
    return torch.take_along_dim(column, order.view(*order.shape, *[1] * (column.dim() - order.dim())), 2)


FOLDS = ("lazy_eviction", "gkv")
"""These run on torch only."""

SERVED = [(name, backend) for name in POLICIES for backend in ("torch", "cpu") if backend == "torch" or name not in FOLDS]


@pytest.mark.parametrize(("name", "backend"), few(SERVED, ("roco", "cpu"), ("halves", "cpu"), ("gkv", "torch")))
def test_prompt_lookup_is_plain_decoding(name: str, backend: str) -> None:
    plain, looked_up = cache_for(name, backend=backend), cache_for(name, backend=backend)
    found = generate("llama", looked_up, prompt_lookup_num_tokens=5)  # transformers 4.57 may go a few tokens too far
    assert torch.equal(found, generate("llama", plain, max_new_tokens=len(found)))
    same(looked_up, plain)


@pytest.mark.parametrize(("family", "name"), few(PAIRS, ("gpt_neox", "h2o")))
def test_an_assistant_is_plain_decoding(family: str, name: str) -> None:
    if family == "mistral-windowed" and zoo.WINDOWS_STUMBLE:
        pytest.skip("the assistant's own cache, which is transformers', fails")
    plain, assisted = cache_for(name, family), cache_for(name, family)
    removed: list[int] = []
    crop = assisted.crop

    def noted(tokens: int) -> None:
        removed.append(assisted.layers[0].undo.to_remove(assisted.get_seq_length(), tokens))
        crop(tokens)

    assisted.crop = noted
    found = generate(family, assisted, assistant_model=guesser(family))
    assert torch.equal(found, generate(family, plain, max_new_tokens=len(found)))
    same(assisted, plain)
    assert any(removed), "no guess was ever wrong"
    assert len(removed) < NEW - 1, "no guess was ever right"


def longer(model: Any, cache: Any) -> dict[str, Tensor]:
    """A turn of a chat, and the next one's text."""
    said = model.generate(**zoo.plain(repetitive()), max_new_tokens=6, do_sample=False, **with_cache(cache))
    return zoo.plain(torch.cat([said, repetitive()[:, :9]], 1))


@pytest.mark.parametrize("stem", ["Llama", "Persimmon"])  # the latter tells attention no positions
@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_guesses_in_a_later_turn_are_plain_decoding_or_refused(stem: str, how: str) -> None:
    """Some releases run the whole text once more where guesses begin, whatever is cached; and nothing is lost by the refusal."""
    if stem == "Persimmon" and zoo.EARLY:
        pytest.skip("its attention cannot be reached")
    model, options = zoo.make(stem), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": zoo.VOCAB + 1}
    cache, plain = (policies.make("full", model) for _ in range(2))
    inputs = longer(model, plain)
    expected = model.generate(**inputs, **options, **with_cache(plain))
    cache.activate_past_recording()  # as transformers 5 does by itself
    longer(model, cache)
    guesses = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": zoo.make(stem)}
    try:
        assert torch.equal(model.generate(**inputs, **options, **guesses, **with_cache(cache)), expected)
        return
    except KvdslError as error:
        assert "47 tokens are cached, and the whole text is about to run again" in str(error)
        assert len(str(error)) < 400
    assert torch.equal(model.generate(**inputs, **options, **with_cache(cache)), expected)
    cache.reset()
    assert torch.equal(model.generate(**inputs, **options, **guesses, **with_cache(cache)), expected)


@pytest.mark.skipif(zoo.EARLY, reason="the attention of Persimmon cannot be reached")
def test_guesses_behind_an_unrelated_text_are_refused() -> None:
    model = zoo.make("Persimmon")
    cache = policies.make("full", model)
    longer(model, cache)
    with pytest.raises(KvdslError, match="differ in token 0"):
        model.generate(**zoo.plain(zoo.prompt(1, 60, seed=3)), **with_cache(cache), prompt_lookup_num_tokens=3)


@pytest.mark.skipif(zoo.EARLY, reason="transformers 4.57 does not know such a text where it guesses")
def test_guesses_behind_new_tokens_alone() -> None:
    """Whoever passes what follows the cached text, and the mask of all, has nothing run twice."""
    model, options = zoo.make("Llama"), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": zoo.VOCAB + 1}
    cache, plain = (policies.make("full", model) for _ in range(2))
    inputs = longer(model, plain)
    expected = model.generate(**inputs, **options, **with_cache(plain))[:, -5:]
    longer(model, cache)
    inputs["input_ids"] = inputs["input_ids"][:, cache.get_seq_length() :]
    found = model.generate(**inputs, **options, **with_cache(cache), prompt_lookup_num_tokens=3)
    assert torch.equal(found[:, -5:], expected)


# -- hybrids -----------------------------------------------------------------------------------------------------------


def test_native_windows_go_back_as_well() -> None:
    plain, looked_up = cache_for("h2o", "gemma2"), cache_for("h2o", "gemma2")
    if can_roll_back(looked_up.layers[0]):
        found = generate("gemma2", looked_up, prompt_lookup_num_tokens=5)
        assert torch.equal(found, generate("gemma2", plain))
        same(looked_up, plain)
        with pytest.raises(KvdslError, match="the last 0 were noted"):  # the window has let go of what came before
            looked_up.crop(-1)
    else:
        with refused(r"layer 0 is .*SlidingWindowLayer.*cannot take tokens back"):
            generate("gemma2", looked_up, prompt_lookup_num_tokens=5)


# -- by hand -----------------------------------------------------------------------------------------------------------


def run(cache: Any, ids: Tensor, **how: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = zoo.model("llama")(ids, **with_cache(cache), **how).logits
    return logits


def filled(name: str = "h2o", steps: int | None = 20) -> tuple[Any, Tensor]:
    """A cache after a prompt of 30 tokens and ten more, and the text."""
    cache, ids = cache_for(name), zoo.prompt(2, 60)
    if steps is not None:
        cache.activate_past_recording(steps)
    run(cache, ids[:, :30])
    for at in range(30, 40):
        run(cache, ids[:, at : at + 1])
    return cache, ids


@pytest.mark.parametrize("crop", [-4, 36], ids=["as many less", "to a length"])
def test_another_text_after_cropping(crop: int) -> None:
    """`crop` takes minus the number of tokens (transformers 5.16 and later), or the length that is left (before)."""
    cache, ids = filled()
    cache.crop(crop)
    assert cache.get_seq_length() == 36
    other, _ = filled(steps=None)
    other.reset()
    run(other, ids[:, :30])
    for at in range(30, 36):
        run(other, ids[:, at : at + 1])
    assert kept(cache, 0) == kept(other, 0)
    for at in range(50, 55):
        assert torch.equal(run(cache, ids[:, at : at + 1]), run(other, ids[:, at : at + 1]))


def test_back_to_the_prompt_and_on_with_it() -> None:
    cache, ids = filled()
    cache.crop(-10)
    assert run(cache, ids[:, 30:34]).shape[1] == 4  # the prompt goes on, as if nothing had been generated
    other = cache_for("h2o")
    run(other, ids[:, :30])
    run(other, ids[:, 30:34])
    assert kept(cache, 1) == kept(other, 1)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("full", {}),
        ("window", {"budget": 60}),
        ("window", {"budget": 0.5}),
        ("quest", {"tokens": 16}),
        ("h2o", {"budget": 60}),
    ],
)
def test_what_nothing_has_left_goes_back_without_notes(name: str, given: dict[str, float]) -> None:
    """Into the prompt, too; unless something was evicted, or another prompt would have had another budget."""
    model, ids = zoo.model("llama"), zoo.prompt(2, 60)
    cache, other = (policies.cache_class(name)(model, **given) for _ in range(2))
    run(cache, ids[:, :30])
    for at in range(30, 40):
        run(cache, ids[:, at : at + 1])
    if given.get("budget") == 0.5 or name == "h2o":  # has evicted; sums attention
        with pytest.raises(KvdslError, match="not noted"):
            cache.crop(-1)
        with pytest.raises(KvdslError, match="followed the prompt"):
            cache.crop(20)
        return
    cache.crop(35)
    cache.crop(-15)
    assert cache.get_seq_length() == 20
    run(other, ids[:, :20])
    assert kept(cache, 1) == kept(other, 1)
    for at in range(40, 44):
        torch.testing.assert_close(run(cache, ids[:, at : at + 1]), run(other, ids[:, at : at + 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    run(cache, ids[:, 44:50])
    assert kept(cache, 1) != kept(other, 1)


def test_beside_windows_only_what_was_noted_goes_back() -> None:
    cache = policies.cache_class("full")(zoo.model("gemma2"))
    zoo.greedy(zoo.model("gemma2"), zoo.plain(zoo.prompt(1, 20)), 4, cache=cache)
    with pytest.raises(KvdslError, match="not noted"):
        cache.crop(-1)


def test_rows_of_padding_do_not_go_back() -> None:
    cache = policies.cache_class("full")(zoo.model("llama"))
    inputs = zoo.left_padded([zoo.prompt(1, 12)[0], zoo.prompt(1, 7)[0]])
    zoo.greedy(zoo.model("llama"), inputs, 4, cache=cache)
    with pytest.raises(KvdslError, match="not noted"):
        cache.crop(-1)


def test_guesses_after_a_prompt_are_steps() -> None:
    """A forward tells by `logits_to_keep` which of its tokens are guesses; more of them than steps are noted all the same."""
    guessing, plain, ids = cache_for("h2o"), cache_for("h2o"), zoo.prompt(1, 60)
    guessing.activate_past_recording(2)
    found = run(guessing, ids[:, :40], logits_to_keep=11)
    expected = [run(plain, ids[:, :30])[:, -1:], *(run(plain, ids[:, at : at + 1]) for at in range(30, 40))]
    assert (found - torch.cat(expected, 1)).abs().max() < 1e-4
    assert kept(guessing, 0) == kept(plain, 0)
    guessing.crop(-10)
    assert len(guessing.layers[0].undo.log) == 0


def test_a_copy_goes_back_by_itself() -> None:
    cache, _ = filled()
    other = copy.deepcopy(cache)
    before = kept(cache, 0)
    other.crop(-5)
    assert (kept(cache, 0), cache.get_seq_length(), other.get_seq_length()) == (before, 40, 35)


def test_what_is_noted_counts_and_ends() -> None:
    cache, _ = filled(steps=4)
    noted = cache.layers[0].undo.log.bytes()
    assert noted > 0
    assert cache.bytes() == sum(layer.state.bytes() + layer.undo.log.bytes() for layer in cache.layers)
    filled_up = cache.bytes()
    for layer in cache.layers:
        layer.record_past = False  # as transformers does when it has gone back
    assert cache.bytes() == filled_up - 2 * noted
    cache.activate_past_recording()
    cache.reset()
    assert not any(layer.record_past for layer in cache.layers)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_was_not_noted() -> None:
    cache, _ = filled(steps=None)
    cache.crop(0)
    cache.crop(40)
    with refused(r"not noted.*activate_past_recording\(\)"):
        cache.crop(-1)
    assert cache.get_seq_length() == 40


def test_further_back_than_the_log() -> None:
    cache, _ = filled(steps=3)
    with refused(r"4 tokens, but the last 3 were noted.*steps=4"):
        cache.crop(-4)
    cache.crop(-3)


def test_into_the_prompt() -> None:
    cache, _ = filled()
    with refused(r"11 tokens, but 10 followed the prompt.*reset\(\)"):
        cache.crop(-11)
    cache.crop(-10)


def test_rows_that_were_moved() -> None:
    cache, _ = filled()
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(KvdslError, match="the last 0 were noted"):
        cache.crop(-1)


def test_layers_that_agree() -> None:
    body = '"""All alike."""\nparam budget = 8\nscore sum(attn)\nvictims shared by layers'
    cache = kvdsl.compile(f"kv 1\n\npolicy Agreeing {{\n{body}\n}}\n")(zoo.model("llama"), backend="torch")
    with refused(r"all layers agree on.*assistant_model"):
        cache.activate_past_recording()


@pytest.mark.parametrize("steps", [0, -1, True, 2.5, "all"])
def test_steps_that_are_no_number(steps: Any) -> None:
    with refused("`steps` is"):
        cache_for("h2o").activate_past_recording(steps)
