"""Filters, keys and named slots against plain loops, which know nothing of the interpreter: in each form that a policy takes.

As the checker leaves them, in the one spelling for which targets have code, and without filters and keys, as targets know them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvdsl.interp import Call, Interpreter, resolve
from kvdsl.interp.evaluate import Peer, Scope, evaluate, evaluate_number, evaluate_slots, per_slot
from kvdsl.ir.nodes import Axis, Expr, Policy, Reduce
from kvdsl.ir.visitors import mapped, walk
from kvdsl.passes.columns import add_columns
from kvdsl.passes.fold import fold
from kvdsl.passes.normal import normal, plain
from tests.diagnostics.expect import policy
from tests.quick import thinned

NAN, INF = math.nan, math.inf
OPS = ("sum", "mean", "var", "std", "max", "min")
FORMS: dict[str, Callable[[Policy], Policy]] = {
    "as checked": lambda policy: policy,
    "in one spelling": lambda policy: fold(normal(policy)),
    "as targets know it": lambda policy: mapped(fold(normal(policy)), plain),
}
LETS = ("let m = sum(attn)", "let part = page(3)", "let later = page(3, after = 2)")


@dataclass(frozen=True)
class Slot:
    """A cached token, as the loops see it."""

    position: int
    age: int
    m: float
    k: tuple[float, ...]
    v: tuple[float, ...]


Slots = list[Slot]


def world(seed: int) -> Slots:
    """Seven slots in no order, of a text of which some tokens have left; what attention gave them is odd in some."""
    draw = random.Random(seed)
    places = draw.sample(range(14), 7)
    masses = [draw.choice([0.0, 0.25, 0.5, draw.random()]) for _ in places]
    if seed % 3 == 1:
        masses[2] = masses[4] = NAN
    if seed % 3 == 2:
        masses[1], masses[5] = INF, -0.0
    return [
        Slot(place, 13 - place, mass, tuple(draw.gauss(0, 1) for _ in range(3)), tuple(draw.gauss(0, 1) for _ in range(5)))
        for place, mass in zip(places, masses, strict=True)
    ]


WORLDS = [world(seed) for seed in range(6)]


def reduced(op: str, values: Iterable[float]) -> float:
    """From the definition."""
    values = list(values)
    if not values:
        return {"sum": 0.0, "max": -INF, "min": INF}.get(op, NAN)
    if any(math.isnan(value) for value in values):
        return NAN
    if op in ("max", "min"):
        return max(values) if op == "max" else min(values)
    total = sum(values)
    if op == "sum":
        return total
    mean = total / len(values)
    if op == "mean":
        return mean
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return math.sqrt(variance) if op == "std" else variance


def dot(one: Iterable[float], other: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))


Loop = Callable[[Slot, Slots], Iterable[float]]
"""What is reduced for a slot."""


def like(key: Callable[[Slot], float], holds: Callable[[Slot], bool] = lambda slot: True) -> Loop:
    """The masses of the slots with the same key: a key that is no number is nobody's."""
    return lambda own, slots: [one.m for one in slots if key(one) == key(own) and holds(one)]


def page(slot: Slot, after: int = 0) -> int:
    return math.floor((slot.position - after) / 3)


