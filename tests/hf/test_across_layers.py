"""Budgets that the layers of a model share, in a whole model: rows, chats, guesses, and forwards that are cut short."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl.integrations import prompts
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.torch.backend import TorchBackend
from tests.hf import zoo
from tests.hf.test_eviction import kept
from tests.hf.test_statements import custom, model, text

SHARES = "budget budget across layers by sum(sum(var(attn) over slots) over heads)"
POOL = "budget budget across layers"
BODY = "param budget = 12\nscore sum(attn)\nwhen prefill\n"


def made(how: str, **options: Any) -> Any:
    return custom(BODY + how, **options)


def live(cache: Any) -> torch.Tensor:
    """[batch, layers, heads]."""
    return torch.stack([(cache.positions(layer) >= 0).sum(-1) for layer in cache.managed], 1)


@pytest.mark.parametrize("how", [SHARES, POOL])
def test_layers_share_what_they_would_keep_apart(how: str) -> None:
    cache = made(how)
    zoo.greedy(model(), text(60, 40), 1, cache=cache)
    found = live(cache)
    layers, heads = found.shape[1:]
    assert len(found[0].unique()) > 1 and (found[0] != found[1]).any(), "rows share by themselves"
    if how == POOL:
        assert (found.sum((1, 2)) == 12 * layers * heads).all()
    else:
        assert (found == found[..., :1]).all(), "heads of a layer keep equally many"
        assert ((12 * layers - layers < found[..., 0].sum(1)) & (found[..., 0].sum(1) <= 12 * layers)).all()


def test_a_padded_row_keeps_what_it_keeps_alone_and_grows() -> None:
    together, ids = made(POOL), text(60, 41)
    tokens, _ = zoo.greedy(model(), ids, 5, cache=together)
    for row, length in enumerate((60, 41)):
        alone, one = made(POOL), {key: value[row, None, -length:] for key, value in ids.items()}
        assert zoo.greedy(model(), one, 5, cache=alone)[0].tolist() == tokens[row, None].tolist()
        assert kept(together, row) == kept(alone, 0)
        assert all(set(range(length, length + 4)) <= set(head) for layer in kept(alone, 0) for head in layer)


@pytest.mark.parametrize("how", [SHARES, POOL])
def test_a_later_prompt_shares_anew(how: str) -> None:
    """What it finds is what the layers hold by then; and the numbers of tokens are those of the budgets again."""
    cache, ids = made(how), text(60)["input_ids"]
    with torch.no_grad():
        model()(ids[:, :30], **with_cache(cache))
        first = live(cache)
        model()(ids[:, 30:31], **with_cache(cache))
        assert (live(cache) == first + 1).all(), "a decoded token stays"
        again = copy.deepcopy(cache)
        restored = torch.load(io.BytesIO(_saved(cache)), weights_only=False)
        restored.attach(model())
        for each in (cache, again, restored):
            model()(ids[:, 31:60], **with_cache(each))
    assert kept(cache, 0) == kept(again, 0) == kept(restored, 0)
    assert live(cache).sum() <= 12 * live(cache).numel() and (live(cache) != first).any()


def _saved(cache: Any) -> bytes:
    file = io.BytesIO()
    torch.save(cache, file)
    return file.getvalue()


def test_a_forward_that_was_cut_short_leaves_nothing_behind() -> None:
    cache, fresh, ids = made(POOL), made(POOL), text(40)["input_ids"]

    def stop(*_: object) -> None:
        raise RuntimeError("cut short")

    handle = model().model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="cut short"), torch.no_grad():
        model()(ids, **with_cache(cache))
    handle.remove()
    cache.reset()
    with torch.no_grad():
        for each in (cache, fresh):
            model()(ids, **with_cache(each))
    assert kept(cache, 0) == kept(fresh, 0)


def test_guesses_do_not_come_with_the_prompt() -> None:
    cache, ids = made(SHARES), text(40)["input_ids"]
    cache.activate_past_recording()  # which transformers 4.57 leaves to the caller
    with pytest.raises(KvdslError, match=r"share a budget once all have seen the prompt, but guesses came with it"):
        model().generate(
            ids.repeat(1, 2), **with_cache(cache), prompt_lookup_num_tokens=3, max_new_tokens=4, eos_token_id=zoo.VOCAB + 1
        )


def test_only_managed_layers_share() -> None:
    """Of a model whose other layers have a sliding window."""
    from kvdsl import compile as compiled

    hybrid = zoo.model("gemma2")
    cache = compiled(f'kv 1\npolicy Custom {{\n"a test"\n{BODY}{POOL}\n}}\n')(hybrid)
    zoo.greedy(hybrid, zoo.plain(zoo.prompt(1, 40)), 1, cache=cache)
    assert 0 < len(cache.managed) < len(cache.layers)
    assert int(live(cache).sum()) == 12 * live(cache).numel()


@pytest.mark.parametrize("how", [SHARES, POOL])
def test_a_layer_by_itself_is_refused(how: str) -> None:
    spec = type(made(how)).spec
    with pytest.raises(KvdslError, match="share a budget, but here each decides alone"):
        prompts.refuse(spec)
    key = torch.zeros(1, 2, 20, 8)
    call = AttentionCall(key, key, key, None, 0.5)
    with pytest.raises(KvdslError, match="share a budget, but layer 1 settles alone"):
        TorchBackend().prefill(slot_state(spec, {"budget": None}, layer=1, layers=4), call)
