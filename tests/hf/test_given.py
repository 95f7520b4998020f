"""Values from the caller: what stays is what their formula says, however a text comes in and whatever is done with a cache."""

from __future__ import annotations

import copy
import pickle
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import zoo
from tests.hf.test_compile import assert_same_slots, decode, whole

pytestmark = pytest.mark.nightly

BUDGET, HEADS = 6, 2
LEARNED = f"param budget = {BUDGET}\ngiven importance\nscore importance"


@once
def cache_class(body: str = LEARNED) -> type[Any]:
    return kvdsl.compile(f'kv 1\n\npolicy Learned {{\n  "A test."\n{body}\n}}\n')


def importance(module: nn.Module, hidden: Tensor) -> Tensor:
    """A number of each token and KV head: of what the token is, not of where it stands."""
    return torch.stack([hidden.double().sin().sum(-1), (2 * hidden.double()).cos().sum(-1)], 1)


class Heard:
    """A function that notes what it says, by layer."""

    def __init__(self, heads: int = HEADS) -> None:
        self.said: dict[int, list[Tensor]] = {}
        self.heads = heads

    def __call__(self, module: nn.Module, hidden: Tensor) -> Tensor:
        values = importance(module, hidden)[:, : self.heads]
        self.said.setdefault(module.layer_idx, []).append(values)
        return values

    def of(self, layer: int) -> Tensor:
        """[batch, heads, tokens] of the whole text."""
        return torch.cat(self.said[layer], 2).float()


def stays(values: Tensor, settles: list[int]) -> list[int]:
    """The formula, for a head: whenever so many tokens have come the lowest leave, the newest never."""
    kept: list[int] = []
    for end in settles:
        kept += range(kept[-1] + 1 if kept else 0, end)
        while len(kept) > BUDGET:
            kept.remove(min(kept[:-1], key=lambda token: float(values[token])))
    return kept


def held(cache: KVCache, layer: int, row: int, head: int) -> list[int]:
    position = cache.positions(layer)[row, head]
    return sorted(position[position >= 0].tolist())


def feed(model: nn.Module, cache: KVCache, ids: Tensor, forwards: list[int], mask: Tensor | None = None) -> None:
    """A text in forwards of so many tokens."""
    begin = 0
    with torch.no_grad():
        for tokens in forwards:
            end = begin + tokens
            model(ids[:, begin:end], **with_cache(cache), attention_mask=None if mask is None else mask[:, :end])
            begin = end


def check(cache: KVCache, heard: Heard, settles: list[int], padding: int = 0) -> None:
    """Every layer and head of every row, of which the last has so much padding."""
    for layer in cache.managed:
        values = heard.of(layer)
        for row in range(len(values)):
            skip = padding if row == len(values) - 1 else 0
            for head in range(HEADS):
                own = values[row, min(head, values.shape[1] - 1), skip:]
                assert held(cache, layer, row, head) == stays(own, [end - skip for end in settles])


# -- by a function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads"),
    [("llama", 1), ("llama", HEADS), ("gpt_neox", 1), ("gemma3", HEADS), ("phi3", HEADS), ("gpt2", 1)],
)
def test_what_stays_is_what_the_caller_finds_important(family: str, heads: int) -> None:
    """A chat: a prompt, two tokens, another prompt, a token; GQA, and one value for all heads."""
    model, heard = zoo.model(family), Heard(heads)
    cache = cache_class()(model, importance=heard, backend="torch")
    feed(model, cache, zoo.prompt(2, 18), [9, 1, 1, 6, 1])
    assert list(heard.said) == cache.managed
    check(cache, heard, [9, 10, 11, 17, 18])


@pytest.mark.parametrize("forwards", [[13], [5, 8], [3, 2, 8]])
def test_a_prompt_in_blocks_is_the_same_however_it_is_cut(forwards: list[int]) -> None:
    model, heard = zoo.model("llama"), Heard()
    cache = cache_class(LEARNED + "\nprefill blocks of 4")(model, importance=heard, backend="torch")
    feed(model, cache, zoo.prompt(1, 15), [*forwards, 1, 1])
    # Only the first layer is given the same hidden states: in blocks, later ones see what earlier ones have left.
    for head in range(HEADS):
        assert held(cache, 0, 0, head) == stays(heard.of(0)[0, head], [4, 8, 12, 14, 15])