CASES: dict[str, tuple[str, Loop]] = {
    # filters
    "slots": ("m over slots where age < 5", lambda own, slots: [one.m for one in slots if one.age < 5]),
    "slots, of which none": ("m over slots where age < 0", lambda own, slots: []),
    "slots, all of them": ("m over slots where position >= 0", lambda own, slots: [one.m for one in slots]),
    "slots, by what no slot has": ("m over slots where live > 3", lambda own, slots: [one.m for one in slots]),
    "slots, by what holds for none": ("m over slots where live > 30", lambda own, slots: []),
    "slots, by numbers that may be none": ("age over slots where m > 0.3", lambda own, slots: [x.age for x in slots if x.m > 0.3]),
    "slots, two conditions": (
        "m over slots where age < 9 and not (position == 8)",
        lambda own, slots: [one.m for one in slots if one.age < 9 and one.position != 8],
    ),
    "dims": ("k over dims where k > 0", lambda own, slots: [x for x in own.k if x > 0]),
    "dims, of which none": ("k over dims where k > 1000", lambda own, slots: []),
    "dims, by the token": ("v over dims where age > 4", lambda own, slots: own.v if own.age > 4 else []),
    "dims, counted": ("1 over dims where v > 0", lambda own, slots: [1 for x in own.v if x > 0]),
    "dims of what is reduced": (
        "max(k over slots where age > 6) over dims where k < 1",
        lambda own, slots: [max(one.k[d] for one in slots if one.age > 6) for d in range(3) if own.k[d] < 1],
    ),
    # keys
    "a key": ("m over slots by position % 3", like(lambda slot: slot.position % 3)),
    "a key that is a condition": ("m over slots by age > 3", like(lambda slot: slot.age > 3)),
    "a key that is no whole number": ("m over slots by position % 2.5", like(lambda slot: slot.position % 2.5)),
    "a key that may be no number": ("m over slots by m", like(lambda slot: slot.m)),
    "a key of either zero": ("m over slots by -0 * age", like(lambda slot: 0)),
    "a key that all have alone": ("m over slots by position", like(lambda slot: slot.position)),
    "a key and a filter": ("m over slots where age > 2 by position % 3", like(lambda x: x.position % 3, lambda x: x.age > 2)),
    "a key and a filter that holds nowhere": ("m over slots where age < 0 by position % 3", like(lambda x: 0, lambda x: False)),
    "a page": ("m over slots by page(3)", like(page)),
    "a page, filtered": ("m over slots where age > 4 by part", like(page, lambda slot: slot.age > 4)),
    "a page, filtered by what no slot has": ("m over slots where live > 30 by part", like(page, lambda slot: False)),
    "a page behind the first tokens": ("m over slots by later", like(lambda slot: page(slot, 2))),
    "a page of half a token": ("m over slots by floor(position / 2.5)", like(lambda slot: math.floor(slot.position / 2.5))),
    "the next page": (
        "j.m over slots as j where j.part == part + 1",
        lambda own, slots: [one.m for one in slots if page(one) == page(own) + 1],
    ),
    "the next page, filtered": (
        "j.m over slots as j where j.part == part + 1 and j.age > 2",
        lambda own, slots: [one.m for one in slots if page(one) == page(own) + 1 and one.age > 2],
    ),
    "the page before": (
        "j.m over slots as j where j.part == part - 1",
        lambda own, slots: [one.m for one in slots if page(one) == page(own) - 1],
    ),
    # the other slot
    "every slot": ("j.m over slots as j", lambda own, slots: [one.m for one in slots]),
    "the others": (
        "j.m over slots as j where j.position != position",
        lambda own, slots: [one.m for one in slots if one is not own],
    ),
    "the others, said the other way": (
        "j.m over slots as j where position != j.position",
        lambda own, slots: [one.m for one in slots if one is not own],
    ),
    "the older ones": (
        "j.m over slots as j where j.position < position",
        lambda own, slots: [one.m for one in slots if one.position < own.position],
    ),
    "no other one": ("j.m over slots as j where j.position > 1000", lambda own, slots: []),
    "how far from it": (
        "j.m - m over slots as j where j.age <= age",
        lambda own, slots: [one.m - own.m for one in slots if one.age <= own.age],
    ),
    "how alike": (
        "dot(k, j.k) over slots as j where j.position != position and j.position > 3",
        lambda own, slots: [dot(own.k, one.k) for one in slots if one is not own and one.position > 3],
    ),
    "by what the slot itself is": (
        "j.m over slots as j where age > 5",
        lambda own, slots: [one.m for one in slots] if own.age > 5 else [],
    ),
    "others that are alike": (
        "j.m over slots as j where j.(age % 3) == age % 3 and j.position != position",
        lambda own, slots: [one.m for one in slots if one.age % 3 == own.age % 3 and one is not own],
    ),
    "alike, said as equal": (
        "j.m over slots as j where j.(age % 3) == age % 3 and j.position > 2",
        lambda own, slots: [one.m for one in slots if one.age % 3 == own.age % 3 and one.position > 2],
    ),
    "alike by what may be no number": ("j.age over slots as j where j.m == m", lambda own, slots: [x.age for x in slots if x.m == own.m]),
    "one or another": (
        "j.m over slots as j where j.position < position or j.m > m",
        lambda own, slots: [one.m for one in slots if one.position < own.position or one.m > own.m],
    ),
    "another's neighbours": (
        "j.(sum(i.m over slots as i where i.position < position)) over slots as j where j.age < age",
        lambda own, slots: [
            reduced("sum", (x.m for x in slots if x.position < one.position)) for one in slots if one.age < own.age
        ],
    ),
    "neighbours of those that are alike": (
        "j.(sum(i.m over slots as i where i.position < position)) over slots as j where j.(age % 3) == age % 3",
        lambda own, slots: [
            reduced("sum", (x.m for x in slots if x.position < one.position)) for one in slots if one.age % 3 == own.age % 3
        ],
    ),
    "others of a filter": (
        "j.m over slots as j where j.m >= mean(m over slots where age < 9)",
        lambda own, slots: [one.m for one in slots if one.m >= reduced("mean", (x.m for x in slots if x.age < 9))],
    ),
}  # fmt: skip


