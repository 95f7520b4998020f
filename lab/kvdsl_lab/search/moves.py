"""From policies to others. What comes out need not be legal, nor within bounds: `space.size_of` says.

Every move takes its decisions from a `random.Random`, so that a seed decides a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as counting
from random import Random
from typing import Literal

from kvdsl.ir import ops
from kvdsl.ir.nodes import Axis, Call, Expr, Input, Keep, Number, Policy, Reduce, call, is_call
from kvdsl.ir.visitors import axes_of, children, rewrite, walk, with_policy
from kvdsl_lab.search.space import BUDGET, Bounds

QUERY_SLOT = frozenset({Axis.QUERY, Axis.SLOT})
ATTN, MEAN_ATTN = Input(name="attn"), Reduce(op="mean", axis=Axis.SLOT, body=Input(name="attn"))
LITERALS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 0.01)
DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Of the budget, that a `keep` line protects."""
COUNTS = (1, 2, 4, 8, 16, 32)
GROUPS = ("mean", "max", "sum")
Scope = Literal["first", "last", "top"]
ARITHMETIC = ("+", "-", "*", "/")
OVER_QUERIES = tuple(name for name, row in ops.REDUCTIONS.items() if "queries" in row.over)


# -- new expressions ---------------------------------------------------------------------------------------------------


def new_slot(rng: Random, depth: int = 2) -> Expr:
    """One number for each slot."""
    if depth == 0 or rng.random() < 0.6:
        return rng.choice((_reduced, _reduced, _reduced, _of_token, _plain))(rng, depth)
    if rng.random() < 0.2:
        return call(rng.choice(("max", "min")), new_slot(rng, depth - 1), new_slot(rng, depth - 1))
    right = Number(value=rng.choice(LITERALS)) if rng.random() < 0.4 else new_slot(rng, depth - 1)
    op = "**" if isinstance(right, Number) and rng.random() < 0.5 else rng.choice(ARITHMETIC)
    return call(op, new_slot(rng, depth - 1), right)


def new_query_slot(rng: Random, depth: int = 1) -> Expr:
    """One number for each query and slot: what a reduction over queries takes."""
    if depth == 0 or rng.random() < 0.4:
        return ATTN
    kind, right = rng.randrange(4), Number(value=rng.choice(LITERALS))
    if kind == 0:
        return call(rng.choice((">", ">=")), ATTN, call("*", right, MEAN_ATTN))
    if kind == 1:
        return call("**", new_query_slot(rng, depth - 1), right)
    if kind == 2:
        return call(rng.choice(("*", "/")), new_query_slot(rng, depth - 1), _of_token(rng, depth))
    other = rng.choice((MEAN_ATTN, Reduce(op="max", axis=Axis.SLOT, body=ATTN)))
    return call("min", ATTN, other) if rng.random() < 0.5 else call("/", ATTN, other)


def _reduced(rng: Random, depth: int) -> Expr:
    op = rng.choice(OVER_QUERIES)
    decay = Number(value=rng.choice(DECAYS)) if ops.REDUCTIONS[op].argument else None
    return Reduce(op=op, axis=Axis.QUERY, body=new_query_slot(rng, depth), argument=decay)


def _of_token(rng: Random, _: int) -> Expr:
    """A norm of the token's key or value."""
    vector = Input(name=rng.choice(("k", "v", "v")))
    if rng.random() < 0.5:
        return Reduce(op=rng.choice(("sum", "max")), axis=Axis.DIM, body=call("abs", vector))
    squares = Reduce(op="sum", axis=Axis.DIM, body=call("*", vector, vector))
    return call("sqrt", squares)


def _plain(rng: Random, _: int) -> Expr:
    return Input(name=rng.choice(("age", "position", "observed")))


def new_keep(rng: Random) -> Keep:
    """A line that protects."""
    scopes: tuple[Scope, ...] = ("first", "last", "top")
    scope = rng.choice(scopes)
    return Keep(scope=scope, count=_protected(rng, scope), by=new_slot(rng, 1) if scope == "top" else None)


def _protected(rng: Random, scope: str) -> Expr:
    """How many: sinks are a number, what grows with the budget is a share of it."""
    if scope == "first" or rng.random() < 0.3:
        return Number(value=rng.choice(COUNTS))
    return call("*", BUDGET, Number(value=rng.choice(SHARES)))


# -- places ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """An expression of a policy: the score, or what a `keep` line counts or ranks by; and a node in it, counted outermost first."""

    part: str
    node: int


def places(policy: Policy, wanted: Callable[[Expr], bool]) -> list[tuple[Place, Expr]]:
    """Every node for which `wanted` holds, with where it stands."""
    return [
        (Place(part, node), expr) for part, whole in _parts(policy) for node, expr in enumerate(walk(whole)) if wanted(expr)
    ]


def replaced(policy: Policy, place: Place, new: Expr) -> Policy:
    """The policy with another node there."""
    numbers = counting()
    changed = rewrite(dict(_parts(policy))[place.part], lambda _: new if next(numbers) == place.node else None)
    if place.part == "score":
        return with_policy(policy, score=changed)
    number, field = place.part.split(".")
    keeps = list(policy.keeps)
    keeps[int(number)] = keeps[int(number)].model_copy(update={field: changed})
    return with_policy(policy, keeps=tuple(keeps))


def _parts(policy: Policy) -> list[tuple[str, Expr]]:
    assert policy.score is not None
    of_keeps = [(f"{i}.{name}", getattr(keep, name)) for i, keep in enumerate(policy.keeps) for name in ("by", "count")]
    return [("score", policy.score), *((name, part) for name, part in of_keeps if part is not None)]


