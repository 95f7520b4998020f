"""Equal meanings have equal kernels: however a policy is spelled, its plan is the same, byte for byte."""

from __future__ import annotations

import dataclasses

import pytest

from kvdsl.compiler import analyse, plan_of
from kvdsl.lower.plan import PackagePlan
from kvdsl.source import SourceFile

BOUNDED = "param budget = 9\n"
COUNTED = BOUNDED + "param n = 2\nscore sum(attn)\nkeep last 0\n"
TEXT = BOUNDED + "when prefill\nscore "

PAIRS = {
    # protected tokens
    "keep first": (COUNTED + "keep first n", COUNTED + "keep where rank(position) < n"),
    "keep last, by rank": (
        BOUNDED + "score sum(attn)\nkeep last 3",
        BOUNDED + "score sum(attn)\nkeep last 0\nkeep where rank(position) >= live - 3",
    ),
    "keep top": (COUNTED + "keep top n by std(attn)", COUNTED + "keep where rank(std(attn)) >= live - n"),
    "two conditions": (COUNTED + "keep where age < 2\nkeep where position < n", COUNTED + "keep where age < 2 or position < n"),
    # numbers
    "a budget's bound": (BOUNDED + "score last(attn)", "param size = 9\nbudget size\nscore last(attn)"),
    "the default trigger": (COUNTED, COUNTED + "trigger overflow >= 1"),
    "the default slack": (COUNTED, COUNTED + "slack 0"),
    "the default phase": (COUNTED, COUNTED + "when both"),
    "constants": (BOUNDED + "score sum(attn over last 8 queries)", BOUNDED + "score sum(attn over last 2 * 4 queries)"),
    # queries
    "the query's place": (BOUNDED + "score mean(attn * (position + age))", BOUNDED + "score mean(attn * query_position)"),
    "the query's place, turned": (BOUNDED + "score mean(attn * (position + age))", BOUNDED + "score mean(attn * (age + position))"),
    "the query's place, in a selection": (
        "select top 4 by dot(q, k) * (position + age)\nkeep last 1",
        "select top 4 by dot(q, k) * query_position\nkeep last 1",
    ),
    "queries, said": (BOUNDED + "score sum(attn)", BOUNDED + "score sum(attn over queries)"),
    "a filter of queries": (BOUNDED + "score sum(attn where age < 4)", BOUNDED + "score sum(where(age < 4, attn, 0))"),
    "a filter of the last queries": (
        BOUNDED + "score sum(attn over last 4 queries where attn > 0.1)",
        BOUNDED + "score sum(where(attn > 0.1, attn, 0) over last 4 queries)",
    ),
    "the text's end": (TEXT + "mean(dot(q, k) over text after 2)", TEXT + "mean(dot(q, k) over text where query_position >= 2)"),
    "the text's queries": (
        TEXT + "mean(dot(turn(q, -query_position), k) over text)",
        TEXT + "mean(dot(turn(q, -(position + age)), k) over text)",
    ),
    # slots
    "a filter of slots": (
        BOUNDED + "score sum(attn) / sum(norm1(v) over slots where age > 2)",
        BOUNDED + "score sum(attn) / sum(where(age > 2, norm1(v), 0) over slots)",
    ),
    "pages": (
        BOUNDED + "pages 4\nscore mean(sum(attn) over page)",
        BOUNDED + "score mean(sum(attn) over slots by page(4))",
    ),
    "pages, by hand": (
        BOUNDED + "pages 4\nscore mean(sum(attn) over page)",
        BOUNDED + "score mean(sum(attn) over slots by floor(position / 4))",
    ),
    "pages after the first tokens": (
        BOUNDED + "param n = 2\npages 4 after n\nscore rank(sum(attn) over page)",
        BOUNDED + "param n = 2\nscore rank(sum(attn) by page(4, after = n))",
    ),
    "pages of equal keys": (
        BOUNDED + "pages 4\nscore max(sum(attn) over page)",
        BOUNDED + "let part = page(4)\nscore max(j.(sum(attn)) over slots as j where j.part == part)",
    ),
    "the next page": (
        BOUNDED + "pages 4\nscore where(position < 4, max(norm1(k) over next page), 0)",
        BOUNDED + "let part = page(4)\nlet n = norm1(k)\nscore where(position < 4, max(j.n over slots as j where j.part == part + 1), 0)",
    ),
    "pages of a selection": (
        "pages 4\nselect top 8 by sum(max(q * min(k over page), q * max(k over page)) over dims)\nkeep last 1",
        "let p = page(4)\nselect top 8 by sum(max(q * min(k over slots by p), q * max(k over slots by p)) over dims)\nkeep last 1",
    ),
    "others": (
        BOUNDED + "score max(dot(k, other(k)) over others)",
        BOUNDED + "score max(dot(k, j.k) over slots as j where j.position != position)",
    ),
    "a key": (
        BOUNDED + "score mean(sum(attn) over slots by age % 3)",
        BOUNDED + "score mean(j.(sum(attn)) over slots as j where j.(age % 3) == age % 3)",
    ),
    "a rank": (BOUNDED + "score rank(norm2(k))", BOUNDED + "score rank(norm2(k) over slots)"),
    # what the prelude says
    "products": (BOUNDED + "score sum(dot(q, k))", BOUNDED + "score sum(sum(q * k over dims))"),
    "norms": (BOUNDED + "score -norm2(k)", BOUNDED + "score -sqrt(sum(k * k over dims))"),
    "shares": (
        BOUNDED + "score sum(softmax(logit))",
        BOUNDED + "score sum(exp(logit - max(logit over slots)) / sum(exp(logit - max(logit over slots)) over slots))",
    ),
    "angles": (BOUNDED + "score cosine(k, v)", BOUNDED + "score dot(k, v) / (norm2(k) * norm2(v))"),
    # conditions and signs
    "not equal": (BOUNDED + "score sum(attn where age != 3)", BOUNDED + "score sum(attn where not (age == 3))"),
    "not not": (BOUNDED + "score sum(attn where age < 3)", BOUNDED + "score sum(attn where not (not (age < 3)))"),
    "minus minus": (BOUNDED + "score sum(attn)", BOUNDED + "score -(-sum(attn))"),
}  # fmt: skip