def scope(slots: Slots, of: Policy) -> Scope:
    """What a settle's expressions see."""
    inputs = {
        "position": per_slot([slot.position for slot in slots]),
        "age": per_slot([slot.age for slot in slots]),
        "live": per_slot([len(slots)]),
        "k": np.array([slot.k for slot in slots]),
        "v": np.array([slot.v for slot in slots]),
    }
    pages = [0.0 if part is None else evaluate_number(part, Scope(0, 0, {}, {})) for part in (of.pages, of.pages_after)]
    masses = per_slot([slot.m for slot in slots])
    return Scope(len(slots), 3, inputs, {}, recall=lambda leaf: masses, page=pages[0] or 1, page_after=pages[1])


def scored(text: str, *statements: str) -> Policy:
    """A policy with this score, and of the lets those that it reads."""
    lets = [line for line in LETS if re.search(rf"\b{line.split()[1]}\b", text)]
    return policy("param budget = 9", *lets, f"score {text}", *statements)


def score_of(made: Policy) -> Expr:
    assert made.score is not None
    return made.score


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", thinned(CASES, 3))
def test_reductions(case: str, form: str) -> None:
    text, loop = CASES[case]
    for op in OPS:
        made = FORMS[form](scored(f"{op}({text}) + 0 * position"))
        for slots in WORLDS:
            found = evaluate_slots(score_of(made), scope(slots, made))
            expected = [reduced(op, loop(own, slots)) for own in slots]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=f"{op} of {slots}")


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_by_a_key(form: str) -> None:
    for op in OPS:
        made = FORMS[form](scored(f"norm2({op}(k over slots where age != 6 by age % 2))"))
        for slots in WORLDS:
            found, expected = evaluate_slots(score_of(made), scope(slots, made)), []
            for own in slots:
                alike = [one for one in slots if one.age % 2 == own.age % 2 and one.age != 6]
                parts = [reduced(op, (one.k[d] for one in alike)) for d in range(3)]
                expected.append(math.sqrt(dot(parts, parts)))
            np.testing.assert_allclose(found, expected, rtol=1e-9)


