"""Policies that once made backends differ from the interpreter, or crash. Each is here with what was wrong."""

from __future__ import annotations

import pytest

from kvdsl.compiler import analyse
from kvdsl.passes.fold import fold
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl.source import SourceFile
from tests.quick import thinned
from tests.texts import policy_of, spec_of

from .cases import Case, compare
from .traces import Trace, run_policy

BODIES: dict[str, tuple[str, Case]] = {
    # resolve() called torch functions that cache.py did not import
    "param of the prompt": ("param a = 4\nbudget max(prompt / 4, a)\nscore sum(attn)", Case("p", prompt=30)),
    "floor of the prompt": ("budget floor(prompt / 3) + 2\nscore sum(attn)", Case("p", prompt=30)),
    # a constant was no tensor per row
    "constant budget": ("budget 6\nscore sum(attn)", Case("p", batch=2, prompt=12)),
    # printed as --x, a decrement
    "double negation": ("param budget = 6\nscore -(-sum(attn))", Case("p", budget=6)),
    # -2 ** x is -(2 ** x)
    "negative base": ("param budget = 6\nscore (-2) ** age * sum(attn)", Case("p", budget=6)),
    # one row's trigger decided for all: a row that never prunes ran out of slots
    "trigger per row": (
        "param budget = 4\nscore sum(attn)\ntrigger overflow >= floor(prompt / 10)",
        Case("p", budget=4, batch=2, prompt=12, padding=6, steps=12),
    ),
    # less than one was 0, with which nothing ever leaves, or all that is too many
    "trigger below one": (
        "param budget = 4\nscore sum(attn)\ntrigger overflow >= prompt / 10\nslack 3\nmax_drop prompt / 10",
        Case("p", budget=4, batch=2, prompt=12, padding=6, steps=12),
    ),
    # layers that neither choose nor select counted, too, how many tokens to select
    "a count in other layers": (
        "select top 0.7 * seen by dot(q, k) in layers 1 reused above\nkeep last 0",
        Case("p", prompt=9, layers=2),
    ),
    "a count in layers above": (
        "sketch top 4 dims by abs(q) every 4 queries\nselect top 0.5 * seen by dot(q, k over sketch) in layers 1..",
        Case("p", prompt=9, layers=2),
    ),
    # a NaN at position 0 ranked with the free slots
    "NaN at position 0": (
        "param budget = 4\nscore position\nkeep top prompt + 2 by position / position\ntrigger overflow >= 3",
        Case("p", budget=4, batch=2, prompt=6, padding=3),
    ),
    # more than an int holds
    "count past int": (
        "budget prompt / 2\nscore position\nkeep top 3000000000 by age\nkeep last 0",
        Case("p", prompt=12),
    ),
    # a remainder by infinity, and by what no float is exactly
    "modulo": ("param budget = 6\nscore position % (6 / age) + (position % 0.1) * 0", Case("p", budget=6)),
    # keeps of one kind overlap: 5 and 6 are 6
    "keeps of one kind": ("param budget = 8\nscore sum(attn)\nkeep last 5\nkeep last 6", Case("p", budget=8, prompt=20)),
    # one number for all slots: the older leaves
    "constant score": ("param budget = 6\nscore 5\nkeep where layer < 3 and position < 2", Case("p", budget=6)),
    # slack without max_drop has no effect, and is not allocated
    "slack alone": ("param budget = 4\nscore sum(attn)\nslack 50", Case("p", budget=4, prompt=12)),
    "lazy pruning": (
        "param budget = 4\nscore sum(attn)\ntrigger overflow >= 3\nslack 2\nmax_drop 1",
        Case("p", budget=4, batch=2, prompt=12, padding=3, at_once=2, steps=12),
    ),
    "group max and live": (
        "param budget = 6\ngroup max\nscore sum(attn * live)\nkeep last 2",
        Case("p", budget=6, group=4, batch=2, prompt=12, padding=3),
    ),
    # a column's name began with the number
    "a number first in a ring": ("param budget = 6\nscore sum(1 > attn * 3 over last 3 queries)", Case("p", budget=6)),
    # a literal that is infinite in float32 is an error in torch, and a warning in C++
    "more than float32 holds": ("param budget = 6\nscore min(sum(attn), 1e43) + (age > -1e39)", Case("p", budget=6)),
    # a function of a slot that does not look at it has no use for its argument's name
    "a condition on the number of tokens": (
        "param budget = 6\nscore sum(attn)\nkeep where live > 6\ntrigger overflow >= 2",
        Case("p", budget=6),
    ),
    # torch.where of two literals was of integers, or of float32 where counts are float64
    "a choice of two literals": (
        "param budget = 6\nscore sum(attn) + std(where(k > 0, 1, 0) over dims)\n"
        "keep last 10 * where(prompt > 4, 0.30000001, 0) - 2.0000001",
        Case("p", budget=6),
    ),
    # 0.7 * 10 - 5 is 2, but a fused multiply-add says 1.9999999999999996
    "a product in a count": (
        "param budget = 10\nparam share = 0.7\nscore position\nkeep top share * budget - 5 by age\nkeep last 0",
        Case("p", budget=10, prompt=14, steps=8),
    ),
    "what reads q": ("param budget = 6\nscore std(dot(q, k)) + max(logit)", Case("p", budget=6, group=4)),
    # a budget of no token at all emptied the cache
    "a share of a short prompt": (
        "param share = 0.25\nbudget share * prompt\nscore age\nkeep last 0",
        Case("p", prompt=3, steps=4),
    ),
    # the sketch of padding served a row until the next was due
    "a sketch, and a row without a prompt": (
        "param t = 4\nsketch top 3 dims by abs(q) every 6 queries\nselect top t by dot(q, k over sketch)",
        Case("p", batch=2, prompt=9, padding=9, steps=14),
    ),
}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_param_beside_values(backend: str) -> None:
    """It may change with the prompt, so it is no column of the token's own."""
    body = "param budget = 6\nparam a = prompt / 4\nscore sum(attn) * sum(abs(v) * a over dims)"
    policy, spec = policy_of(body), spec_of(body)
    assert [column.rule for column in policy.columns] == ["sum"]
    assert not compare(policy, spec, backend, Case("p", budget=6)).failures


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", thinned(BODIES, 8))
def test_backends_agree_with_the_interpreter(name: str, backend: str) -> None:
    body, case = BODIES[name]
    total = compare(policy_of(body), spec_of(body), backend, case)
    assert not total.failures, "\n".join(total.failures)
    assert total.near <= 0.2 * total.steps