APART = {
    "a sentinel is a value": (BOUNDED + "score max(attn where age < 4)", BOUNDED + "score max(where(age < 4, attn, 0))"),
    "text is not slots": (COUNTED + "keep first n", COUNTED + "keep where position < n"),
    "the last tokens, and those of the last places": (COUNTED + "keep last n + 1", COUNTED + "keep where age < n + 1"),
    "an order and its opposite, with NaN": (
        BOUNDED + "score sum(attn where logit >= 0)",
        BOUNDED + "score sum(attn where not (logit < 0))",
    ),
    "half pages": (
        BOUNDED + "score mean(sum(attn) over slots by floor(position / 2.5))",
        BOUNDED + "score mean(sum(attn) over slots by page(2.5))",
    ),
    "what a selection always takes": (
        "select top 4 by dot(q, k)\nparam budget = 9\nscore sum(attn)\nkeep first 2",
        "select top 4 by dot(q, k)\nparam budget = 9\nscore sum(attn)\nkeep where rank(position) < 2",
    ),
}


def plan(body: str, edition: int = 1) -> PackagePlan:
    """The plan of a policy of these statements, without what its params are called and said of."""
    analysis = analyse(SourceFile("p.kv", f'kv {edition}\npolicy P {{\n"A test."\n{body}\n}}\n'))
    assert analysis.ok, analysis.diagnostics
    made = plan_of(analysis.policy)
    return dataclasses.replace(made, params=(), ratio=False, resolve=())


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_meanings_have_equal_plans(pair: str) -> None:
    one, other = (repr(plan(body)) for body in PAIRS[pair])
    assert one == other


@pytest.mark.parametrize("pair", APART)
def test_what_means_another_thing_has_another_plan(pair: str) -> None:
    one, other = (repr(plan(body)) for body in APART[pair])
    assert one != other


def test_a_condition_is_one_of_the_ends_where_nothing_else_yields() -> None:
    """In edition 2 the ends leave last, so that beside what yields a condition is none of them."""
    first, where = (
        BOUNDED + f"score sum(attn)\nkeep last 2\nkeep {said}" for said in ("first 3", "where rank(position) < 3")
    )
    assert repr(plan(first, 2)) == repr(plan(where, 2))
    yielding = "\nkeep top 2 by std(attn)"
    assert repr(plan(first + yielding, 2)) != repr(plan(where + yielding, 2))
    assert repr(plan(first + yielding)) == repr(plan(where + yielding))
