"""More tokens are protected than the budget keeps: which ones leave does not change, but somebody is told."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import zoo
from tests.quick import few

BEYOND = "param budget = 50\nscore mean(attn)\nkeep where position < prompt\n"
WITHIN = "param extra = 50\nbudget prompt + extra\nscore mean(attn)\nkeep where position < prompt\n"
UNION = "param budget = 24\nscore mean(attn)\nkeep first 4\nkeep top 16 by -position\nkeep last 12\n"
OVERLAP = UNION.replace("-position", "position")
TOPS = "param budget = 24\nscore mean(attn)\nkeep top 14 by position\nkeep top 14 by -position\n"


def cache_of(body: str, **given: Any) -> Any:
    policy = kvdsl.compile(f'kv 1\n\npolicy Guarding {{\n  "A policy."\n{body}}}\n')
    return policy(zoo.model("llama"), **given)


def read(cache: Any, *sizes: int, rows: int = 2) -> Tensor:
    with torch.no_grad():
        for part in zoo.prompt(rows, sum(sizes)).split(list(sizes), 1):
            out = zoo.model("llama")(part, **with_cache(cache)).logits
    return out


def told(cache: Any, *sizes: int, rows: int = 2) -> list[str]:
    """What the reading warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read(cache, *sizes, rows=rows)
    return [str(one.message) for one in found if "protected tokens leave" in str(one.message)]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("when", ["both", "decode"])
def test_a_prompt_that_is_protected_beyond_the_budget(when: str, backend: str) -> None:
    """Whether it leaves with the prompt's end or afterwards."""
    cache = cache_of(BEYOND + ("" if when == "both" else f"when {when}\n"), backend=backend)
    (said,) = told(cache, 60, 1, 1)
    assert "Guarding protects 60 tokens in row 0 (layer 0, a KV head), but its budget keeps 50 of them" in said
    assert "budget prompt + 512" in said and cache.positions(0)[0, 0].ge(0).sum() == 50


def test_once_a_cache() -> None:
    """Not once a layer, a prompt or a process; copies and saved caches have been told, too."""
    cache = cache_of(BEYOND)
    assert len(told(cache, 60, 1, 60)) == 1
    assert not told(copy.deepcopy(cache), 60)
    again = pickle.loads(pickle.dumps(cache))
    again.attach(zoo.model("llama"))
    assert not told(again, 60)
    cache.reset()
    assert not told(cache, 60)
    assert len(told(cache_of(BEYOND), 60)) == 1


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (BEYOND, 50),
        (BEYOND, 20),
        (WITHIN, 200),
        (OVERLAP, 60),
        ("param budget = 9\nscore mean(attn)\nkeep first 4\nkeep last 5\n", 60),
    ],
)
def test_nothing_is_said_where_all_of_it_stays(body: str, prompt: int) -> None:
    assert not told(cache_of(body), prompt, *[1] * 60)


@pytest.mark.parametrize(
    ("body", "count", "room"), few([(UNION, 28, 24), (TOPS, 28, 24), (OVERLAP + "cap hard\n", 24, 23)], (TOPS, 28, 24))
)
def test_unions(body: str, count: int, room: int) -> None:
    """Of several lines together, and where room is made for a token before it comes."""
    body = body.replace("keep top 16 by position", "keep top 20 by position") if "cap" in body else body
    (said,) = told(cache_of(body), 60)
    assert f"protects {count} tokens" in said and f"keeps {room} of them" in said


@pytest.mark.nightly
def test_what_the_message_says_is_what_happens() -> None:
    """A protected token has left exactly where somebody was told."""
    for budget in range(20, 40, 3):
        cache = cache_of(UNION.replace("budget = 24", f"budget = {budget}"))
        said = told(cache, 60)
        protected = {*range(16), *range(48, 60)}
        held = set(cache.positions(0)[0, 0].tolist()) - {-1}
        assert bool(protected - held) == bool(said), budget


def test_one_row_of_several() -> None:
    """The row is named, and padding does not count."""
    cache, ids = cache_of(BEYOND), zoo.prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :15] = 0
    with pytest.warns(UserWarning, match=r"protects 60 tokens in row 1 \("):
        zoo.model("llama")(ids, attention_mask=mask, **with_cache(cache))


@pytest.mark.parametrize("who", ["heads", "layers"])
def test_victims_that_are_shared(who: str) -> None:
    assert len(told(cache_of(BEYOND + f"victims shared by {who}\n"), 60)) == 1
    assert not told(cache_of(WITHIN + f"victims shared by {who}\n"), 60)


def test_heads_that_share_a_budget() -> None:
    body = BEYOND.replace("score", "budget budget across heads\nscore") + "when prefill\n"
    (said,) = told(cache_of(body), 60)
    assert "protects 120 tokens in row 0 (layer 0), but its budget keeps 100" in said


def test_blocks_of_a_prompt() -> None:
    assert len(told(cache_of(UNION + "prefill blocks of 40\n"), 100)) == 1


def test_a_budget_that_reads_the_data() -> None:
    body = "param share = 0.5\nbudget share * seen\nscore mean(attn)\nkeep where position < prompt\n"
    (said,) = told(cache_of(body), 60)
    assert "protects 60 tokens" in said and "keeps 30 of them" in said


@pytest.mark.parametrize(
    "name", few(["roco_easykv", "raas", "scope", "roco", "criticalkv", "vase", "prefill_decoding"], "roco", "raas")
)
def test_shipped_policies_keep_what_they_protect(name: str) -> None:
    policy = kvdsl.load(name)
    assert policy.spec.overprotects
    given = {"budget": 50} if name in ("roco", "criticalkv", "vase") else {"text": 50} if name == "scope" else {}
    assert not told(policy(zoo.model("llama"), **given), 90, 1, 1)
