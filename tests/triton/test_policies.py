"""Every policy that has Triton kernels, in Triton's interpreter, against the reference interpreter, step-locked."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.differential import test_keeps
from tests.differential.cases import Case, compare
from tests.differential.test_random import NEAR_SHARE, POLICIES, RANDOM_INPUTS, draws_seed, load, random_case, run
from tests.differential.test_statements import STATEMENTS, VARIANTS
from tests.quick import few, thinned
from tests.texts import policy_of, spec_of

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_kernels(policy: str) -> None:
    assert load(policy)[1].triton_source.exists()


OTHER_KERNELS = ("scissorhands", "snapkv", "adakv", "lazy_streaming", "scissorhands_window", "quest", "random")
"""Beside those of the gate. What all of them keep is compared in `tests/kept`, and their statements below."""


@pytest.mark.parametrize("policy", few(("roco", "equip_h2o", "sparcas", *OTHER_KERNELS), "roco", "equip_h2o", "sparcas"))
def test_random_traces(policy: str) -> None:
    cases = [random_case(policy, 100)]
    random_inputs = run("triton", [case for case in cases if case.inputs in RANDOM_INPUTS])
    failures = random_inputs.failures + run("triton", [case for case in cases if case.inputs not in RANDOM_INPUTS]).failures
    assert not failures, f"KVDSL_TEST_SEED={draws_seed()}\n" + "\n".join(failures)
    assert random_inputs.near <= max(1, NEAR_SHARE * random_inputs.steps)


CORNERS = {
    "tails and splits": Case("roco", budget=70, prompt=90, steps=3, kv_heads=1, group=3, head_dim=80, value_dim=48),
    "SmolLM2's heads": Case("roco", budget=40, prompt=70, padding=9, batch=2, steps=3, kv_heads=3, group=3, head_dim=64),
    "many query heads": Case("h2o", group=17, kv_heads=1, given=(("recent", 4),), prompt=20, steps=4, head_dim=64),
    "half precision": Case("tova", dtype=torch.float16, prompt=20, steps=5, sinks=True, softcap=5.0),
    "a bias by distance": Case("roco", slopes=True, prompt=20, padding=6, batch=2, steps=6, group=3),
    "a bias, compact": Case("equip_h2o", slopes=True, prompt=20, batch=2, steps=6, given=(("recent", 4),)),
    "a bias, compact and turned": Case(
        "equip_h2o", slopes=True, prompt=20, padding=3, batch=2, steps=6, given=(("recent", 4),), rope="half"
    ),
    "a sketch, and a row without a prompt": Case("sparcas", prompt=20, padding=20, batch=2, steps=4),
    "a bias, selecting": Case("sparcas", slopes=True, prompt=40, batch=2, steps=4),
    "one slot": Case("tova", budget=1, prompt=1, steps=4, kv_heads=1, group=1),
    "padding": Case("roco", batch=3, prompt=20, padding=6, steps=5, dtype=torch.bfloat16),
    "everything protected": Case("roco", budget=6, given=(("protect", 6),), prompt=20, steps=5),
    "nearly everything protected": Case("roco", budget=20, given=(("protect", 19),), prompt=30, steps=5),
    "ties": Case("h2o", inputs="ties", prompt=20, steps=6, given=(("recent", 2),)),
    "zeros": Case("roco", inputs="zeros", prompt=20, steps=6),
    "NaN": Case("roco", inputs="nan", prompt=30, steps=6, batch=2),
    "infinities": Case("knorm", inputs="inf", prompt=30, steps=6, batch=2),
    "several tokens": Case("scissorhands", prompt=20, steps=6, at_once=3, window=7, given=(("recent", 2),)),
    "one slot, compact": Case("streaming_llm", budget=1, given=(("sinks", 0),), prompt=1, steps=4, group=1, rope="half"),
    "everything protected, compact": Case(
        "streaming_llm", budget=6, given=(("sinks", 5),), prompt=20, steps=5, group=3, head_dim=80, rope="half"
    ),
    "padding, compact": Case(
        "equip_h2o", batch=3, prompt=20, padding=6, steps=5, given=(("recent", 4),), rope="interleaved"
    ),
    "NaN, compact": Case("equip_h2o", inputs="nan", prompt=30, steps=6, batch=2, given=(("recent", 4),), rope="partial"),
    "several tokens, compact": Case(
        "lazy_streaming",
        given=(("sinks", 2), ("R", 4), ("sigma", 2), ("delta", 3)),
        prompt=20,
        steps=9,
        at_once=3,
        rope="half",
    ),
    "a cache that grows": Case("full", prompt=30, steps=5, kv_heads=1, group=1, head_dim=32),
}


@pytest.mark.usefixtures("watched_overflow")
@pytest.mark.parametrize(
    "corner",
    few(CORNERS, "tails and splits", "padding", "NaN", "ties", "several tokens", "one slot, compact"),
)
def test_corners(corner: str) -> None:
    total = run("triton", [CORNERS[corner]])
    assert total.steps > 0
    assert not total.failures


LAZY = {
    "lazily": "param budget = 20\nscore sum(attn)\ntrigger overflow >= 4\nslack 2\nmax_drop 3\nkeep top 5 by std(attn)",
    "never": "param budget = 8\nscore sum(attn)\ntrigger overflow >= 0",
    "after the prompt": "param budget = 8\nwhen decode\nscore mean(attn)\nkeep top 5 by last(attn)\nkeep where position == 3",
    "functions": (
        "param budget = 8\nparam a = 0.7\n"
        "score sum(attn ** 0.5) + 2 ** -age + exp(-age) % 0.3 + floor(a) + log(age + 1) - abs(min(age, 3, a))\n"
        "keep first 0.1 * budget\nkeep last where(budget > 4, a * 10 - 5, 1)\nkeep where not (position > 2 or age == 4)"
    ),
    "over slots": (
        "param budget = 8\nscore sum(attn >= max(attn over slots)) + sum(logit > mean(logit over slots) + std(logit over slots))\n"
        "keep top 2 by sum(attn) - min(sum(attn) over slots)\nkeep where mean(attn) > var(sum(attn) over slots) + 1"
    ),
    "of the token": (
        "param budget = 8\nscore max(abs(k) over dims) * mean(v over dims) - min(k over dims) + std(v over dims) + var(k over dims)"
    ),
    "pages of a param": (
        "param budget = 8\nparam page = 3\npages page after 1\nscore max(sum(attn) over page) + rank(last(attn) over page) / 9\n"
        "keep where min(last(attn) over next page) < 0.02"
    ),
    "group maximum": "param budget = 8\ngroup max\nscore max(attn) + min(logit)",
    "group sum": "param budget = 8\ngroup sum\nscore sum(attn) + last(logit)",
    "over slots, of the live": "param budget = 8\nscore sum(min(where(attn < 0.1, attn, live) over slots))",
    "a condition for all slots": (
        "param budget = 8\nscore sum(attn)\nkeep where position < 3\nkeep where max(last(attn) over slots) < 0.3"
    ),
    "heads agree on ranks": (
        "param budget = 9\nvictims shared by heads\nscore last(attn)\nkeep top 3 by std(attn)\nkeep where last(attn) > 0.3\n"
        "trigger overflow >= 3\ncap hard"
    ),
    "heads agree, compact": "param budget = 8\nvictims shared by heads\nscore sum(attn)\npositions compact\ntrigger overflow >= 2",
    # of protected tokens the newest that is there stays longest, not the row's newest, which may have left
    "room among the protected": "param budget = 8\nscore age\nkeep where age > 3\nkeep last 0\ncap hard",
    "heads agree on room among the protected": (
        "param budget = 8\nscore age\nkeep where age > 3\nkeep last 0\ncap hard\nvictims shared by heads"
    ),
    "random": "param budget = 8\nscore random() + age / 100 + where(budget > 4 and age > 30, 5, 0)",
}
COUNTS = re.compile(r"^budget (?!.*across layers).*(over slots|seen|enough|live)", re.MULTILINE)
"""Budgets that read the data."""

NAMES = [name for name, (text, _) in STATEMENTS.items() if not (COUNTS.search(text) and "when prefill" not in text) and not any(
    word in text for word in ("dot(", "select", "sketch", "shared by layers")) and not ("_pool" in text and "shared" in text)]  # fmt: skip
SELECTING = few(["select of a part", "compact selection", "select", "select pages", "sketch"], "select of a part")


@pytest.mark.filterwarnings("ignore:.*KV0424:UserWarning")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 15))])
def test_keeps_that_exceed_the_budget(seed: int) -> None:
    text, edition = test_keeps.overprotecting(seed)
    spec = spec_of(text, edition)
    if spec.triton_source.exists():
        case = replace(test_keeps.case_of(seed), steps=5, kv_heads=1)
        assert not compare(policy_of(text, edition), spec, "triton", case).failures, text


@pytest.mark.filterwarnings("ignore:.*KV0424:UserWarning")
def test_heads_that_agree_yield_together() -> None:
    text, case = test_keeps.SHARED["heads agree"]
    spec = spec_of(text, 2)
    assert spec.triton_source.exists()
    assert not compare(policy_of(text, 2), spec, "triton", replace(case, steps=4)).failures


@pytest.mark.parametrize("name", [*thinned(NAMES, 8), *few(LAZY, "lazily", "functions"), *SELECTING])
def test_statements(name: str) -> None:
    if name in LAZY:
        case = Case("p", batch=2, prompt=34, padding=5, group=2, rope="half" if "compact" in name else None)
        body = LAZY[name]
    else:
        body, case = STATEMENTS[name]
    policy, spec = policy_of(body), spec_of(body)
    assert spec.triton_source.exists()
    varied = VARIANTS["windowed"] if len(name) % 2 else {}
    heads = 1 if spec.victims == "own" else 3
    case = replace(case, steps=5, kv_heads=heads, **{**varied, "layer": 2})
    total = compare(policy, spec, "triton", case)
    assert total.steps > 0
    assert not total.failures, "\n".join(total.failures)