def test_padding_is_given_values_and_does_not_count() -> None:
    model, heard = zoo.model("llama"), Heard()
    rows = zoo.prompt(2, 14)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    cache = cache_class()(model, importance=heard, backend="torch")
    zoo.greedy(model, inputs, 4, cache=cache)
    check(cache, heard, [14, 15, 16, 17], padding=5)


def test_beams_take_their_values_along() -> None:
    model, heard = zoo.model("llama"), Heard()
    cache = cache_class()(model, importance=heard, backend="torch")
    feed(model, cache, zoo.prompt(3, 10), [9, 1])
    before = cache.state(1)["given_importance"]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.state(1)["given_importance"], before[[2, 0, 0]])
    cache.reset()
    zoo.greedy(model, zoo.plain(zoo.prompt(2, 9)), 5, cache=cache, num_beams=3)
    assert int((cache.positions(0) >= 0).sum()) == 6 * HEADS * BUDGET


def test_values_outlive_the_growth_of_slots() -> None:
    model, heard = zoo.model("llama"), Heard()
    cache = cache_class("given importance\nselect top 20 by dot(q, k) + importance")(
        model, importance=heard, backend="torch"
    )
    feed(model, cache, zoo.prompt(1, 90), [10, *[1] * 80])
    position = cache.positions(1)[0, 0]
    values = cache.state(1)["given_importance"][0, 0][position >= 0]
    assert len(values) == 90
    assert torch.equal(values, heard.of(1)[0, 0][position[position >= 0].long()])


def test_tokens_that_are_taken_back_are_given_anew() -> None:
    model, heard = zoo.model("llama"), Heard()
    cache = cache_class()(model, importance=heard, backend="torch")
    ids = zoo.prompt(1, 12)
    feed(model, cache, ids, [9, 1])
    cache.activate_past_recording()
    before = [cache.state(0)["given_importance"], cache.positions(0)]
    feed(model, cache, ids[:, 10:], [2])
    assert not torch.equal(cache.positions(0), before[1])
    cache.crop(-2)
    assert torch.equal(cache.positions(0), before[1])
    assert torch.equal(cache.state(0)["given_importance"], before[0])
    feed(model, cache, ids[:, 10:], [1, 1])
    said = [torch.cat([*parts[:2], *parts[3:]], 2) for parts in heard.said.values()]
    heard.said = {layer: [values] for layer, values in enumerate(said)}
    check(cache, heard, [9, 10, 11, 12])


def test_guesses_are_asked_for_like_other_tokens() -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 6).repeat(1, 3)
    looked_up, plain = (cache_class()(model, importance=importance, backend="torch") for _ in range(2))
    looked_up.activate_past_recording()
    # The end of the text is a token that never comes, without which transformers 4.57 looks nothing up; it may go a few tokens too far.
    options = {"prompt_lookup_num_tokens": 4, "eos_token_id": zoo.VOCAB + 1}
    found = zoo.greedy(model, zoo.plain(ids), 12, cache=looked_up, **options)[0]
    assert torch.equal(found, zoo.greedy(model, zoo.plain(ids), found.shape[1], cache=plain)[0])


# -- beforehand --------------------------------------------------------------------------------------------------------


def given(tokens: int, seed: int = 0, heads: int = HEADS, batch: int = 1) -> Tensor:
    return torch.randn(batch, heads, tokens, generator=torch.Generator().manual_seed(seed))


def test_what_is_given_goes_before_what_a_function_says() -> None:
    model = zoo.model("llama")
    cache = cache_class()(model, importance=importance, backend="torch")
    first, heard = given(9), Heard()
    cache.give(0, importance=first)
    feed(model, cache, zoo.prompt(1, 10), [9, 1])
    values = torch.cat([first, cache.state(0)["given_importance"][:, :, -1:]], 2)
    own = cache_class()(model, importance=heard, backend="torch")
    feed(model, own, zoo.prompt(1, 10), [9, 1])
    values[..., 9:] = heard.of(0)[..., 9:]
    assert held(cache, 0, 0, 1) == stays(values[0, 1], [9, 10])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_function_each_forward_is_given(dtype: torch.dtype) -> None:
    model, cache = zoo.model("llama"), cache_class()(zoo.model("llama"), backend="torch")
    values = given(10, heads=1).to(dtype)
    for layer in cache.managed:
        cache.give(layer, importance=values[..., :9])
    feed(model, cache, zoo.prompt(1, 9), [9])
    for layer in cache.managed:
        cache.give(layer, importance=values[..., 9:])
    feed(model, cache, zoo.prompt(1, 1), [1])
    assert all(held(cache, 1, 0, head) == stays(values[0, 0], [9, 10]) for head in range(HEADS))


