"""A bound model still belongs to everybody: other caches, other threads, training, saving."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import KVCache, saving
from kvdsl.runtime.hf.versions import cache_of, with_cache
from tests.hf import policies, zoo
from tests.quick import few

_caches: list[Any] = []


def bound(family: str, **extra: Any) -> Any:
    """A fresh model that was given to a cache, which is still there."""
    stem, sizes = zoo.FAMILIES[family]
    model = zoo.make(stem, **{**sizes, **extra})
    _caches[:] = [policies.make(policies.OBSERVING, model, budget=12)]
    return model


@pytest.mark.parametrize("family", few(["llama", "gemma2", "gpt_oss", "mistral-windowed", "qwen3"], "llama"))
def test_model_without_the_cache_is_itself(family: str) -> None:
    """Logits, and gradients of a padded batch, with no cache at all."""
    stem, sizes = zoo.FAMILIES[family]
    model, other = bound(family), zoo.make(stem, **sizes)
    rows = zoo.prompt(2, 20)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    results = []
    for each in (model, other):
        each.zero_grad()
        out = each(**inputs, labels=labels, use_cache=False)
        out.loss.backward()
        results.append((out.loss.item(), next(p.grad for n, p in each.named_parameters() if "k_proj" in n)))
    assert abs(results[0][0] - results[1][0]) < 1e-5
    assert (results[0][1] - results[1][1]).abs().max() < 1e-4


def test_packed_texts_without_the_cache_are_kept_apart() -> None:
    """Positions that start again within a row mean several texts; the model's own mask function must see that."""
    model, other = bound("llama"), zoo.untouched("llama")
    ids = zoo.prompt(1, 10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        ours = model(ids, position_ids=positions, use_cache=False).logits
        theirs = other(ids, position_ids=positions, use_cache=False).logits
        assert (ours - theirs).abs().max() < 1e-5
        assert (ours[:, 4:] - model(ids[:, 4:], use_cache=False).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", few(["llama", "gemma2", "mistral-windowed"], "llama"))
def test_foreign_caches(family: str) -> None:
    stem, sizes = zoo.FAMILIES[family]
    model, other = bound(family), zoo.make(stem, **sizes)
    rows = zoo.prompt(2, 20)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    theirs = zoo.greedy(other, inputs, 10)
    zoo.assert_same_text(zoo.greedy(model, inputs, 10), theirs)
    zoo.assert_same_text(zoo.greedy(model, inputs, 10, cache=DynamicCache(config=model.config)), theirs)
    zoo.assert_same_text(zoo.greedy(model, inputs, 10, cache_implementation="static", disable_compile=True), theirs)


def test_assistant_may_be_bound() -> None:
    """Assisted decoding with transformers' own caches, by a model that has met kvdsl."""
    model, other, inputs = bound("llama"), zoo.untouched("llama"), zoo.plain(zoo.prompt(1, 15))
    expected = other.generate(**inputs, max_new_tokens=10, do_sample=False)
    found = other.generate(**inputs, max_new_tokens=10, do_sample=False, assistant_model=model)
    assert found.tolist() == expected.tolist()


def test_several_caches_interleaved() -> None:
    model = zoo.model("llama")
    texts = [zoo.prompt(1, 20, seed=seed) for seed in range(3)]
    alone = []
    for text in texts:
        cache = policies.make(policies.OBSERVING, model, budget=12)
        alone.append([model(text[:, :15], **with_cache(cache)).logits[:, -1]])
        alone[-1] += [model(text[:, at : at + 1], **with_cache(cache)).logits[:, -1] for at in range(15, 20)]
    caches = [policies.make(policies.OBSERVING, model, budget=12) for _ in texts]
    together: list[list[torch.Tensor]] = [[] for _ in texts]
    for begin, end in [(0, 15), *((at, at + 1) for at in range(15, 20))]:
        for index, text in enumerate(texts):
            together[index].append(model(text[:, begin:end], **with_cache(caches[index])).logits[:, -1])
    for expected, found in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.nightly
def test_threads() -> None:
    """Four threads on two models, each with its own cache."""
    models = [zoo.model("llama"), zoo.model("gemma2")]

    def work(index: int) -> list[list[int]]:
        model = models[index % 2]
        cache = policies.make(policies.OBSERVING, model, budget=12)
        tokens, _ = zoo.greedy(model, zoo.plain(zoo.prompt(1, 20, seed=index)), 12, cache=cache)
        return list(tokens.tolist())

    expected = [work(index) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == expected


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_a_released_model_takes_new_caches(own: str) -> None:
    model = zoo.make("Llama", attn_implementation=own)
    ids = zoo.prompt(1, 9)
    expected = model(ids).logits
    cache = policies.make(policies.OBSERVING, model, budget=12)
    type(cache).release(model)
    assert torch.equal(model(ids).logits, expected)
    type(cache).release(model)  # again: nothing to do
    again = policies.make(policies.OBSERVING, model, budget=12)
    model(ids, **with_cache(again))
    with pytest.raises(KvdslError, match="`release` was called"):
        model(ids, **with_cache(cache))


def test_copied_model() -> None:
    """A copy of a bound model is bound, and takes caches of its own."""
    model = copy.deepcopy(bound("llama"))
    cache = policies.make(policies.OBSERVING, model, budget=200)
    inputs = zoo.plain(zoo.prompt(1, 15))
    zoo.assert_same_text(zoo.greedy(model, inputs, 5, cache=cache), zoo.greedy(zoo.untouched("llama"), inputs, 5))


def test_bare_decoder() -> None:
    """The model without its head takes a cache as well."""
    model = zoo.make("Llama").model
    cache = policies.make(policies.OBSERVING, model, budget=200)
    ids = zoo.prompt(1, 12)
    with torch.no_grad():
        model(ids[:, :-1], **with_cache(cache))
        last = model(ids[:, -1:], **with_cache(cache)).last_hidden_state
        assert (last - model(ids, use_cache=False).last_hidden_state[:, -1:]).abs().max() < 1e-4


def test_repr_and_bytes() -> None:
    cache = policies.make(policies.OBSERVING, zoo.model("gemma2"), budget=12)
    assert "budget=12" in repr(cache)
    assert "1 of 2 layers" in repr(cache)
    empty = cache.bytes()
    zoo.greedy(zoo.model("gemma2"), zoo.plain(zoo.prompt(1, 20)), 3, cache=cache)
    assert "22 tokens seen" in repr(cache)
    assert cache.bytes() > empty
    native = sum(tensor.nbytes for tensor in vars(cache.layers[0]).values() if isinstance(tensor, torch.Tensor))
    assert native >= 2 * 2 * 7 * 16 * 4  # keys and values, 2 heads, a window of 8 less the next token, 16 dims
    assert cache.bytes() == cache.layers[1].state.bytes() + native


def test_html_shows_what_each_layer_holds() -> None:
    """Of the batch's first row: a cell is as dark as the share of KV heads that hold the token."""
    cache = policies.make(policies.OBSERVING, zoo.model("llama"), budget=6)
    assert "<table>" not in cache._repr_html_()
    assert "0 tokens seen" in cache._repr_html_()
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(2, 20)), 3, cache=cache)
    page = ElementTree.fromstring(f"<div>{cache._repr_html_()}</div>")
    head, *lines = page.iter("tr")
    assert "row 0 of 2" in "".join(head.itertext())
    for layer, line in enumerate(lines):
        assert [cell.text for cell in line][:3] == [str(layer), "6 tokens", f"{cache.layers[layer].bytes():,}"]
        held = torch.zeros(22, dtype=torch.int)
        for head_positions in cache.positions(layer)[0]:
            held[head_positions[head_positions >= 0].long()] += 1
        shown = torch.zeros(22)
        for cell in line.iter("rect"):
            shown[int(cell.get("x")) : int(cell.get("x")) + int(cell.get("width"))] = float(cell.get("fill-opacity"))
        assert (shown * 2).tolist() == held.tolist()


def test_html_of_a_long_text_has_cells_of_several_tokens() -> None:
    cache = policies.make("window", zoo.model("llama"), budget=50)
    zoo.greedy(zoo.model("llama"), zoo.plain(zoo.prompt(1, 500)), 2, cache=cache)
    *_, last = re.findall(
        r'viewBox="0 0 (\d+) 1".*?x="(\d+)" width="(\d+)" height="1" fill-opacity="1"', cache._repr_html_()
    )
    assert tuple(map(int, last)) == (167, 151, 16)  # of 3 tokens; in cell 150 some are gone


def test_attention_functions_that_somebody_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvpress, once imported, calls every registered attention function with dropout by place."""

    def wrapped(function: Any) -> Any:
        def call(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float, **kwargs: Any) -> Any:
            return function(module, query, key, value, attention_mask, dropout, **kwargs)

        return call

    model, ids = bound("llama"), zoo.prompt(1, 30)
    plain = policies.make(policies.OBSERVING, model, budget=12)
    with torch.no_grad():
        expected = [model(ids, **with_cache(plain)).logits, model(ids, use_cache=False).logits]
        for name, function in ALL_ATTENTION_FUNCTIONS.items():
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, wrapped(function))
        cache = policies.make(policies.OBSERVING, model, budget=12)
        found = [model(ids, **with_cache(cache)).logits, model(ids, use_cache=False).logits]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# -- what a model is, with a cache and without -----------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_a_cache_leaves_the_model_and_its_config_as_they_are(own: str) -> None:
    """While it lives and when it has gone; also those of a copy, and of another model of the same config."""
    model = zoo.make("Llama", attn_implementation=own)
    attributes, config = set(vars(model)), model.config.to_dict()
    first = policies.make(policies.OBSERVING, model, budget=12)
    copied = copy.deepcopy(first)
    twin = type(model)(model.config).eval()
    twins = policies.make(policies.OBSERVING, twin, budget=12)
    zoo.greedy(twin, zoo.plain(zoo.prompt(1, 20)), 3, cache=twins)
    del first
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 3, cache=copied)
    assert model.config._attn_implementation == own
    assert model.config.to_dict() == config
    assert set(vars(model)) == attributes
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_attention_that_is_set_while_a_cache_lives() -> None:
    """A model may change its own attention at any time; its caches go on."""
    model, ids = zoo.make("Llama", attn_implementation="sdpa"), zoo.prompt(1, 8)
    cache, other = (policies.make("h2o", model, budget=16) for _ in range(2))
    with torch.no_grad():
        expected = [model(x, **with_cache(other)).logits for x in (ids, ids[:, :1])]
        first = model(ids, **with_cache(cache)).logits
        model.set_attn_implementation("eager")
        assert model(ids, use_cache=False, output_attentions=True).attentions[0] is not None
        second = model(ids[:, :1], **with_cache(cache)).logits
    assert first.equal(expected[0])
    assert second.equal(expected[1])


def test_a_model_that_cannot_be_served_beside_one_that_can() -> None:
    """Both have the same config: the cache of the one goes on working."""
    model = zoo.make("Llama")
    cache = policies.make(policies.OBSERVING, model, budget=12)
    other = type(model)(model.config).eval()
    cache_is_given = [False]
    other.lm_head.register_forward_hook(lambda module, args, out: out.flip(-1) if cache_is_given[0] else out)
    other.register_forward_pre_hook(
        lambda module, args, kwargs: cache_is_given.__setitem__(0, isinstance(cache_of(kwargs), KVCache)),
        with_kwargs=True,
    )
    with pytest.raises(KvdslError, match="differ by"):
        policies.make(policies.OBSERVING, other, budget=12)
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 3, cache=cache)


# -- in files and other processes ----------------------------------------------------------------------------------------

SAVED = {
    "roco": {"budget": 12},
    "streaming_llm": {"budget": 12, "sinks": 2},  # turns keys
    "vatp_scissorhands": {"budget": 12, "sinks": 2, "history": 8},  # rings
    "roco_sparcas": {"budget": 20, "protect": 4, "tokens": 9, "dims": 4},  # a sketch
    "adakv": {"budget": 34},  # heads of different lengths
    "roco_stored_in_blocks": {"budget": 12},
    "scissorhands_window": {"budget": 20, "history": 8},
}


def went_on(model: Any, cache: Any) -> tuple[list[Tensor], Tensor]:
    """What a cache of two rows holds after five more tokens, and their logits."""
    with torch.no_grad():
        logits = [model(token, **with_cache(cache)).logits for token in zoo.prompt(2, 5, seed=9).split(1, dim=1)]
    return [cache.positions(layer) for layer in cache.managed], torch.cat(logits, 1)


@pytest.mark.parametrize("policy", few(SAVED, "roco"))
def test_a_cache_that_was_pickled_goes_on_to_the_bit(policy: str) -> None:
    model = zoo.model("llama")
    cache = policies.make(policy, model, **SAVED[policy])
    zoo.greedy(model, zoo.plain(zoo.prompt(2, 40)), 6, cache=cache)
    loaded = pickle.loads(pickle.dumps(cache))
    assert repr(loaded) == repr(cache)
    assert torch.equal(loaded.positions(1), cache.positions(1))
    with pytest.raises(KvdslError, match=r"belongs to no model yet.*attach\(model\)"):
        model(zoo.prompt(2, 1), **with_cache(loaded))
    loaded.attach(model)
    theirs, ours = went_on(model, cache), went_on(model, loaded)
    assert all(torch.equal(mine, other) for mine, other in zip(ours[0], theirs[0], strict=True))
    assert torch.equal(ours[1], theirs[1])
    loaded.reset()
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 20)), 2, cache=loaded)


def test_a_saved_cache_beside_windows_and_with_notes(tmp_path: Path) -> None:
    """By `torch.save`, while steps are noted, in a model some of whose layers keep transformers' own cache."""
    model, ids = zoo.model("gemma2"), zoo.prompt(1, 30)
    cache = policies.make(policies.OBSERVING, model, budget=12)
    if not zoo.EARLY and hasattr(cache.layers[0], "activate_past_recording") and not zoo.WINDOWS_STUMBLE:
        cache.activate_past_recording()
    new, _ = zoo.greedy(model, zoo.plain(ids), 6, cache=cache)
    taken_back = 2 if cache.layers[1].record_past else 0
    text = torch.cat([ids, new[:, : 5 - taken_back], ids], 1)
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    loaded.attach(model)
    if taken_back:
        cache.crop(-taken_back)
        loaded.crop(-taken_back)
    ours, theirs = (zoo.greedy(model, zoo.plain(text), 3, cache=one) for one in (cache, loaded))
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.nightly
def test_a_cache_in_another_process(tmp_path: Path) -> None:
    model = zoo.make("Llama")
    cache = policies.make("roco", model, budget=12)
    zoo.greedy(model, zoo.plain(zoo.prompt(2, 40)), 6, cache=cache)
    (tmp_path / "cache").write_bytes(pickle.dumps(cache))
    program = (
        "import pathlib, pickle, sys; from tests.hf import zoo; from tests.hf.test_sharing import went_on;"
        "cache = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); model = zoo.make('Llama'); cache.attach(model);"
        "sys.stdout.buffer.write(pickle.dumps(went_on(model, cache)))"
    )
    found = subprocess.run([sys.executable, "-c", program, tmp_path / "cache"], capture_output=True, check=True)
    ours, theirs = pickle.loads(found.stdout), went_on(model, cache)
    assert all(torch.equal(mine, other) for mine, other in zip(ours[0], theirs[0], strict=True))
    torch.testing.assert_close(ours[1], theirs[1])


def test_a_saved_cache_is_for_its_policy_and_its_model() -> None:
    model = zoo.model("llama")
    cache = policies.make("roco", model, budget=12)
    zoo.greedy(model, zoo.plain(zoo.prompt(2, 40)), 6, cache=cache)
    saved = pickle.dumps(cache)
    known = saving.digest(type(cache)).encode()
    assert known in saved
    with pytest.raises(KvdslError, match=r"saved under another `roco` \(digest 0{16}\)"):
        pickle.loads(saved.replace(known, b"0" * 16))
    made = kvdsl.compile('kv 1\npolicy Mine {\n"A window."\nbudget 12\nscore position\n}\n')(model)
    elsewhere = pickle.dumps(made).replace(
        made.__class__.__module__.encode(), made.__class__.__module__[:-1].encode() + b"x"
    )
    with pytest.raises(KvdslError, match=r"`kvdsl\.load` of its file"):
        pickle.loads(elsewhere)
    loaded = pickle.loads(saved)
    with pytest.raises(KvdslError, match="`num_hidden_layers` is 2, but here it is 3"):
        loaded.attach(zoo.make("Llama", num_hidden_layers=3))
    other = zoo.make("Llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    with pytest.raises(KvdslError, match="other weights"):
        loaded.attach(other)
    loaded.attach(zoo.make("Llama"))
    with pytest.raises(KvdslError, match="a model already"):
        loaded.attach(model)


def test_a_loaded_cache_serves_its_model_in_another_dtype() -> None:
    """It goes on in its own."""
    model, ids = zoo.make("Llama"), zoo.prompt(1, 40)
    cache = policies.make("roco", model, budget=12)
    zoo.greedy(model, zoo.plain(ids), 3, cache=cache)
    loaded = pickle.loads(pickle.dumps(cache))
    half = zoo.make("Llama").to(torch.bfloat16)
    loaded.attach(half)
    with torch.no_grad():
        ours = half(ids[:, :1], **with_cache(loaded)).logits
        theirs = model(ids[:, :1], **with_cache(cache)).logits
    assert ours.dtype == torch.bfloat16
    assert loaded.layers[0].state.layout.dtype == torch.float32
    assert (ours.float() - theirs).abs().max() < 0.1 * theirs.abs().max()


@pytest.mark.nightly
def test_threads_that_load_a_policy_at_once() -> None:
    """Its package is imported once; who comes while that goes on waits."""
    text = 'kv 1\npolicy AtOnce {\n  "A test."\n  param budget = 8\n  score min(mean(attn), std(attn)) + mean(attn)\n}\n'
    with ThreadPoolExecutor(8) as pool:
        classes = list(pool.map(lambda _: kvdsl.compile(text), range(8)))
    assert len(set(classes)) == 1
