"""Layers that take over what another one chooses, in models: several tokens at once, guesses, compiled steps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import policies, zoo
from tests.hf.test_eviction import kept

pytestmark = pytest.mark.nightly

SIZES = {"tokens": 6, "start": 0, "again": 1}


def tidal(model: Any, **options: Any) -> Any:
    return policies.cache_class("tidaldecode")(model, **SIZES | options)


@pytest.fixture(scope="module")
def deep() -> Any:
    """Four layers."""
    return zoo.make("Llama", num_hidden_layers=4)


def logits(model: Any, cache: Any, *parts: int, one_by_one: bool = False) -> torch.Tensor:
    """Of a text that comes in parts, those of all that follow the first part."""
    ids, at, found = zoo.prompt(2, sum(parts), seed=4), 0, []
    with torch.no_grad():
        for part in parts:
            if one_by_one and at:
                with cache.one_by_one():
                    found.append(model(ids[:, at : at + part], **with_cache(cache)).logits)
            else:
                found.append(model(ids[:, at : at + part], **with_cache(cache)).logits)
            at += part
    return torch.cat(found[1:], 1)


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether logits are the same up to the order of sums, which processors choose by shape: within 1e-5 of the largest."""
    return bool((ours - theirs).abs().max() < 1e-5 * theirs.abs().max())


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_several_tokens_choose_one_by_one(deep: Any, backend: str) -> None:
    alone = logits(deep, tidal(deep, backend=backend), 20, *[1] * 9)
    together = logits(deep, tidal(deep, backend=backend), 20, 4, 1, 4, one_by_one=True)
    assert alike(alone, together)


def test_backends_agree(deep: Any) -> None:
    found = [logits(deep, tidal(deep, backend=backend), 20, *[1] * 9) for backend in ("torch", "cpu")]
    assert alike(found[0], found[1])
    assert (found[0] - logits(deep, tidal(deep, tokens=100), 20, *[1] * 9)).abs().max() > 1e-3, "nothing is left out"


def test_guesses_choose_for_themselves(deep: Any) -> None:
    """A token that is taken back has chosen for nobody."""
    ids = zoo.prompt(1, 7).repeat(1, 6)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": zoo.VOCAB + 1}
    plain = deep.generate(**zoo.plain(ids), **options, **with_cache(tidal(deep)))
    cache = tidal(deep)
    cache.activate_past_recording()
    guessed = deep.generate(**zoo.plain(ids), **options, prompt_lookup_num_tokens=3, **with_cache(cache))
    assert guessed.tolist() == plain.tolist()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_compiled_forward_is_the_same(deep: Any, backend: str) -> None:
    """Caches that grow are served outside of graphs."""
    compiled = torch.compile(deep, backend="eager")
    expected = logits(deep, tidal(deep, backend=backend), 20, *[1] * 5)
    assert alike(logits(compiled, tidal(deep, backend=backend), 20, *[1] * 5), expected)


def test_in_blocks_of_slots(deep: Any) -> None:
    body = "select top 6 by dot(q, k) in layers 0, 1 reused above\n  group each\n  keep last 0\n  storage blocks 4"
    text = f'kv 1\npolicy Paged {{\n  "x"\n  {body}\n}}\n'
    expected = logits(deep, tidal(deep), 20, *[1] * 9)
    found = logits(deep, kvdsl.compile(text)(deep), 20, *[1] * 9)
    assert alike(found, expected)


def test_an_interrupted_forward_is_noticed(deep: Any) -> None:
    cache = tidal(deep)
    logits(deep, cache, 20, 1)
    first = deep.model.layers[1].self_attn
    hook = first.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        deep(zoo.prompt(2, 1), **with_cache(cache))
    hook.remove()
    with pytest.raises(KvdslError, match="interrupted"), torch.no_grad():
        deep(zoo.prompt(2, 1), **with_cache(cache))


def test_a_layer_that_chooses_is_one_of_ours() -> None:
    """Of a model whose other layers have a sliding window, one of these cannot choose."""
    model = zoo.model("gemma2")
    assert tidal(model, start=1, again=1).managed == [1]
    hybrid = zoo.make("Qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=8,
                      layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"])  # fmt: skip
    with pytest.raises(KvdslError, match="layer 2 would attend to what layer 1 chooses"):
        tidal(hybrid)
    cache = tidal(hybrid, again=2)
    logits(hybrid, cache, 20, 1)
    assert len(kept(cache, 0))