# -- moves -------------------------------------------------------------------------------------------------------------

Move = Callable[[Random, Sequence[Policy]], "Policy | None"]
"""From parents, the first of which is changed; None where it finds nothing to change."""


def change_node(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """Another expression in the place of one."""
    found = [(place, expr) for place, expr in places(parents[0], lambda _: True) if not place.part.endswith("count")]
    place, expr = rng.choice(found)
    axes = axes_of(expr)
    if axes == {Axis.SLOT}:
        return replaced(parents[0], place, new_slot(rng, 1))
    return replaced(parents[0], place, new_query_slot(rng)) if axes == QUERY_SLOT else None


def wrap_node(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """An expression combined with a new one."""
    found = [(place, expr) for place, expr in places(parents[0], lambda expr: axes_of(expr) == {Axis.SLOT}) if _ranks(place)]
    place, expr = rng.choice(found)
    other = new_slot(rng, 0) if rng.random() < 0.7 else Number(value=rng.choice(LITERALS))
    return replaced(parents[0], place, call(rng.choice((*ARITHMETIC, "*")), expr, other))


def unwrap_node(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """An operand in the place of its operation."""
    found = [
        (place, expr)
        for place, expr in places(parents[0], lambda expr: isinstance(expr, Call) and bool(expr.args))
        if _ranks(place)
    ]
    if not found:
        return None
    place, expr = rng.choice(found)
    same = [part for part in children(expr) if axes_of(part) == axes_of(expr)]
    return replaced(parents[0], place, rng.choice(same)) if same else None


def change_operation(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """Another reduction over queries, or another operator."""
    found = places(parents[0], lambda expr: is_call(expr, *ops.OPERATORS) or isinstance(expr, Reduce))
    if not found:
        return None
    place, expr = rng.choice(found)
    if isinstance(expr, Call):
        return replaced(parents[0], place, expr.model_copy(update={"op": rng.choice(ARITHMETIC)}))
    if not isinstance(expr, Reduce) or expr.axis is not Axis.QUERY:
        return None
    op = rng.choice(OVER_QUERIES)
    decay = Number(value=rng.choice(DECAYS)) if ops.REDUCTIONS[op].argument else None
    return replaced(parents[0], place, expr.model_copy(update={"op": op, "argument": decay}))


def change_number(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """A number made larger or smaller."""
    found = numbers(parents[0])
    if not found:
        return None
    place, value = rng.choice(found)
    return replaced(parents[0], place, Number(value=_rounded(value * 2 ** rng.gauss(0, 1))))


def change_keep(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """One line of `keep` more, one less, or another."""
    keeps = list(parents[0].keeps)
    kind = rng.choice(("add", "drop", "change")) if keeps else "add"
    if kind != "add":
        keeps.pop(rng.randrange(len(keeps)))
    if kind != "drop":
        keeps.append(new_keep(rng))
    return with_policy(parents[0], keeps=tuple(keeps))


def change_group(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """How the query heads of a group are taken together."""
    return with_policy(parents[0], group=rng.choice([one for one in GROUPS if one != parents[0].group]))


def change_trigger(rng: Random, parents: Sequence[Policy], bounds: Bounds) -> Policy | None:
    """How seldom it evicts."""
    if bounds.trigger <= 1:
        return None
    return with_policy(parents[0], trigger=Number(value=min(bounds.trigger, 2 ** rng.randrange(8))))


def cross_statements(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """The score of one, and `keep` lines of both."""
    one, other = parents[:2]
    keeps = tuple(keep for keep in dict.fromkeys((*one.keeps, *other.keeps)) if rng.random() < 0.6)
    return with_policy(one, keeps=keeps)


def cross_expressions(rng: Random, parents: Sequence[Policy]) -> Policy | None:
    """An expression of one in the other's score, or joined with it."""
    one, other = parents[:2]
    given = [expr for place, expr in places(other, lambda expr: axes_of(expr) == {Axis.SLOT}) if _ranks(place)]
    new = rng.choice(given)
    place, expr = rng.choice([found for found in places(one, lambda expr: axes_of(expr) == {Axis.SLOT}) if _ranks(found[0])])
    return replaced(one, place, new if rng.random() < 0.5 else call(rng.choice(ARITHMETIC), expr, new))


def _ranks(place: Place) -> bool:
    return not place.part.endswith("count")


def moves(bounds: Bounds) -> dict[str, Move]:
    """Every move by its name."""
    found: dict[str, Move] = {
        "node": change_node, "wrap": wrap_node, "unwrap": unwrap_node, "operation": change_operation, "number": change_number,
        "keep": change_keep, "group": change_group, "statements": cross_statements, "expressions": cross_expressions,
    }  # fmt: skip
    return found if bounds.trigger <= 1 else found | {"trigger": partial(change_trigger, bounds=bounds)}


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers(policy: Policy) -> list[tuple[Place, float]]:
    """The numbers above 0 that a policy is tuned by."""
    found = places(policy, lambda expr: isinstance(expr, Number) and expr.value > 0)
    return [(place, expr.value) for place, expr in found if isinstance(expr, Number)]


def with_numbers(policy: Policy, values: Sequence[float]) -> Policy:
    """The policy with other numbers, in the order of `numbers`; they are rounded to three digits."""
    for (place, _), value in zip(numbers(policy), values, strict=True):
        policy = replaced(policy, place, Number(value=_rounded(value)))
    return policy


def _rounded(value: float) -> float:
    return float(f"{min(max(value, 1e-4), 1e4):.3g}")