def test_no_number_ranks_lowest_and_infinities_where_they_belong() -> None:
    model, cache = zoo.model("llama"), cache_class()(zoo.model("llama"), backend="torch")
    values = torch.tensor([[[3.0, torch.nan, -torch.inf, 2.0, torch.inf, 1.0, 0.0, torch.nan, 5.0]]])
    for layer in cache.managed:
        cache.give(layer, importance=values)
    feed(model, cache, zoo.prompt(1, 9), [9])
    assert held(cache, 0, 0, 0) == [0, 3, 4, 5, 6, 8]


def test_a_default_stands_where_nothing_is_given() -> None:
    model = zoo.model("llama")
    cache = cache_class(LEARNED.replace("given importance", "given importance = -1.5"))(model, backend="torch")
    feed(model, cache, zoo.prompt(1, 9), [9])
    assert set(cache.state(0)["given_importance"][cache.positions(0) >= 0].tolist()) == {-1.5}
    assert held(cache, 0, 0, 0) == list(range(3, 9))  # of equals the newer stays


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_before_anything_is_cached() -> None:
    model, cache = zoo.model("llama"), cache_class()(zoo.model("llama"), backend="torch")
    with pytest.raises(KvdslError, match=r"`importance` of Learned .* for layer 0: .*`LearnedCache\(model, importance=f\)`"):
        feed(model, cache, zoo.prompt(1, 9), [9])
    for layer in cache.managed:
        cache.give(layer, importance=given(9))
    feed(model, cache, zoo.prompt(1, 9), [9])
    assert len(held(cache, 0, 0, 0)) == BUDGET


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (given(8), r"is \[1, 2, 8\] in layer 0; give .* here \[1, 2 or 1, 9\]"),
        (given(9, heads=4), r"is \[1, 4, 9\] in layer 0"),
        (given(9, batch=2), r"is \[2, 2, 9\] in layer 0"),
        (given(9)[0], r"is float32 \[2, 9\]; give a float tensor"),
        (given(9).long(), r"is int64 \[1, 2, 9\]; give a float tensor"),
        ([0.5], r"is \[0.5\]; give a float tensor"),
    ],
)
def test_a_value_of_another_shape_is_refused(value: Any, message: str) -> None:
    model = zoo.model("llama")
    by_function = cache_class()(model, importance=lambda module, hidden: value, backend="torch")
    with pytest.raises(KvdslError, match=f"`importance` of Learned {message}"):
        feed(model, by_function, zoo.prompt(1, 9), [9])
    beforehand = cache_class()(model, backend="torch")
    with pytest.raises(KvdslError, match=f"`importance` of Learned {message}"):
        beforehand.give(0, importance=value)
        feed(model, beforehand, zoo.prompt(1, 9), [9])


def test_what_the_policy_does_not_ask_for_is_refused() -> None:
    cache = cache_class()(zoo.model("llama"), backend="torch")
    with pytest.raises(KvdslError, match="no `worth` that could be given: it asks for `importance`"):
        cache.give(0, worth=given(9))
    with pytest.raises(KvdslError, match="there is no layer 2"):
        cache.give(2, importance=given(9))
    with pytest.raises(KvdslError, match="`importance` of Learned is Tensor; give a function"):
        cache_class()(zoo.model("llama"), importance=given(9), backend="torch")
    with pytest.raises(KvdslError, match="asks its caller for nothing"):
        kvdsl.load("h2o")(zoo.model("llama"), backend="torch").give(0, importance=given(9))


# -- copies, files and compiled forwards -------------------------------------------------------------------------------


def test_a_copy_asks_the_same_function() -> None:
    model, heard = zoo.model("llama"), Heard()
    cache = cache_class()(model, importance=heard, backend="torch")
    ids = zoo.prompt(1, 11)
    feed(model, cache, ids, [9])
    other, said = copy.deepcopy(cache), len(heard.said[0])
    feed(model, other, ids[:, 9:], [1, 1])
    assert len(heard.said[0]) == said + 2
    check(other, heard, [9, 10, 11])
    assert cache.positions(0).max() == 8
    feed(model, cache, ids[:, 9:], [1, 1])
    assert torch.equal(cache.positions(1), other.positions(1))


