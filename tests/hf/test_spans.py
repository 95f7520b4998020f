"""Spans and turns: what is marked is what the policy reads, whenever it is marked and whatever is done with the cache."""

from __future__ import annotations

import copy
import pickle
from functools import cache as once
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import zoo
from tests.hf.test_compile import assert_same_slots, whole
from tests.hf.test_given import feed, held

pytestmark = pytest.mark.nightly

DROPS = "input think from spans\nlet done = think and turn < turns\nbudget sum(not done over slots)\nscore not done"
COUNTS = "param budget = 9\ninput tool from spans\nscore mean(attn) * where(tool, 0.5 ** (turns - turn), 1)\nkeep last 2"
BACKENDS = ("torch", "cpu")


@once
def cache_class(body: str) -> Any:
    return kvdsl.compile(f'kv 2\n\npolicy Spanned {{\n  "A test."\n{body}\n}}\n')


def everywhere(cache: Any) -> set[tuple[int, ...]]:
    """What every layer and KV head holds of the first row."""
    return {tuple(held(cache, layer, 0, head)) for layer in cache.managed for head in range(2)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_thought_leaves_when_its_turn_ends(backend: str) -> None:
    model, cache, ids = zoo.model("llama"), cache_class(DROPS)(zoo.model("llama"), backend=backend), zoo.prompt(1, 24)
    cache.mark("think", 3, 6)
    feed(model, cache, ids[:, :10], [10])
    cache.mark("think", 10)
    feed(model, cache, ids[:, 10:13], [1, 1, 1])
    cache.mark("think", 10, 12)  # the third had not been thought
    assert everywhere(cache) == {tuple(range(13))}
    cache.end_turn()
    first = [0, 1, 2, *range(6, 10), 12]
    assert everywhere(cache) == {tuple(first)}
    cache.mark("think", 14, 16)
    feed(model, cache, ids[:, 13:18], [4, 1])
    assert everywhere(cache) == {(*first, 13, 14, 15, 16, 17)}
    cache.end_turn()
    assert everywhere(cache) == {(*first, 13, 16, 17)}
    cache.reset()
    feed(model, cache, ids[:, :8], [8])
    cache.end_turn()
    assert everywhere(cache) == {tuple(range(8))}, "marks are of the text that is forgotten"


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_be_marked_while_they_are_cached(backend: str) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(2, 20)
    early, late = (cache_class(COUNTS)(model, backend=backend) for _ in range(2))
    early.mark("tool", 2, 7, row=1)
    for cache in (early, late):
        feed(model, cache, ids[:, :9], [9])
    late.mark("tool", 2, 5, row=1)
    late.mark("tool", 4, 7, row=1)
    for cache in (early, late):
        cache.end_turn()
        feed(model, cache, ids[:, 9:], [1] * 6)
        assert cache.state(0)["given_turn"].max() == 1
    assert_same_slots(early, late)
    never = cache_class(COUNTS)(model, backend=backend)
    feed(model, never, ids, [9, *[1] * 6])
    assert held(never, 0, 0, 0) == held(early, 0, 0, 0)
    assert held(never, 0, 1, 0) != held(early, 0, 1, 0)


def test_padding_counts_in_no_place() -> None:
    model, rows = zoo.model("llama"), zoo.prompt(2, 14)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    cache = cache_class(DROPS)(model, backend="torch")
    cache.mark("think", 1, 3)
    with torch.no_grad():
        model(**inputs, **with_cache(cache))
    cache.end_turn()
    assert held(cache, 0, 0, 0) == [0, *range(3, 14)]
    assert held(cache, 0, 1, 0) == [0, *range(3, 9)]


def test_beams_copies_and_pickles_take_their_marks_along() -> None:
    model, ids = zoo.model("llama"), zoo.prompt(2, 10)
    cache = cache_class(DROPS)(model, backend="torch")
    cache.mark("think", 1, 3, row=1)
    cache.mark("think", 11, 12, row=1)
    feed(model, cache, ids, [10])
    cache.batch_select_indices(torch.tensor([1, 0]))
    copied, loaded = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    loaded.attach(model)
    for one in (cache, copied, loaded):
        feed(model, one, ids[:, :3], [3])
        one.end_turn()
        assert held(one, 1, 0, 0) == [0, *range(3, 11), 12]
        assert held(one, 1, 1, 0) == [*range(13)]


def test_what_is_taken_back_is_marked_when_it_comes_again() -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 12)
    cache = cache_class(COUNTS)(model, backend="torch")
    cache.activate_past_recording()
    feed(model, cache, ids, [9, 1, 1])
    cache.mark("tool", 0, 10)  # some have left, and return
    cache.crop(-2)
    state, position = cache.state(0)["given_tool"], cache.positions(0)
    assert torch.equal(state[position >= 0], (position[position >= 0] < 10).float())
    cache.end_turn()
    with pytest.raises(KvdslError):
        cache.crop(-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_marks_and_turns_are_part_of_a_compiled_step(backend: str) -> None:
    """One graph serves before and behind marks and a turn's end."""
    model, ids = zoo.model("llama"), zoo.prompt(2, 20)
    torch._dynamo.reset()
    counters.clear()
    caches = [cache_class(COUNTS)(model, backend=backend) for _ in range(2)]
    for cache, step in zip(caches, (model.forward, whole(model)), strict=True):
        with torch.no_grad():
            model(ids[:, :10], **with_cache(cache))
            for at in range(10, 18):
                if at == 12:
                    cache.mark("tool", at)
                elif at == 14:
                    cache.end_turn()
                elif at == 16:
                    cache.mark("tool", 12, at)
                step(ids[:, at : at + 1], **with_cache(cache), **zoo.place(model, at))
    assert counters["stats"]["unique_graphs"] == 1
    assert_same_slots(*caches)
    assert caches[1].state(0)["given_turn"].max() == 1


STOPS = "param budget = 6\nscore age\nkeep where token == 7 or token > 60"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_is_known_by_its_id(backend: str) -> None:
    """Eagerly, padded, and in a compiled step."""
    model, rows = zoo.model("llama"), zoo.prompt(2, 12)
    rows[:, 2], rows[:, 5] = 7, 8
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    cache = cache_class(STOPS)(model, backend=backend)
    with torch.no_grad():
        model(**inputs, **with_cache(cache))
    position, ids = cache.positions(0), cache.state(0)["given_token"]
    assert all(2 in held(cache, 0, row, 0) for row in range(2))
    for row in range(2):
        for slot in (position[row, 0] >= 0).nonzero().flatten().tolist():
            assert ids[row, 0, slot] == rows[row, position[row, 0, slot]]
    torch._dynamo.reset()
    caches = [cache_class(STOPS)(model, backend=backend) for _ in range(2)]
    for one, step in zip(caches, (model.forward, whole(model)), strict=True):
        with torch.no_grad():
            model(rows[:, :9], **with_cache(one))
            for at in range(9, 12):
                step(rows[:, at : at + 1], **with_cache(one), **zoo.place(model, at))
    assert_same_slots(*caches)
    with pytest.raises(KvdslError, match="reads `token`, but this forward brought no ids"), torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(rows), **with_cache(cache_class(STOPS)(model)))


