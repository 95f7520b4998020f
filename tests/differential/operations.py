"""Policies that use one operation of `kvdsl.ir.ops` each, wherever it can stand, for every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvdsl.compiler import analyse
from kvdsl.ir import ops
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_given, print_tensor
from kvdsl.passes.fold import fold
from kvdsl.source import SourceFile

from .given import GIVEN
from .tensors import BESIDE, GROUPED, MATRICES, TENSORS
from .traces import Trace

TARGETS = ("cpu", "torch", "triton")

_EVICTS = "param budget = 7\nscore {}"
_REDUCED = {
    "queries": (_EVICTS, "{op}(attn{decay})"),
    "history": (_EVICTS, "{op}(attn over last 3 queries{decay})"),
    "slots": (_EVICTS, "sum(attn > {op}(attn over slots)) + position * {op}(sum(attn) over slots)"),
    "dims": (_EVICTS, "{op}(k over dims) + sum({op}(q * k over dims))"),
    "dims, of some tokens": (_EVICTS, "sum(attn) + {op}(k over dims where age != 4)"),
    "sketch": ("sketch top 3 dims by abs(q) every 2 queries\nselect top 5 by {}", "{op}(q * k over sketch)"),
    "page": (
        "param budget = 7\npages 3\n{}",
        "score {op}(sum(attn) over page) + age\nselect top 5 by sum(q * {op}(k over page) over dims)",
    ),
    "next": (
        "param budget = 7\npages 3 after 1\n{}",
        "score where(position < 6, {op}(sum(attn) over next page), age)\n"
        "select top 5 by sum(where(position < 3, q * {op}(k over next page), k) over dims)",
    ),
    "text": (
        "param budget = 7\nwhen prefill\nscore {}",
        "{op}(dot(q, k) + query_position over text after 2) + sum(attn) * {op}(query_position - position over text)"
        " + dot({op}(q over text), k)",
    ),
    "others": (
        "param budget = 7\nscore {}",
        "{op}(dot(k, other(v)) + other(sum(attn)) * age over others) + norm1({op}(k - other(k) over others)) / 9",
    ),
    "heads": (
        "param budget = 7\nwhen prefill\nscore sum(attn)\nbudget budget across layers by {}",
        "{op}(var(sum(attn) over slots) over heads) + 0.1",
    ),
}
"""By what a reduction ranges over: where it stands, and what it is there."""

_SOME = {
    "queries": (_EVICTS, "{op}(attn where age % 3 != 1) + {op}(attn where attn > 0.15 or age == 0)"),
    "history": (_EVICTS, "{op}(attn over last 4 queries where age % 2 == 0 or attn > 0.1)"),
    "slots": (
        _EVICTS,
        "sum(attn > {op}(attn over slots where age < 5)) + position * {op}(sum(attn) over slots where position != 2)",
    ),
    "dims": (_EVICTS, "{op}(k over dims where k < 1) + sum({op}(q * k over dims where q != k))"),
    "sketch": ("sketch top 3 dims by abs(q) every 2 queries\nselect top 5 by {}", "{op}(q * k over sketch where k < 9)"),
    "page": ("param budget = 7\npages 3\nscore {} + age / 9", "{op}(sum(attn) over page where age != 2)"),
    "next page": (
        "param budget = 7\npages 3\nscore {} + age",
        "where(position < 6, {op}(v_ over next page where v_ > 0), 0)\nlet v_ = norm1(v)",
    ),
    "text": (
        "param budget = 7\nwhen prefill\nscore {}",
        "{op}(dot(q, k) over text where query_position % 2 == 0 or query_position > position)",
    ),
    "slots as j": (
        _EVICTS,
        "{op}(dot(k, j.v) over slots as j) + {op}(j.(last(attn)) over slots as j where j.position <= position)",
    ),
    "others": (_EVICTS, "{op}(dot(k, j.v) + age over slots as j where j.position != position and j.age < 7)"),
    "a key": (
        _EVICTS,
        "{op}(sum(attn) over slots by position % 3) + norm1({op}(k over slots where age > 1 by age % 2 > 0)) / 9",
    ),
    "heads": (
        "param budget = 7\nwhen prefill\nscore sum(attn)\nbudget budget across layers by {}",
        "{op}(var(sum(attn) over slots) over heads where live > 1) + 0.1",
    ),
}
"""Where a reduction takes a part of what it ranges over, or groups it."""

_CALLED = {
    1: "{name}(sum(attn)) + sum({name}(attn + age))",
    2: "{name}(sum(attn), age) + sum({name}(attn, 0.3))",
    3: "{name}(last(attn) > 0.3, sum(attn), age) + sum({name}(attn > 0.3, attn, age))",
}
_WRITTEN = {"neg": "-sum(-attn)", "not": "(not (last(attn) > 0.3)) + sum(not (attn > 0.3))"}
"""Functions by how many arguments they take, and the operators of one operand."""

_READING = {
    "what a token has": "param budget = 7\nscore -dot(vector, k) + max(where(vector > head, k, head * direction) over dims)",
    "a score": "param budget = 7\nscore sum(attn) * where(head > 0.5, head, layer_) - head\nkeep where age < 3 * head",
    "a score, before a token is placed": "param budget = 7\nscore head * sum(attn) - position * layer_\ncap hard",
    "who leaves a prompt": "param budget = 4\nscore where(head == layer_, age, sum(attn) - age)\nkeep first 1",
    "a reduction over queries": "param budget = 7\nscore mean(attn * head + layer_) + sum(attn > head * max(attn over slots))",
    "a reduction over queries and dims": "param budget = 7\nscore max(sum(q * vector * k over dims))",
    "a selection": "select top 5 by dot(q * direction, k) + head * position",
    "a budget": "param big = 7\nbudget where(head > 0, big, prompt + 1 + layer_)\nscore sum(attn) * budget - age\nkeep last budget / 3\n"
    "keep first 1 + (head > 0.5)",
    "a budget of staged eviction": "param more = 3 * (head > 0)\nbudget 4 + more\nscore last(attn)\nkeep top 2 + (head > 0) by age\n"
    "trigger overflow >= 1 + more\nslack more\nmax_drop 1 + more",
    "a budget with a hard cap": "budget 4 + 3 * (head > 0)\nscore sum(attn)\nkeep first 1 + (head > 0)\nslack (head > 0.3)\ncap hard",
    "the count of a selection": "select top 3 + 2 * (head > 0) by dot(q, k)",
    "a count that a selection keeps": "select top 5 by dot(q, k)\nkeep last 1 + (head > 0)",
    "a projection of what is selected": "select top 5 by dot(project(q, matrix), project(k, matrix)) "
    "+ sum(abs(project(k, turned)) over dims)",
    "a projection of a score": "param budget = 7\nscore sum(dot(project(q + k, turned), project(k, turned) * attn)) "
    "- norm2(project(k * vector, matrix))",
    "a projection of a mean": "param budget = 7\nscore dot(project(mean(k over slots), matrix), project(k, matrix)) "
    "+ max(project(k, matrix) over dims)",
    "a reduction over queries, beside a projection": "param budget = 7\nwhen prefill\n"
    "score sum(attn * head + layer_) * sum(abs(project(k, turned)) over dims)",
    "a count that heads agree on": "param budget = 7\nvictims shared by heads\nscore sum(attn)\nkeep top 1 + 2 * (layer_ > 0) by std(attn)",
    "vectors of query heads": "param budget = 7\nscore dot(asking, ahead(k, 3)) + norm2(project(k, spread))"
    " + max(attn * dot(asking, pairs(k)))",
    "vectors of query heads, in the text": "param budget = 7\nwhen prefill\ngroup max\nscore mean(dot(q * asking, k) over text) + age / 9",
    "a selection by vectors of query heads": "select top 5 by dot(asking, k) + norm2(project(q * k, spread))",
    "a sketch": "sketch top 3 dims by abs(direction) every 2 queries\nselect top 5 by dot(q, k over sketch)",
}

_GIVEN = {
    "what a token has": "param budget = 7\nscore max(k * gift over dims) + sum(trust - v over dims)",
    "a score": "param budget = 7\nscore gift * sum(attn) - trust\nkeep where gift > 1\nkeep top 2 by trust",
    "a score, before a token is placed": "param budget = 7\nscore gift + trust * random()\ncap hard",
    "a score that heads agree on": "param budget = 7\nscore gift\nvictims shared by heads",
    "a score, to the ranks of what stays": "param budget = 7\nscore gift\npositions compact",
    "a reduction over queries": "param budget = 7\nscore mean(attn * gift) + sum(attn > trust * max(attn over slots))",
    "a reduction over slots": "param budget = 7\nscore gift - mean(gift over slots)\nprefill blocks of 4",
    "a selection": "select top 5 by dot(q, k) * gift",
    "a sketch": "sketch top 3 dims by mean(k * gift over slots) every 2 queries\nselect top 5 by dot(q, k over sketch)",
}

TRACE = Trace(budget=None, prompt=9, steps=5, batch=2, padding=3, dtype=torch.float32, seed=7)


def trace_of(policy: Policy) -> Trace:
    """The trace on which a policy runs: through several layers, where these share a budget."""
    return replace(TRACE, layers=(0, 1, 2)) if policy.across_layers is not None else TRACE


def policy(body: str) -> Policy:
    """A checked and folded policy of these statements."""
    analysis = analyse(SourceFile("p.kv", f'kv 1\npolicy P {{\n"A test."\n{body}\n}}\n', BESIDE))
    assert analysis.ok, analysis.diagnostics
    return fold(analysis.policy)


def reduction(op: str, over: str) -> Policy:
    """A policy that reduces by `op` over a range."""
    statement, text = _REDUCED[over]
    return policy(statement.format(text.format(op=op, decay=", 0.5" if ops.REDUCTIONS[op].argument else "")))


def some(op: str, over: str) -> Policy:
    """A policy that reduces a part of a range by `op`."""
    statement, text = _SOME[over]
    return policy(statement.format(text.format(op=op)))


def function(name: str) -> Policy:
    """A policy that applies a function, or an operator of one operand, to columns and to what one query gives."""
    arguments = ops.FUNCTIONS[name].arguments
    return policy(_EVICTS.format(_WRITTEN[name] if arguments is None else _CALLED[arguments].format(name=name)))


def operator(name: str) -> Policy:
    """A policy that applies an operator of two operands."""
    sides = ("(sum(attn) > 1)", "(age > 3)") if name in ops.LOGICAL else ("sum(attn)", "(age + 1)")
    return policy(_EVICTS.format(f"{sides[0]} {name} {sides[1]}"))


def pool(name: str) -> Policy:
    """A policy that pools its score."""
    return policy(_EVICTS.format(f"{name}(sum(attn), 3)"))


_DRAWN = {
    "a score": "param budget = 7\nscore random() + age / 100",
    "a query": "param budget = 7\nscore sum(attn * random()) + max(attn + random() over last 3 queries)",
    "a sum of a query": "param budget = 7\nscore sum(attn > mean(attn * random() over slots)) + ema(attn ** random(), 0.5)",
    "a query's vectors": "param budget = 7\nscore sum(dot(q, k) * random())",
}
"""Where random numbers can be drawn."""


_RANKED = {
    "a key": "param budget = 7\nscore rank(sum(attn) by floor(position / 4)) + rank(norm2(k) over slots by age % 2) / 9",
    "all": "param budget = 7\nscore rank(sum(attn)) + rank(random()) / 20\nkeep where rank(-norm2(k)) < 2",
    "a query": "param budget = 7\nscore sum(rank(attn)) + sum(attn * rank(dot(q, k) + v_norm))\nlet v_norm = norm1(v)",
    "a selection": "select top 5 by rank(dot(q, k)) - rank(norm2(v)) + sum(rank(dot(q, k)) * k over dims)",
    "page": "param budget = 7\npages 3\nscore rank(sum(attn) over page) + age / 100",
    "a page of a selection": "pages 3\nselect top 5 by dot(q, k) * rank(norm2(v) over page) + sum(q * rank(age over page) over dims)",
}
"""Where slots can be ranked."""


_FOLDED = {
    "queries": "param budget = 7\nscore fold(max(0.9 * prev, attn), 0) - fold(where(attn > 0.2, age, prev + 1), -position)",
    "queries, with another in it": "param budget = 7\nlet hit = fold(where(attn > 0.2, position + age, prev), position)\n"
    "score fold(where(attn > 0.2, max(prev, position + age - hit), prev), 0) + hit / 10",
    "queries, of vectors": "param budget = 7\nscore fold(prev / 2 + dot(q, k) * norm1(v) + random(), norm2(k))",
    "prunes": "param budget = 7\nlet now = mean(attn over last 3 queries)\n"
    "score fold(max(0.8 * prev, now / max(now over slots)) over prunes, 0)\ntrigger overflow >= 3\nkeep last 2",
    "prunes, of a fold": "param budget = 7\nscore fold(prev + fold(prev / 2 + attn, 0) over prunes, random_)\n"
    "let random_ = 2\nkeep where fold(prev + 1 over prunes, 0) > 20",
    "prunes, of heads that agree": "param budget = 7\nvictims shared by heads\nscore fold(prev / 2 + sum(attn) over prunes, 0)",
}
"""Where folds can stand."""


_ROTATED = {
    "a score": "param budget = 7\nscore dot(turn(k, -position), ahead(k, 9)) + norm2(pairs(k) - k) + sum(ahead(k, 5, 2) over dims)",
    "a query": "param budget = 7\nscore mean(dot(turn(q, -query_position), turn(k, 3 - position)))"
    " + max(dot(ahead(q, 4), pairs(k)) * scaling)",
    "the text": "param budget = 7\nwhen prefill\nlet asks = dot(turn(q, -query_position), ahead(k, 9)) * scaling\n"
    "score mean(asks over text) + var(asks over text after 1) / norm2(ahead(mean(turn(q, -query_position) over text), 3))",
    "a selection": "select top 5 by dot(turn(q, query_position), turn(k, 2)) + norm2(ahead(k, 3))",
    "a sketch": "select top 5 by dot(q, k over sketch)\nsketch top 3 dims by abs(turn(q, 3)) every 2 queries",
    "a pool": "param budget = 7\nwhen prefill\nscore mean_pool(max(dot(q, k) over text) * norm1(v), 3) + age",
}
"""Where vectors can be rotated, and what goes with it."""

_SPANNED = {
    "keys": "param budget = 7\nscore leverage(k, 1) + leverage(k - mean(k over slots), 0.1)",
    "weighed values": "param budget = 7\nscore leverage(v * sqrt(sum(attn)), 1) + age / 100",
    "what a query says": "param budget = 7\nwhen prefill\nscore leverage(v * exp(mean(dot(q, k) over text)), 0.5)",
}
"""What leverages can be of."""


_COMPARED = {
    "the newest that is alike": "param budget = 7\nlet like = dot(k, other(k))\n"
    "let newest = max(where(like > 0, other(position), -1) over others)\n"
    "score sum(where(other(newest) == position, 0, like) over others) / live\ntrigger overflow >= 3",
    "distances": "param budget = 7\nscore min(norm2(k - other(k)) over others) + norm1(mean(max(k, other(v) * age) over others)) / 9",
    "what is kept": "param budget = 7\nscore age\nkeep top 2 by sum(other(sum(attn)) > sum(attn) over others)\n"
    "keep where max(other(random()) over others) < random()",
    "a budget": "budget sum(max(dot(k, other(k)) over others) < 2 over slots) at most 9\nscore last(attn)",
    "a prune": "param budget = 7\nscore fold(prev / 2 + mean(abs(age - other(age)) over others) over prunes, 0)",
    "a prompt, in blocks": "param budget = 7\nwhen prefill\nprefill blocks of 4\nscore var(dot(k, other(k)) over others)",
}
"""Where slots can be compared with each other."""


_LOOKED_AT = {
    **{
        f"the {op} of others": f"param budget = 7\nscore dot(k, {op}(k * last(attn) over slots)) - norm2(v - {op}(v over slots))"
        for op in ("sum", "mean", "var", "std", "max", "min")
    },
    "reductions over dims of every kind": "param budget = 7\nlet off = k - mean(k over slots)\n"
    "score sum(off over dims) + mean(off over dims) - var(off over dims) + std(off over dims) + max(off over dims) * min(off over dims)",
    "the same, of what all slots have": "param budget = 7\nlet all = mean(v over slots)\n"
    "score sum(attn) * norm2(all) + std(all over dims) * var(all over dims) - age * max(all over dims) * min(mean(k over slots) over dims)",
    "a reduction of products": "param budget = 7\nlet like = dot(k, mean(k over slots))\n"
    "score like - max(like over slots) * sum(like * attn)",
    "a vector of products": "param budget = 7\nscore dot(v, sum(v * dot(k, mean(k over slots)) over slots)) + last(attn)",
    "a selection": "let far = norm2(k - mean(k over slots))\nselect top 5 by dot(q, k) - far * max(far over slots)",
    "what a query gives": "param budget = 7\nscore sum(attn * norm2(k - mean(k over slots)))",
    "what stays": "param budget = 7\nlet like = dot(k, mean(k over slots))\nscore sum(attn)\nkeep where like < mean(like over slots)\n"
    "keep top 2 by norm2(v - mean(v over slots))\nkeep first 1",
    "a ring": "param budget = 7\nscore mean(attn over last 3 queries) * dot(k, mean(k * max(attn over last 3 queries) over slots))",
    "a hard cap": "param budget = 7\nscore dot(k, mean(k over slots)) + last(attn)\nslack 2\ntrigger overflow >= 3\ncap hard",
    "heads that agree": "param budget = 7\nscore dot(k, mean(k over slots)) + last(attn)\nvictims shared by heads",
    "budgets of each head": "budget 4 + 3 * (head > 0)\nscore dot(k, mean(k over slots)) + last(attn)",
    "a tensor": "param budget = 7\nscore dot(vector, k * last(attn)) - dot(vector, mean(k over slots))",
    "ranks of what stays": "param budget = 7\nscore dot(k, mean(k over slots))\npositions compact",
    "blocks of slots": "param budget = 7\nscore dot(k, mean(k over slots))\nkeep last 1\nstorage blocks 4",
    "a prompt in blocks": "param budget = 7\nscore dot(k, mean(k over slots)) + last(attn)\nprefill blocks of 4",
}
"""Where what is cached of slots can be looked at together with what changes."""


def all_operations() -> Iterator[tuple[str, Policy]]:
    """Every operation at every place, by what it is called in messages."""
    for op, row in ops.REDUCTIONS.items():
        for over in row.over:
            yield f"{op} {ops.RANGES[over]}", reduction(op, over)
    for over in _SOME:
        yield from ((f"{op} of some of {over}", some(op, over)) for op in ("sum", "mean", "std", "var", "max", "min"))
    yield from ((name, function(name)) for name in ops.FUNCTIONS)
    yield from ((name, operator(name)) for name in ops.OPERATORS)
    yield from ((name, pool(name)) for name in ops.POOLS)
    yield from placed()
    yield from given()


def placed() -> Iterator[tuple[str, Policy]]:
    """What is no operation of the table, at every place where it can stand."""
    families = {
        "random in": _DRAWN, "rank in": _RANKED, "fold over": _FOLDED, "rotation in": _ROTATED, "leverage of": _SPANNED,
        "others in": _COMPARED, "vectors in": _LOOKED_AT, "a tensor in": _READING,
    }  # fmt: skip
    for what, places in families.items():
        for place, text in places.items():
            yield f"{what} {place}", policy(_with_tensors(text))


def _with_tensors(text: str) -> str:
    # Those first that kernels read nothing of and that take several rows, as nobody who writes a policy thinks of.
    lines = [f"{print_tensor(tensor)}\n" for tensor in (*MATRICES, *GROUPED, *TENSORS)]
    return "".join(line for line in lines if line.split()[1] in text) + text


def given() -> Iterator[tuple[str, Policy]]:
    """Values from the caller, in all places where they can stand."""
    for place, text in _GIVEN.items():
        lines = "".join(f"{print_given(one)}\n" for one in GIVEN if one.name in text)
        yield f"a given value in {place}", policy(lines + text)


_NOWHERE = {
    "median over slots",
    "rank in a query",
    *(f"rotation in a {place}" for place in ("query", "selection", "sketch")),
    *(f"a tensor in a projection of {what}" for what in ("a score", "what is selected")),
    *(f"a tensor in {place} query heads" for place in ("vectors of", "a selection by vectors of")),
    "a given value in a sketch",
}
EVICTED_BY_TORCH = {
    *(f"{op} over the last N queries" for op in ("median", "quantile")), "rotation in a score",
    *(f"leverage of {what}" for what in ("keys", "weighed values")), "a tensor in a projection of a mean",
}  # fmt: skip
"""Scores that Triton refuses. Under these, C++ decodes and torch evicts."""
WITHOUT_KERNELS = {
    "cpu": _NOWHERE | {
        *(f"{op} of some of {where}" for op in ("std", "var") for where in ("dims", "sketch")),
    },
    "triton": _NOWHERE | EVICTED_BY_TORCH | {
        *(f"{op} {of} dims" for op in ("sum", "mean", "std", "var", "max", "min") for of in ("over", "of some of")),
        *(f"{op} of some of sketch" for op in ("sum", "mean", "std", "var", "max", "min")),
        *(
            f"{op} {over}"
            for op in ("sum", "mean", "std", "var", "max", "min")
            for over in (
                "over page", "over next page", "over others",
                *(f"of some of {where}" for where in ("slots as j", "others", "a key")),
            )
        ),
        *(f"others in {place}" for place in ("a budget", "distances")),
        *(f"rank in {place}" for place in ("a selection", "a page of a selection")),
        "fold over queries, of vectors",
        *(f"{op} over sketch" for op in ("mean", "std", "var", "max", "min")),
        *(f"a tensor in a {place}" for place in ("count that a selection keeps", "reduction over queries and dims", "selection", "sketch")),
        *(f"vectors in {place}" for place in ("a reduction of products", "a selection", "what a query gives")),
        "a given value in a selection", "random in a query's vectors",
    },
}  # fmt: skip
"""What the targets refuse; a name that comes to have kernels leaves its set."""