def test_a_saved_cache_is_given_its_function_again() -> None:
    model = zoo.model("llama")
    cache = cache_class()(model, importance=importance, backend="torch")
    ids = zoo.prompt(1, 11)
    feed(model, cache, ids, [9])
    saved = pickle.dumps(cache)
    forgotten, loaded = pickle.loads(saved), pickle.loads(saved)
    forgotten.attach(model)
    with pytest.raises(KvdslError, match="nothing was given for layer 0"):
        feed(model, forgotten, ids[:, 9:], [1])
    loaded.attach(model, importance=importance)
    for one in (cache, loaded):
        feed(model, one, ids[:, 9:], [1, 1])
    assert torch.equal(cache.positions(1), loaded.positions(1))
    assert torch.equal(cache.state(1)["given_importance"], loaded.state(1)["given_importance"])


def test_a_cache_hears_its_own_forwards_only_and_leaves_the_model_as_it_was() -> None:
    model, heard, other = zoo.model("llama"), Heard(), Heard()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    caches = [cache_class()(model, importance=one, backend="torch") for one in (heard, other)]
    feed(model, caches[0], zoo.prompt(1, 9), [9])
    with torch.no_grad():
        model(zoo.prompt(1, 9))
    assert len(heard.said[0]) == 1
    assert not other.said
    del caches
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("torch", marks=pytest.mark.nightly)])
def test_functions_are_part_of_a_compiled_step(backend: str) -> None:
    """One graph without breaks, which serves a later cache, too."""
    model = zoo.model("llama")
    torch._dynamo.reset()
    counters.clear()
    caches = [cache_class()(model, importance=importance, backend=backend) for _ in range(3)]
    tokens = [decode(model, run, cache, 8) for run, cache in zip((model, whole(model), whole(model)), caches, strict=True)]
    assert counters["stats"]["unique_graphs"] == 1
    assert all(cache.is_compileable for cache in caches)
    for ours, said in zip(caches[1:], tokens[1:], strict=True):
        assert torch.equal(said, tokens[0])
        assert_same_slots(ours, caches[0])


@pytest.mark.nightly
def test_what_is_given_beforehand_is_no_part_of_a_graph() -> None:
    model, cache = zoo.model("llama"), cache_class()(zoo.model("llama"), backend="torch")
    torch._dynamo.reset()
    assert not cache.is_compileable
    step = torch.compile(model.forward, dynamic=False, backend="eager")
    values = given(11, heads=1)
    for begin, end, run in ((0, 9, model), (9, 10, step), (10, 11, step)):
        for layer in cache.managed:
            cache.give(layer, importance=values[..., begin:end])
        with torch.no_grad():
            run(zoo.prompt(1, 11)[:, begin:end], **with_cache(cache))
    assert held(cache, 1, 0, 0) == stays(values[0, 0], [9, 10, 11])


@pytest.mark.nightly
def test_the_fused_kernels_keep_the_same_tokens() -> None:
    model, ids, found = zoo.model("llama"), zoo.prompt(2, 30), []
    for backend in ("torch", "cpu"):
        cache = cache_class()(model, importance=importance, backend=backend)
        feed(model, cache, ids, [9, *[1] * 12, 5, *[1] * 4])
        found.append(cache.positions(0))
    assert torch.equal(*(position.sort(-1).values for position in found))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_torch_s_defaults_change_nothing(backend: str) -> None:
    """Kernels read float32 on the CPU, whatever a script has made torch's default."""
    model, ids = zoo.model("llama"), zoo.prompt(2, 24)
    kind = cache_class(
        f"param budget = {BUDGET}\ngiven importance\nscore sum(attn) * importance + mean(attn over last 3 queries)"
    )

    def left() -> tuple[Tensor, list[Tensor]]:
        cache = kind(model, backend=backend, importance=importance)
        said = model.generate(**zoo.plain(ids), **with_cache(cache), max_new_tokens=8, do_sample=False)
        return said, [cache.positions(layer) for layer in range(len(cache.layers))]

    expected = left()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = left()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