def test_what_cannot_be_marked() -> None:
    model = zoo.model("llama")
    cache = cache_class(DROPS)(model, backend="torch")
    for told, message in (
        (("tool", 0, 3), "Spanned has no span `tool` that could be marked: it reads `think`"),
        (("think", -1, 3), "`start` is -1; give a place"),
        (("think", 3, 3), "a span from 3 to 3 holds no token"),
        (("think", 1.5, 3), "`start` is 1.5"),
    ):
        with pytest.raises(KvdslError) as error:
            cache.mark(*told)
        assert message in str(error.value)
    with pytest.raises(KvdslError, match="nothing is cached yet"):
        cache.end_turn()
    feed(model, cache, zoo.prompt(1, 5), [5])
    with pytest.raises(KvdslError, match=r"there is no row 1: the cache holds 1 \(0 to 0\)"):
        cache.mark("think", 0, 3, row=1)
    with pytest.raises(KvdslError, match="it reads none"):
        kvdsl.load("h2o")(model).mark("think", 0, 3)


def test_a_conversation_that_comes_as_one_prompt_has_its_turns() -> None:
    """What is thought in turns that have ended leaves at the prompt's end; then as turn by turn."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 24)
    whole, parts = (cache_class(DROPS)(model, backend="torch") for _ in range(2))
    for cache in (whole, parts):
        for stretch in ((1, 3), (9, 11), (17, 19)):
            cache.mark("think", *stretch)
    for at in (8, 16):
        whole.end_turn(at)
    feed(model, whole, ids[:, :20], [20])
    for first, last in ((0, 8), (8, 16), (16, 20)):
        feed(model, parts, ids[:, first:last], [last - first])
        if last < 20:
            parts.end_turn()
    assert everywhere(whole) == everywhere(parts) == {(0, *range(3, 9), *range(11, 20))}
    assert whole.state(0)["given_turn"].max() == 2
    for cache in (whole, parts):
        cache.end_turn()
        assert 17 not in held(cache, 0, 0, 0)


@pytest.mark.parametrize("at", [0, True, 2.0])
def test_a_turn_ends_at_a_place_of_the_text_to_come(at: Any) -> None:
    cache = cache_class(DROPS)(zoo.model("llama"), backend="torch")
    with pytest.raises(KvdslError, match="give a place in the text of one row, 1 or more"):
        cache.end_turn(at)


@pytest.mark.parametrize(("at", "tokens"), [(9, [8]), (4, [8, 4]), (8, [8, 1])])
def test_a_turn_that_ends_elsewhere_is_refused_when_the_text_comes(at: int, tokens: list[int]) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 24)
    cache = cache_class(DROPS)(model, backend="torch")
    if len(tokens) > 1:
        feed(model, cache, ids[:, :8], [8])
    cache.end_turn(at)
    with pytest.raises(KvdslError, match=f"a turn was said to end at place {at}"):
        feed(model, cache, ids[:, 8 : 8 + tokens[-1]], tokens[-1:])
