"""How a cache lies in memory is said when it is made: in Python, by `kvdsl.load`, and on command lines."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.blocks import Blocks
from tests.cli.harness import run
from tests.hf import zoo

MEMORY = {"storage": "blocks:4", "rope": "cached"}
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def lies_so(cache: Any) -> bool:
    """Whether every layer lies in blocks of four slots, with rotated halves."""
    states = [cache.layers[index].state for index in cache.managed]
    return all(isinstance(one.layout, Blocks) and one.layout.size == 4 and one.half_keys.numel() for one in states)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_who_makes_the_cache_says_how_it_lies(backend: str) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(2, 30)
    given = {"budget": 12, "recent": 4, "backend": backend}
    plain, told = kvdsl.load("equip_h2o"), kvdsl.load("equip_h2o", **MEMORY)
    caches = [plain(model, **given), plain(model, **given, **MEMORY), told(model, **given)]
    back = told(model, **given, storage="in_place", rope="fused")
    texts = [model.generate(ids, **GREEDY, **with_cache(cache)) for cache in (*caches, back)]
    assert all(torch.equal(text, texts[0]) for text in texts[1:])
    assert [lies_so(cache) for cache in (*caches, back)] == [False, True, True, False]
    assert caches[1].bytes() > back.bytes() == caches[0].bytes()


def test_clauses_leave_it_as_it_was() -> None:
    made = kvdsl.load("equip_h2o", budget=20, **MEMORY).with_("keep first 2")
    assert made.spec.memory == (4, True, "model")
    assert made.with_("keep last 3", storage="in_place").spec.memory == (0, True, "model")
    with pytest.raises(KvdslError, match="leave out `rope`"):
        kvdsl.load("streaming_llm", rope="cached").with_("positions original")


@pytest.mark.parametrize("how", ["constructor", "load"])
def test_a_cache_that_is_saved_lies_as_it_did(how: str) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 30)
    given = {"budget": 12, "recent": 4, "backend": "torch"}
    made = kvdsl.load("equip_h2o", **MEMORY) if how == "load" else kvdsl.load("equip_h2o")
    cache = made(model, **given, **(MEMORY if how == "constructor" else {}))
    said = model.generate(ids, **GREEDY, **with_cache(cache))
    left, twin = pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)
    left.attach(model)
    assert lies_so(left) and lies_so(twin)
    longer = torch.cat([said, said[:, :3]], dim=1)
    texts = [model.generate(longer, **GREEDY, **with_cache(one)) for one in (cache, left, twin)]
    assert all(torch.equal(text, texts[0]) for text in texts)
    left.reset()
    model.generate(ids, **GREEDY, **with_cache(left))
    assert lies_so(left)


def test_a_command_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "equip_h2o", "--set", "budget=40", "--max-new-tokens", "4", "--backend", "torch", "--json")
    plain, told = (run(capsys, *words, *more).json() for more in ((), ("--storage", "blocks:8", "--rope", "cached")))
    assert plain["text"] == told["text"] and plain["cache_bytes"] < told["cache_bytes"]
    for more, message in (
        (("--storage", "blocks:0"), "use `in_place`, `blocks`, or `blocks:16`"),
        (("--rope", "kept"), "'fused', 'cached'"),
        (("--policy", "h2o", "--rope", "cached"), "leave out `rope`"),
    ):
        refused = run(capsys, *(words[:1] if "--policy" in more else words[:2]), *more)
        assert refused.code == 2 and message in " ".join(refused.err.split())
