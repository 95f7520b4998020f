"""Every statement that decides something, in small policies, against the interpreter, step-locked."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from kvdsl.compiler import compile_text
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend
from tests.quick import few
from tests.texts import policy_of, spec_of

from .cases import Case, compare
from .traces import spec_of as units_spec
from .units import build

PADDED = Case("p", batch=2, prompt=34, padding=5, steps=12, group=2, kv_heads=2)

STATEMENTS: dict[str, tuple[str, Case]] = {
    # what queries gave
    "sum over last": ("param budget = 8\nscore sum(attn over last 5 queries)", PADDED),
    "all over last": (
        "param budget = 8\nparam n = 6\nscore max(attn over last n queries) + min(logit over last 3 queries)\n"
        "keep top 3 by std(attn over last n queries)\nkeep top 2 by mean(-attn over last n queries)",
        PADDED,
    ),
    "over last, per row": ("param budget = 8\nscore sum(attn over last prompt / 4 queries)", PADDED),
    "over last, of q": ("param budget = 8\ngroup max\nscore sum(dot(q, k) over last 4 queries)", PADDED),
    "ema": ("param budget = 8\nparam d = 0.8\nscore ema(attn, d)", PADDED),
    "ema without memory": ("param budget = 8\nscore ema(logit, 0) + ema(attn, 1)", PADDED),
    # a score along the text
    "max pool": ("param budget = 8\nscore max_pool(last(attn), 5)\nkeep first 2", PADDED),
    "mean pool": ("param budget = 8\nparam n = 6\nscore mean_pool(sum(attn), n)\nkeep top 3 by std(attn)", PADDED),
    "pool wider than the text": ("param budget = 8\nscore mean_pool(last(attn), 1000)", PADDED),
    # where and when
    "in some layers": ("param budget = 8\nlayers 1..2\nscore sum(attn)", replace(PADDED, layers=3)),
    "in other layers": ("param budget = 8\nlayers 2..\nscore sum(attn)", PADDED),
    "in the prompt": ("param budget = 8\nwhen prefill\nscore sum(attn)", PADDED),
    "while decoding": ("param budget = 8\nwhen decode\nscore sum(attn)", PADDED),
    "while decoding, lazily": (
        "param budget = 8\nwhen decode\nscore sum(attn)\ntrigger overflow >= 4\nslack 2\nmax_drop 3",
        PADDED,
    ),
    "prompt in blocks": ("param budget = 8\nprefill blocks of 6\nscore sum(attn)", PADDED),
    "prompt in blocks, lazily": ("param budget = 8\nprefill blocks of 4\ntrigger overflow >= 3\nscore last(attn)", PADDED),
    "prompt in one block": ("param budget = 8\nprefill blocks of everything\nscore sum(attn)", PADDED),
    "prompt in one block in lower layers": (
        "param budget = 8\nprefill blocks of where(layer < 3, everything, 6)\nscore sum(attn)",
        PADDED,
    ),
    "prompt in one block in other layers": (
        "param budget = 8\nprefill blocks of where(layer > 0, 6, everything)\nscore sum(attn)",
        PADDED,
    ),
    "blocks per row": ("param budget = 8\nprefill blocks of prompt / 5\nscore mean(attn)", PADDED),
    # who agrees
    "heads agree": ("param budget = 8\nvictims shared by heads\nscore sum(attn)", PADDED),
    "heads agree on keeps": (
        "param budget = 8\nvictims shared by heads\nscore max_pool(last(attn), 3)\nkeep top 3 by std(attn)\n"
        "keep where last(attn) < 0.02",
        PADDED,
    ),
    "heads agree, hard cap": ("param budget = 8\nvictims shared by heads\nscore sum(attn)\ncap hard", PADDED),
    "layers agree": ("param budget = 8\nvictims shared by layers\nscore sum(attn)", replace(PADDED, layers=3)),
    "layers agree on keeps": (
        "param budget = 8\nvictims shared by layers\nlayers 2..\nscore sum(attn)\nkeep top 3 by std(attn)\ncap hard",
        replace(PADDED, layers=3),
    ),
    "one budget": ("param budget = 8\nwhen prefill\nscore sum(attn)\nbudget budget across heads", PADDED),
    "one budget with floor": (
        "param budget = 9\nwhen prefill\nscore last(attn)\nbudget budget across heads floor 0.6\nkeep top 3 by std(attn)",
        PADDED,
    ),
    "layers share": (
        "param budget = 8\nwhen prefill\nscore sum(attn)\nbudget budget across layers by sum(sum(var(attn) over slots) over heads)",
        replace(PADDED, layers=3),
    ),
    "layers share with floor": (
        "param budget = 9\nwhen prefill\nscore last(attn)\nkeep first 2\nlayers ..2\nkeep top 3 by std(attn)\n"
        "budget budget + layer across heads floor 0.5 across layers by mean(max(norm2(v) over slots) over heads) ** 8 floor 0.2",
        replace(PADDED, layers=3),
    ),
    "layers share, heads agree": (
        "param budget = 8\nwhen prefill\nscore mean(attn)\nvictims shared by heads\n"
        "budget budget across layers by where(layer == 2, 3, 1) + 0 * mean(max(mean(attn) over slots) over heads)",
        replace(PADDED, layers=3),
    ),
    "layers share what it takes": (
        "param budget = 8\nwhen prefill\nscore sum(attn)\nbudget budget across layers by mean(enough(sum(attn), 0.8) over heads)",
        replace(PADDED, layers=3),
    ),
    "one pool": ("param budget = 8\nwhen prefill\nscore sum(attn)\nbudget budget across layers", replace(PADDED, layers=3)),
    "one pool with floor": (
        "param budget = 9\nwhen prefill\nscore norm2(v)\nlayers ..2\nkeep last 2\nkeep top 3 by std(attn)\n"
        "budget budget + 2 * layer across layers floor 0.6",
        replace(PADDED, layers=3),
    ),
    # how many
    "hard cap": ("param budget = 8\nscore sum(attn)\ncap hard", PADDED),
    # of protected tokens the newest that is there stays longest, not the row's newest, which may have left
    "hard cap among the protected": ("param budget = 8\nscore age\nkeep where age > 3\nkeep last 0\ncap hard", PADDED),
    "hard cap, one token": ("param budget = 1\nscore sum(attn)\ncap hard\nkeep last 0", PADDED),
    "hard cap, lazily": (
        "param budget = 8\nscore sum(attn)\ncap hard\ntrigger overflow >= 4\nslack 2\nmax_drop 3",
        PADDED,
    ),
    "slack and no trigger": ("param budget = 8\nscore sum(attn)\nslack 2", PADDED),
    "hard cap, never triggered": ("param budget = 8\nscore sum(attn)\ncap hard\ntrigger overflow >= 0", PADDED),
    # how many, as the data say
    "a share of the text": ("budget 0.3 * seen\nscore norm2(k)\nkeep first 1", PADDED),
    "a share of the text, bounded": (
        "budget 0.5 * seen at most 9\nscore sum(attn)\npositions compact",
        replace(PADDED, rope="half"),
    ),
    "above a threshold": (
        "budget sum(norm1(v) > 26 or age < 4 over slots) at most 10\nscore norm1(v)\nkeep last 4\nlayers 2..",
        replace(PADDED, layers=2),
    ),
    "above a threshold of attention": (
        "budget sum(mean(attn) > 0.1 over slots) + 2\nscore mean(attn)\nstorage blocks 4",
        PADDED,
    ),
    "a threshold that heads share": (
        "budget sum(norm1(v) > 26 over slots) + 2\nscore norm1(v)\nvictims shared by heads",
        PADDED,
    ),
    "a share of the text in blocks": ("budget 0.5 * seen\nscore sum(attn)\nprefill blocks of 6", PADDED),
    "counted after the prompt": ("budget sum(norm1(v) > 26 over slots)\nscore norm1(v)\nwhen prefill", PADDED),
    "counted lazily": (
        "budget 0.5 * live + 3\nscore norm1(v)\nwhen decode\ntrigger overflow >= 3\nslack 2\nmax_drop 2",
        PADDED,
    ),
    "a number of vectors": ("budget sqrt(sum(mean(v over slots) ** 2 over dims)) * 10\nscore sum(attn)", PADDED),
    "enough": ("budget enough(norm1(v), 0.6)\nscore norm1(v)", PADDED),
    "enough attention": ("budget enough(sum(attn), 0.9) at most 12\nscore sum(attn)", PADDED),
    "enough, from the newest on": ("budget enough(norm1(v), 0.6, position)\nscore position", PADDED),
    # what is attended to
    "select": ("param n = 5\nselect top n by dot(q, k)", PADDED),
    "select per group maximum": ("group max\nselect top 5 by dot(q, k) - age / 100\nkeep first 2", PADDED),
    "select of a part": ("param budget = 12\nscore mean(attn)\nkeep top 3 by std(attn)\nselect top 6 by dot(q, k)", PADDED),
    "select by values": ("select top 6 by norm2(v)\nkeep first 2", PADDED),
    "select enough": ("select top enough(exp(dot(q, k) / 4), 0.8) by dot(q, k)\nkeep last 0", PADDED),
    "select a share": ("group max\nselect top 0.3 * live by dot(q, k)", PADDED),
    "select above a threshold": (
        "param budget = 12\nscore sum(attn)\n"
        "select top min(sum(dot(q, k) > 0 over slots), 0.4 * seen) by dot(q, k) in layers 1..2",
        PADDED,
    ),
    "select above a threshold elsewhere": ("select top sum(dot(q, k) > 0 over slots) by dot(q, k) in layers 2..", PADDED),
    "select pages above a threshold": ("pages 4\nselect top sum(dot(q, k) > 0 over slots) by dot(q, k)", PADDED),
    "select pages": (
        "pages 4\nkeep last 3\nselect top 12 by sum(max(q * min(k over page), q * max(k over page)) over dims)",
        PADDED,
    ),
    "select from one page": (
        "pages everything\nselect top 6 by sum(max(q * min(k over page), q * max(k over page)) over dims)",
        PADDED,
    ),
    "select behind a prompt that evicts, by pages": (
        "param budget = 8\nscore sum(attn)\nwhen prefill\npages 4\nselect top 6 by dot(q, k)",
        PADDED,
    ),
    "select pages by token": ("pages 5\nselect top 16 by dot(q, k)\nkeep first 1", PADDED),
    "pages of what is left": ("param budget = 12\npages 3\nscore sum(attn)\nselect top 6 by dot(q, k)", PADDED),
    "sketch": ("sketch top 6 dims by abs(q) every 5 queries\nselect top 6 by dot(q, k over sketch)", PADDED),
    "sketch of keys": (
        "sketch top prompt / 6 dims by abs(q * mean(k over slots)) every 3 queries\n"
        "select top 6 by max(q * k over sketch) + sum(k * k over sketch)",
        PADDED,
    ),
    "heads choose together": (
        "group max\nselect top 6 by sum(exp(dot(q, k) / 3) / sum(exp(dot(q, k) / 3) over slots) over heads)",
        PADDED,
    ),
    "heads choose by ranks": ("select top 9 by max(rank(dot(q, k)) over heads) - age / 100\nkeep first 2\npages 2", PADDED),
    "heads choose in turn": (
        "group max\nselect top 9 by max(rank(dot(q, k)) * 64 - query_head over heads) + 0 * sum(query_head * q * k over dims)",
        PADDED,
    ),
    "heads choose as many as their number": (
        "select top 3 + sum(rank(dot(q, k)) < query_head over slots) by dot(q, k) / (1 + query_head)",
        PADDED,
    ),
    "heads choose and agree": (
        "param budget = 12\nscore mean(attn)\nvictims shared by heads\nselect top 6 by dot(q, k) - mean(norm2(k) over heads)",
        PADDED,
    ),
    "layers take over a choice": ("select top 5 by dot(q, k) in layers 2, 1 reused above", replace(PADDED, layers=3)),
    "layers take over what heads choose": (
        "keep last 0\nkeep first 1\nselect top 0.3 * prompt by max(rank(dot(q, k)) over heads) in layers layers - 2.5 reused above",
        replace(PADDED, layers=3),
    ),
    "layers take over as many as a query counts": (
        "pages 3\nsketch top 4 dims by abs(q) every 3 queries\n"
        "select top sum(dot(q, k over sketch) > 0 over slots) by dot(q, k over sketch) in layers 2 reused above",
        replace(PADDED, layers=3),
    ),
    # each query head selects for itself
    "each": ("group each\nselect top 5 by dot(q, k) - age / 100\nkeep first 2", replace(PADDED, group=3)),
    "each of what is left": (
        "group each\nparam budget = 14\nscore norm2(v)\nkeep first 1\nselect top 5 by dot(q, k)",
        replace(PADDED, group=3),
    ),
    "each by position": ("group each\nselect top 5 by age % 3 + position / 100", PADDED),
    "each by ranks and numbers": (
        "group each\nselect top 6 by rank(dot(q, k)) % 7 + query_head * k_0\nlet k_0 = max(k over dims)",
        PADDED,
    ),
    "each as many as it needs": (
        "group each\nselect top enough(exp(dot(q, k) / 4), 0.6) by dot(q, k) in layers 1..2\nkeep last 0",
        replace(PADDED, layer=2),
    ),
    "each a count of all": ("group each\nselect top 0.3 * seen by dot(q, k) in layers 2..", replace(PADDED, layer=2)),
    "each pages": (
        "group each\npages 4\nkeep last 3\nselect top 12 by sum(max(q * min(k over page), q * max(k over page)) over dims)",
        replace(PADDED, group=4),
    ),
    "each pages of its own number": ("group each\npages 3\nselect top sum(dot(q, k) > 0 over slots) by dot(q, k)", PADDED),
    "each pages by token": ("group each\npages 5 after 2\nselect top 16 by dot(q, mean(k over page))\nkeep first 1", PADDED),
    "each by a sketch of keys": (
        "group each\nsketch top 6 dims by max(abs(k) over slots) every 5 queries\nselect top 6 by dot(q, k over sketch)",
        PADDED,
    ),
    "each takes over its own": (
        "group each\nselect top 5 by dot(q, k) in layers 2, 1 reused above",
        replace(PADDED, layers=3, group=3),
    ),
    "each takes over pages": (
        "group each\npages 3\nselect top 0.4 * seen by dot(q, k) in layers 1 reused above\nkeep last 4",
        replace(PADDED, layers=3),
    ),
    "each in blocks of slots": ("group each\nstorage blocks 4\nselect top 6 by dot(q, k)\nkeep first 1", PADDED),
    "each, compact and biased": (
        "group each\npositions compact\nparam budget = 12\nscore position % 5\nselect top 5 by dot(q, k)",
        replace(PADDED, rope="half", slopes=True),
    ),
    # where it lies in the text
    "compact": ("param budget = 8\nscore sum(attn)\nkeep first 2\npositions compact", replace(PADDED, rope="half")),
    "compact, interleaved": (
        "param budget = 8\nscore last(logit)\npositions compact\nprefill blocks of 5",
        replace(PADDED, rope="interleaved"),
    ),
    "compact, partial": (
        "param budget = 8\nscore sum(dot(q, k))\npositions compact\ntrigger overflow >= 3",
        replace(PADDED, rope="partial"),
    ),
    "compact without rotation": ("param budget = 8\nscore sum(attn)\npositions compact", PADDED),
    "compact selection": (
        "positions compact\nparam budget = 12\nscore sum(attn)\nselect top 5 by dot(q, k)",
        replace(PADDED, rope="half"),
    ),
    # a bias that grows with the distance
    "biased": ("param budget = 8\nscore sum(attn)\nkeep last 2", replace(PADDED, slopes=True)),
    "biased logits": (
        "param budget = 8\nscore last(logit) + max(attn over last 3 queries)\nprefill blocks of 5\nvictims shared by heads",
        replace(PADDED, slopes=True),
    ),
    "biased and compact": (
        "param budget = 8\nscore sum(attn)\nkeep first 2\npositions compact\nprefill blocks of 5",
        replace(PADDED, slopes=True),
    ),
    "biased, compact and turned": (
        "param budget = 8\nscore last(logit)\npositions compact\ntrigger overflow >= 3\nstorage blocks 4",
        replace(PADDED, slopes=True, rope="half"),
    ),
    "biased selection": (
        "positions compact\nparam budget = 12\nscore sum(attn)\nselect top 5 by dot(q, k)",
        replace(PADDED, slopes=True),
    ),
}

VARIANTS = {
    "cut": {"cuts": 4, "at_once": 2, "dtype": torch.bfloat16, "kv_heads": 3},
    "windowed": {"window": 7, "sinks": True, "softcap": 5.0, "layer": 2, "inputs": "peaky", "group": 1},
}

NEAR_SHARE = 0.05


def case_of(name: str, variant: str) -> Case:
    body, case = STATEMENTS[name]
    case = replace(case, **VARIANTS[variant])
    if "shared by layers" in body:
        case = replace(case, at_once=1)
    if "shared by layers" in body or case.layers > 1:
        case = replace(case, layer=1)  # of four
    if any("prompt" in size for size in body.splitlines() if "over last" in size):
        case = replace(case, cuts=1)
    return case


def check(policy: Policy, spec: PolicySpec, backend: str | Backend, case: Case) -> None:
    total = compare(policy, spec, backend, case)
    assert total.steps > 0
    assert not total.failures, "\n".join([policy.doc, *total.failures])
    assert total.near <= NEAR_SHARE * total.steps, f"{policy.doc}: {total.near} of {total.steps}"


@pytest.mark.parametrize("variant", few(VARIANTS, "cut"))
@pytest.mark.parametrize("name", STATEMENTS)
def test_torch_does_what_the_interpreter_does(name: str, variant: str) -> None:
    body, _ = STATEMENTS[name]
    check(policy_of(body), spec_of(body), "torch", case_of(name, variant))


@pytest.mark.parametrize(("variant", "part"), few(product(VARIANTS, range(2)), ("cut", 0)))
def test_cpp_does_what_the_interpreter_does(variant: str, part: int) -> None:
    """Half of them in one translation unit."""
    named = {f"p{n}": name for n, name in enumerate(STATEMENTS) if n % 2 == part}
    texts = {stem: f'kv 1\npolicy {stem.upper()} {{\n"{name}"\n{STATEMENTS[name][0]}\n}}\n' for stem, name in named.items()}
    compiled = {stem: compile_text(text) for stem, text in texts.items()}
    fused = [stem for stem, one in compiled.items() if "kernels_cpu.cpp" in one.files]
    cases = {stem: case_of(named[stem], variant) for stem in fused}
    specs = {stem: units_spec(compiled[stem].policy, compiled[stem].files) for stem in fused}
    assert len(fused) > 40
    backends = build(
        {stem: (compiled[stem].files["kernels_cpu.cpp"], specs[stem], cases[stem].dtype) for stem in fused}, "-O0"
    )
    for stem in fused:
        check(add_columns(compiled[stem].policy), specs[stem], backends[stem], cases[stem])


def test_blocks_do_not_depend_on_how_the_prompt_is_cut() -> None:
    """One forward, or several that end anywhere, the rows' blocks at different columns."""
    spec = spec_of(STATEMENTS["prompt in blocks"][0])
    make = torch.Generator().manual_seed(3)
    query = torch.randn(3, 4, 41, 8, generator=make)
    key, value = torch.randn(2, 3, 2, 41, 8, generator=make)
    real = torch.arange(41) >= torch.tensor([[0], [3], [11]])
    whole = _prefilled(spec, AttentionCall(query, key, value, real, 0.3), [41])
    assert (whole.position >= 0).sum(-1).tolist() == [[13, 13], [10, 10], [8, 8]]  # of 41, 38 and 30 tokens in blocks of 6
    for ends in ([10, 20, 41], [1, 2, 3, 41], [12, 36, 41], list(range(1, 42))):
        parts = _prefilled(spec, AttentionCall(query, key, value, real, 0.3), ends)
        assert torch.equal(parts.position, whole.position), ends
        live = whole.position >= 0
        assert torch.allclose(parts.columns[:, live], whole.columns[:, live], atol=1e-5)


def _prefilled(spec: PolicySpec, call: AttentionCall, ends: list[int]) -> SlotState:
    state = SlotState(spec, {})
    for begin, end in zip([0, *ends], ends, strict=False):
        query, key, value = (x[:, :, begin:end] for x in (call.query, call.key, call.value))
        assert call.real is not None
        TorchBackend().prefill(state, AttentionCall(query, key, value, call.real[:, begin:end], call.scaling))
    return state