RANKS: dict[str, tuple[str, Callable[[Slot], float]]] = {
    "a condition": ("rank(m by age > 6)", lambda slot: slot.age > 6),
    "a page": ("rank(m by page(4))", lambda slot: slot.position // 4),
    "said of slots": ("rank(m over slots by position % 3)", lambda slot: slot.position % 3),
    "what may be no number": ("rank(m by 0 * m)", lambda slot: 0 * slot.m),
    "what is the same for all": ("rank(m by 0 * position)", lambda slot: 0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", RANKS)
def test_ranks_by_a_key(case: str, form: str) -> None:
    """A NaN below every number, of equals the older."""
    text, key = RANKS[case]
    made = FORMS[form](scored(text))
    for slots in WORLDS:

        def order(slot: Slot) -> tuple[bool, float, int]:
            return (False, 0.0, slot.position) if math.isnan(slot.m) else (True, slot.m, slot.position)

        expected = [sum(key(one) == key(own) and order(one) < order(own) for one in slots) for own in slots]
        assert evaluate_slots(score_of(made), scope(slots, made)).tolist() == expected


TEXTS: dict[str, tuple[str, Callable[[int, Slot], bool]]] = {
    "every second query": ("query_position % 2 == 0", lambda query, slot: query % 2 == 0),
    "those before the token": ("query_position < position", lambda query, slot: query < slot.position),
    "all but the first": ("query_position >= 3", lambda query, slot: query >= 3),
    "two of them": (
        "query_position >= 3 and query_position != 5",
        lambda query, slot: query >= 3 and query != 5,
    ),
    "none": ("query_position < 0", lambda query, slot: False),
    "those that the token is like": ("dot(q, k) > 0", lambda query, slot: dot(QUERIES[query], slot.k) > 0),
}
QUERIES = [tuple(random.Random(f"q{query}").gauss(0, 1) for _ in range(3)) for query in range(8)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TEXTS)
def test_the_text_s_queries(case: str, form: str) -> None:
    text, holds = TEXTS[case]
    for op in OPS:
        made = FORMS[form](scored(f"{op}(dot(q, k) over text where {text}) + 0 * position", "when prefill"))
        for slots in WORLDS:
            at = replace(scope(slots, made), text=[(place, np.array([query])) for place, query in enumerate(QUERIES)])
            expected = [reduced(op, (dot(q, own.k) for n, q in enumerate(QUERIES) if holds(n, own))) for own in slots]
            np.testing.assert_allclose(evaluate_slots(score_of(made), at), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("least", [0, 5, 50])
def test_heads(least: int, form: str) -> None:
    """Of three, which hold seven, six and four tokens."""
    heads = [WORLDS[0], WORLDS[3][:6], WORLDS[0][3:]]
    for op in OPS:
        by = f"{op}(sum(m over slots) over heads where live > {least})"
        made = FORMS[form](
            policy(
                "param budget = 9", "let m = sum(attn)", "score m", "when prefill", f"budget budget across layers by {by}"
            )
        )
        assert made.across_layers is not None
        assert made.across_layers.by is not None
        at = scope(heads[0], made)
        peers = tuple(Peer(scope(head, made), evaluate) for head in heads)
        expected = reduced(op, (sum(slot.m for slot in head) for head in heads if len(head) > least))
        found = evaluate(made.across_layers.by, replace(at, heads=peers)).item()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


# -- queries: what they gave a slot, in an interpreter that has seen them --------------------------------------------------

Asked = Callable[[int, int, list[list[float]]], bool]
"""Whether a query counts for a slot, by their places and what queries gave slots."""

OF_QUERIES: dict[str, tuple[str, Asked]] = {
    "by the slot's age then": ("attn where age > 2", lambda query, slot, attn: query - slot > 2),
    "by what they gave": ("attn where attn > 0.2", lambda query, slot, attn: attn[query][slot] > 0.2),
    "by the token": ("attn where position < 4", lambda query, slot, attn: slot < 4),
    "by a number": ("attn where budget > 100", lambda query, slot, attn: False),
    "by how it compares": (
        "attn where attn >= mean(attn over slots)",
        lambda query, slot, attn: attn[query][slot] >= sum(attn[query]) / len(attn[query]),
    ),
    "by how some compare": (
        "attn where attn >= mean(attn over slots where age > 1)",
        lambda query, slot, attn: query > 1 and attn[query][slot] >= sum(attn[query][: query - 1]) / (query - 1),
    ),
    "none": ("attn where attn > 2", lambda query, slot, attn: False),
    "of the last ones": (
        "attn over last 4 queries where age % 2 == 0",
        lambda query, slot, attn: query > 5 and (query - slot) % 2 == 0,
    ),
    "of the last ones none": ("attn over last 4 queries where age > 90", lambda query, slot, attn: False),
}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("case", OF_QUERIES)
def test_queries(case: str, columns: bool) -> None:
    text, holds = OF_QUERIES[case]
    draw, tokens = np.random.default_rng(7), 10
    q, k, v = draw.normal(size=(tokens, 1, 3)), draw.normal(size=(tokens, 3)), draw.normal(size=(tokens, 3))
    attn = [[float(x) for x in np.exp(k[: query + 1] @ q[query, 0])] for query in range(tokens)]
    attn = [[x / sum(row) for x in row] for row in attn]
    for op in OPS:
        made = scored(f"{op}({text}) + 0 * position")
        made = add_columns(made) if columns else made
        machine = Interpreter(made, resolve(made, {"budget": 20}), Call(1.0))
        head = machine.empty(3, 3)
        machine.prefill(head, q[:4], k[:4], v[:4])
        for token in range(4, tokens):
            step = machine.decode(head, q[token], k[token], v[token])
        expected = [
            reduced(op, (attn[query][slot] for query in range(slot, tokens) if holds(query, slot, attn)))
            for slot in range(tokens)
        ]
        assert step.position.tolist() == list(range(tokens))
        np.testing.assert_allclose(step.score, expected, rtol=1e-6, atol=1e-6, err_msg=op)


def test_every_range_takes_part() -> None:
    """What stands above is of every axis."""
    texts = [text for text, _ in (*CASES.values(), *OF_QUERIES.values())]
    parts = [part for text in texts for part in _parts(score_of(scored(f"sum({text}) + 0 * position")))]
    filtered = {part.axis for part in parts if part.where is not None}
    assert filtered == {Axis.SLOT, Axis.DIM, Axis.OTHER, Axis.QUERY}  # heads have a test of their own
    assert {part.within for part in parts if part.axis is Axis.OTHER} == {"all", "self"}
    assert {part.within for part in parts if part.axis is Axis.SLOT} == {"all", "page", "next"}


def _parts(expr: Expr) -> list[Reduce]:
    return [part for part in walk(expr) if isinstance(part, Reduce)]