# -- what random policies found ----------------------------------------------------------------------------------------

FOUND: dict[str, tuple[str, Trace]] = {
    # with only such columns there is nothing to observe, and no function that would
    "columns of tokens alone": ("param budget = 6\nscore min(v over dims)", Trace(batch=2)),
    # a softmax over a NaN made NaN of the probabilities of what the query skips, which are 0
    "a NaN among what is selected": (
        "param budget = 8\nscore sum(attn)\nselect top 4 by dot(q, k)\ngroup max",
        Trace(group=8, inputs="nan", batch=2, steps=12, seed=3),
    ),
    # 0 / 0 is no count
    "counts that are NaN": (
        "param budget = 6\nscore sum(attn over last layer / layer queries)\nkeep top layer / layer by age\nslack 4\n"
        "trigger overflow >= 3\nmax_drop layer / layer",
        Trace(layers=(0,), batch=2),
    ),
    # nobody was asked, and the mean of nothing taken
    "layers that share victims but do not evict": (
        "param budget = 6\nscore mean(attn)\nvictims shared by layers\nlayers 3..3",
        Trace(layers=(0, 1, 2), batch=2),
    ),
    # of pages that rank the same the newer: those before the first have numbers below 0, which counted as 0
    "pages before the first": (
        "pages 5 after 19\nselect top 10 by floor(age / 1000)",
        Trace(batch=2),
    ),
    # what the prompt's queries gave is each query head's own, and was taken for the group's within a page
    "ranks in pages of what query heads have": (
        "param budget = 8\npages 4\nwhen prefill\nscore rank(max(dot(q, k) over text) over page) + position / 100",
        Trace(group=2, batch=2),
    ),
    "pages of what query heads have": (
        "param budget = 8\npages 4\nwhen prefill\nscore mean(max(dot(q, k) over text) over page) - max(dot(q, k) over text)",
        Trace(group=2, batch=2),
    ),
    "ranks over heads of what is pooled over query heads": (
        "param budget = 6\nbudget budget across heads floor 0.5\nwhen prefill\n"
        "score rank(mean_pool(min(dot(q, k) over text), 3) over heads)",
        Trace(group=2, batch=2, kv_heads=2),
    ),
    # the interpreter's mean of turns is NaN of infinities that meet, a sum of turns is infinite
    "places ahead of what is infinite": (
        "param budget = 4\nscore min(where(live < position, sum(ahead(q, 9) over dims), attn) over queries)",
        Trace(group=4, head_dim=4, batch=2, kv_heads=3, inputs="inf", seed=593819402, steps=12),
    ),
    # a recurrence of nothing differs from slot to slot as positions do
    "shares of layers by a recurrence of nothing": (
        "param budget = 6\nbudget budget across layers by max(sum(fold(prev * 0.5 + prev, 1) over slots) over heads)\n"
        "when prefill\nscore sum(attn)",
        Trace(batch=2, layers=(0, 1)),
    ),
}


@pytest.mark.parametrize("name", thinned(FOUND, 3))
def test_what_random_policies_found(name: str) -> None:
    body, trace = FOUND[name]
    checked = analyse(SourceFile("p.kv", f'kv 1\npolicy P {{\n"a test"\n{body}\n}}\n')).policy
    tally = run_policy(fold(checked), TorchBackend(), trace)
    assert tally.steps > 0
    assert not tally.failures, "\n".join(tally.failures)
