"""What float32 can tell of a policy's expressions and of attention: the ranges (`ranges`) of what a backend may compute.

Shapes are the interpreter's: [slots or 1, dims or 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvdsl.interp.attention import Rope
from kvdsl.interp.evaluate import Scope as ExactScope
from kvdsl.interp.evaluate import ascending, at_least_one, differs_by_query_head, evaluate_number, page_of
from kvdsl.ir.nodes import Axis, Call, Expr, Number, Other, Rank, Reduce, TensorRef
from kvdsl.ir.ops import FARTHEST, MOST_STEPS, REDUCTIONS
from kvdsl.ir.visitors import axes_of, of_one_slot

from .ranges import (
    FUNCTIONS,
    LARGEST,
    LIBRARY,
    OPERATORS,
    TINY,
    UNIT,
    Array,
    Mask,
    Range,
    add,
    anything,
    choose,
    divide,
    exactly,
    fold,
    infinite,
    joined,
    multiply,
    rank,
    rounded,
    square,
    stack,
    subtract,
    tanh,
    total,
    widened,
)

FUSED_16_BITS = 2.0**-14
"""What torch's fused attention on CPUs makes of exponentials where the model has 16 bits (0 elsewhere)."""


@dataclass(frozen=True)
class Scope:
    """What an expression sees at one moment: see `kvdsl.interp.evaluate.Scope`.

    Attributes:
        numbers: the policy's numbers, by name, exact.
        recall: the range, [slots, 1], of a state column or of a ring's reduction.
        unprotected: [slots] what a pool ranges over; None where that lies within precision.
        rope, text, group: as the interpreter's scope has them; `query_head`: which of the group is asked, `how` the group is reduced.
        heads: the layer's KV heads, where all of them are asked together: what each sees, and the value of an expression for it.
        place: which of them this one is, in a score.
        known: ranges of parts of an expression, as the interpreter's scope has their values.
    """

    slots: int
    dims: int
    inputs: Mapping[str, Range]
    numbers: ExactScope
    recall: Callable[[Expr], Range]
    random: Callable[[], Array] | None = None
    unprotected: Mask | None = None
    rope: Rope | None = None
    text: Sequence[tuple[int, Array]] = ()
    group: int = 1
    query_head: int = 0
    how: str = "mean"
    heads: tuple[tuple[Scope, Callable[[Expr, Scope], Range]], ...] = ()
    place: int = 0
    known: Mapping[Expr, Range] = field(default_factory=dict)


@np.errstate(all="ignore")
def bounds(expr: Expr, scope: Scope) -> Range:
    """The range of an expression."""
    if scope.known and expr in scope.known:
        return scope.known[expr]
    return _BOUNDS[expr.kind](expr, scope)


def _tensor(expr: TensorRef, scope: Scope) -> Range:
    row = scope.numbers.tensors[expr.name]
    return exactly(np.atleast_2d(row[scope.query_head]) if expr.group else row)


def _call(expr: Call, scope: Scope) -> Range:
    if expr.op in _OPERATIONS:
        return _OPERATIONS[expr.op](scope, *expr.args)
    args = [bounds(arg, scope) for arg in expr.args]
    if expr.op == "**" and expr.args[1] == Number(value=2):
        return square(args[0])
    return OPERATORS[expr.op](*args) if expr.op in OPERATORS else FUNCTIONS[expr.op](*args)


def _reduce(expr: Reduce, scope: Scope) -> Range:
    return _over_text(expr, scope) if expr.within == "text" else _RANGES[expr.axis](expr, scope)


def _random(scope: Scope) -> Range:
    assert scope.random is not None
    return exactly(scope.random())


def _project(scope: Scope, vector: Expr, matrix: Expr) -> Range:
    vectors, columns = bounds(vector, scope), bounds(matrix, scope)
    rows = [total(multiply(vectors, columns[:, place][None]), 1) for place in range(columns.lo.shape[1])]
    return Range(*(np.concatenate([getattr(row, name) for row in rows], 1) for name in ("lo", "hi", "nan")))


def _begun(scope: Scope, column: Expr, first: Expr) -> Range:
    """What a column holds, or the start of its fold where it is NaN."""
    held, start = bounds(column, scope), bounds(first, scope)
    either = Range(np.minimum(held.lo, start.lo), np.maximum(held.hi, start.hi), held.nan & start.nan)
    begun = choose(held.never, start, choose(~held.nan, held, either))
    return choose(held.never, start, begun)


def _over_text(expr: Reduce, scope: Scope) -> Range:
    first = 0.0 if expr.after is None else evaluate_number(expr.after, scope.numbers)
    found = []
    for place, heads in scope.text:
        if place >= first:
            own = {"q": exactly(heads[scope.query_head][None]), "query_position": exactly([[place]])}
            own["age"] = exactly(place - scope.inputs["position"].lo)
            found.append(bounds(expr.body, replace(scope, inputs={**scope.inputs, **own})))
    if not found:
        return exactly(np.full((1, scope.dims if Axis.DIM in axes_of(expr.body) else 1), REDUCTIONS[expr.op].of_nothing))
    shape = np.broadcast_shapes(*(one.lo.shape for one in found))
    return fold(expr.op, stack([one.map(lambda x: np.broadcast_to(x, shape)) for one in found]), 0)[0]


def _pairs(scope: Scope, vector: Expr) -> Range:
    x = bounds(vector, scope)
    if scope.rope is None:
        return FUNCTIONS["abs"](x)
    first, second = scope.rope._pairs()
    length = FUNCTIONS["sqrt"](add(square(x[:, first]), square(x[:, second])))
    return _with_pairs(FUNCTIONS["abs"](x), (first, widened(length, LIBRARY)), (second, widened(length, LIBRARY)))


def _turn(scope: Scope, vector: Expr, places: Expr) -> Range:
    """Cosines and sines are a library's, and found in float64."""
    x = bounds(vector, scope)
    if scope.rope is None:
        return x
    by = bounds(places, scope)
    if not by.sharp.all() or not np.isfinite(by.lo).all():
        return anything((max(len(x.lo), len(by.lo)), x.lo.shape[1]))
    angle = by.lo * scope.rope.inv_freq
    return _with_pairs(*_turned(x, scope.rope, np.cos(angle), np.sin(angle)))


def _ahead(scope: Scope, vector: Expr, by: Expr, step: Expr | None = None) -> Range:
    x = bounds(vector, scope)
    if scope.rope is None:
        return x
    newest, count = scope.inputs["seen"].lo.item() - 1, int(at_least_one(evaluate_number(by, scope.numbers)))
    factor = None if step is None else evaluate_number(step, scope.numbers)
    count = min(count, FARTHEST if factor is None else MOST_STEPS)
    places = [place + 1 if factor is None else factor**place for place in range(count)]
    angle = -(newest + np.array(places))[:, None] * scope.rope.inv_freq
    cos, sin = np.cos(angle).mean(0, keepdims=True), np.sin(angle).mean(0, keepdims=True)
    whole, *turned = _turned(x, scope.rope, cos, sin)
    # Infinities of either sign may meet in the mean, and need not where its turns are one sum.
    endless = infinite(x[:, turned[0][0]]) | infinite(x[:, turned[1][0]])
    return _with_pairs(whole, *((dims, choose(endless, anything(one.lo.shape), one)) for dims, one in turned))


def _turned(x: Range, rope: Rope, cos: Array, sin: Array) -> tuple[Range, tuple[Array, Range], tuple[Array, Range]]:
    """A vector of as many rows as there are turns, and what its pairs become."""
    first, second = rope._pairs()
    a, b = x[:, first], x[:, second]
    c, s = (widened(rounded(one), LIBRARY) for one in (cos, sin))
    whole = x.map(lambda one: np.broadcast_to(one, (max(len(x.lo), len(cos)), one.shape[1])).copy())
    turned = subtract(multiply(a, c), multiply(b, s)), add(multiply(a, s), multiply(b, c))
    return whole, (first, turned[0]), (second, turned[1])


def _with_pairs(x: Range, *parts: tuple[Array, Range]) -> Range:
    for dims, part in parts:
        for name in ("lo", "hi", "nan"):
            getattr(x, name)[:, dims] = getattr(part, name)
    return x


def _leverage(scope: Scope, vector: Expr, ridge: Expr) -> Range:
    """Of vectors that are known, where the system is well posed; found in float64 everywhere."""
    x = bounds(vector, scope).map(lambda one: np.broadcast_to(one, (scope.slots, one.shape[1])))
    unknown = anything((scope.slots, 1))
    if not x.sharp.all() or not np.isfinite(x.lo).all():
        return unknown
    gram = x.lo.T @ x.lo + evaluate_number(ridge, scope.numbers) * np.eye(x.lo.shape[1])
    if not np.isfinite(gram).all() or np.linalg.cond(gram) > 1e6:
        return unknown
    return widened(exactly(np.sum(x.lo * np.linalg.solve(gram, x.lo.T).T, axis=1, keepdims=True)), 1e-6)


def _over_slots(expr: Reduce, scope: Scope) -> Range:
    body = bounds(expr.body, scope)
    body = body.map(lambda x: np.broadcast_to(x, (scope.slots, x.shape[1])))
    if expr.within == "all":
        return fold(expr.op, body, 0)
    pages = page_of(scope.inputs["position"].lo[:, 0], scope.numbers.page, scope.numbers.page_after)
    folded = {page: fold(expr.op, body[pages == page], 0) for page in set(pages)}
    nothing = exactly(np.full((1, body.lo.shape[1]), REDUCTIONS[expr.op].of_nothing))
    return joined([folded.get(page + (expr.within == "next"), nothing) for page in pages])


def _over_others(expr: Reduce, scope: Scope) -> Range:
    parts, place, reduced = {}, np.arange(scope.slots), []
    for part in of_one_slot(expr.body):
        found = bounds(part.body if isinstance(part, Other) else part, scope)
        parts[part] = found.map(lambda x: np.broadcast_to(x, (scope.slots, x.shape[1])))
    for slot in place:
        others = (place != slot) if expr.within == "all" else (place >= 0)
        count = int(others.sum())
        known = {part: x[others] if isinstance(part, Other) else x[place == slot] for part, x in parts.items()}
        body = bounds(expr.body, replace(scope, slots=count, known=known))
        body = body.map(lambda x, count=count: np.broadcast_to(x, (count, x.shape[1])))
        nothing = exactly(np.full((1, body.lo.shape[1]), REDUCTIONS[expr.op].of_nothing))
        reduced.append(fold(expr.op, body, 0) if count else nothing)
    return joined(reduced)


def _over_heads(expr: Reduce, scope: Scope) -> Range:
    """Of a number of each head, or position by position."""
    values = [value(expr.body, replace(one, heads=scope.heads)) for one, value in scope.heads]
    if all(len(value.lo) == 1 for value in values):
        return fold(expr.op, joined(values), 0)
    texts = []
    for value, (one, _) in zip(values, scope.heads, strict=True):
        size, order = one.slots, np.argsort(one.inputs["position"].lo[:, 0])
        texts.append(value.map(lambda x, size=size: np.broadcast_to(x, (size, 1)))[order])
    return fold(expr.op, stack(texts), 0)[0][np.argsort(np.argsort(scope.inputs["position"].lo[:, 0]))]


def _over_dims(expr: Reduce, scope: Scope) -> Range:
    body = bounds(expr.body, scope)
    rows, dims = body.lo.shape
    size = dims if Axis.DIM in axes_of(expr.body) else scope.dims
    body = body.map(lambda x: np.broadcast_to(x, (rows, size)))
    return fold(expr.op, body if expr.within == "all" else body[:, scope.numbers.sketch], 1)


def _rank_over_heads(expr: Rank, scope: Scope) -> Range:
    found = [bounds_of_slots(expr.body, replace(one, heads=scope.heads)) for one, _ in scope.heads]
    heads = np.repeat(np.arange(len(found)), [one.slots for one, _ in scope.heads])
    places = np.concatenate([one.inputs["position"].lo[:, 0] for one, _ in scope.heads])
    ranks = rank(joined(found), (places * len(found) + heads).astype(np.int64))
    return ranks[heads == scope.place].map(lambda x: x[:, None])


def _rank(expr: Rank, scope: Scope) -> Range:
    if expr.within == "heads":
        return _rank_over_heads(expr, scope)
    body, position = bounds_of_slots(expr.body, scope), scope.inputs["position"].lo[:, 0].astype(np.int64)
    pages = (
        page_of(position, scope.numbers.page, scope.numbers.page_after)
        if expr.within == "page"
        else np.zeros(scope.slots, dtype=np.int64)
    )
    made = exactly(np.zeros(scope.slots))
    for page in set(pages):
        own = pages == page
        found = rank(body[own], position[own])
        made.lo[own], made.hi[own] = found.lo, found.hi
    return made.map(lambda x: x[:, None])


def _enough(scope: Scope, values: Expr, part: Expr, order: Expr) -> Range:
    """How many slots it takes: the sum of the highest m lies between that of the highest m lower bounds and that of the upper ones."""
    body, by = bounds_of_slots(values, scope), bounds_of_slots(order, scope)
    share, slots = evaluate_number(part, scope.numbers), scope.slots
    if body.sharp.all() and by.sharp.all():
        highest = ascending(by.lo, scope.inputs["position"].lo[:, 0].astype(np.int64))[::-1]
        sums = np.cumsum(body.lo[highest])
        return exactly([[_first(sums >= share * sums[-1:], slots)]])
    if order != values or body.nan.any():
        return Range(np.array([[1.0]]), np.array([[float(slots)]]), np.zeros((1, 1), dtype=bool))
    low, high = (np.cumsum(np.sort(one)[::-1]) for one in (body.lo, body.hi))
    slack = 1e-12 * np.abs(high).sum()  # sums of float64 in any order
    least = _first(high + slack >= share * low[-1:] - slack, slots)
    most = _first(low - slack >= share * high[-1:] + slack, slots)
    return Range(np.array([[least]]), np.array([[most]]), np.zeros((1, 1), dtype=bool))


def _first(holds: Mask, otherwise: int) -> float:
    """How many there are up to the first that holds."""
    return float(np.argmax(holds) + 1 if holds.any() else otherwise)


def _pool(op: str, scope: Scope, values: Expr, size: Expr) -> Range:
    if scope.unprotected is None:
        return anything((scope.slots, 1))
    body = bounds_of_group(values, scope).map(lambda x: x[:, None])
    radius = int(min(at_least_one(evaluate_number(size, scope.numbers)), 2 * scope.slots) // 2)
    slots = np.flatnonzero(scope.unprotected)
    in_order = slots[np.argsort(scope.inputs["position"].lo[slots, 0])]
    parts = [body[slot : slot + 1] for slot in range(scope.slots)]
    for place, slot in enumerate(in_order):
        parts[slot] = fold(op, body[in_order[max(place - radius, 0) : place + radius + 1]], 0)
    return joined(parts)


def bounds_of_slots(expr: Expr, scope: Scope) -> Range:
    """The range of an expression with at most the slots' axis: [slots]."""
    return bounds(expr, scope).map(lambda x: np.broadcast_to(x, (scope.slots, 1))[:, 0].copy())


def bounds_of_group(expr: Expr, scope: Scope) -> Range:
    """The same of what a settle ranks by: what differs between query heads is reduced over the group."""
    if not differs_by_query_head(expr):
        return bounds_of_slots(expr, scope)
    heads = [bounds_of_slots(expr, replace(scope, query_head=head)) for head in range(scope.group)]
    return over_group(stack(heads), scope.how)


_OPERATIONS: dict[str, Callable[..., Range]] = {
    "random": _random,
    "project": _project,
    "turn": _turn,
    "ahead": _ahead,
    "pairs": _pairs,
    "leverage": _leverage,
    "enough": _enough,
    "max_pool": partial(_pool, "max"),
    "mean_pool": partial(_pool, "mean"),
    "begun": _begun,
}
_RANGES: dict[Axis, Callable[[Reduce, Scope], Range]] = {
    Axis.SLOT: _over_slots,
    Axis.DIM: _over_dims,
    Axis.OTHER: _over_others,
    Axis.HEAD: _over_heads,
}
_BOUNDS: dict[str, Callable[..., Range]] = {
    "number": lambda expr, _: rounded([[expr.value]]),
    "param": lambda expr, scope: rounded([[scope.numbers.params[expr.name]]]),
    "tensor": _tensor,
    "given": lambda expr, scope: exactly(scope.numbers.given[expr.name]),
    "input": lambda expr, scope: scope.inputs[expr.name],
    "column": lambda expr, scope: scope.recall(expr),
    "call": _call,
    "reduce": _reduce,
    "rank": _rank,
}


# -- attention -----------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def logits(q: Array, key: Array, scaling: float, softcap: float | None, *, turned: bool = False) -> Range:
    """Scores before softmax, [G, n], of q [G, D] and keys [n, D]; `turned`: these were rotated, which a backend does in float32."""
    value = q @ key.T
    reach = np.abs(q) @ np.abs(key).T
    if turned:
        reach = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(key, axis=1)
    error = (q.shape[1] + (16 if turned else 2)) * UNIT * reach + TINY
    loose = Range(value - error, value + error, np.isnan(value))
    held = choose(np.isfinite(value) & (reach < LARGEST), loose, exactly(value))
    held = choose(np.isfinite(value) & (reach >= LARGEST), anything(value.shape), held)
    scaled = multiply(held, rounded([[scaling]]))
    if softcap is None:
        return scaled
    cap = rounded([[softcap]])
    bent = tanh(divide(scaled, cap))
    return multiply(cap, bent)


def biased(logit: Range, slopes: Array, distance: Array) -> Range:
    """Logits, [G, n], less what each place of distance, [n], takes: slopes [G]."""
    taken = multiply(exactly(-slopes[:, None]), exactly(distance[None].astype(float)))
    return add(logit, taken)


@np.errstate(all="ignore")
def probabilities(logit: Range, sinks: Array | None, fused: float | None = None) -> Range:
    """Softmax over the slots, [G, n]; a sink, [G], joins the denominator.

    Args:
        fused: not None: logits are computed once for the denominators, by fused attention of this precision, and once more for
            the numerators.
    """
    if sinks is not None:
        sink = exactly(sinks).map(lambda x: x[:, None])
        logit = Range(*(np.concatenate(pair, 1) for pair in zip(_parts(logit), _parts(sink), strict=True)))
    groups, slots = logit.lo.shape
    made = joined([_row(logit[g : g + 1], fused) for g in range(groups)])
    return made if sinks is None else made[:, : slots - 1]


def _parts(x: Range) -> tuple[Array, Array, Mask]:
    return x.lo, x.hi, x.nan


def _row(logit: Range, fused: float | None) -> Range:
    lo, hi = logit.lo, logit.hi
    if logit.never.any() or (lo == np.inf).any() or (hi == -np.inf).all():
        return exactly(np.full(lo.shape, np.nan))  # every probability is NaN
    if logit.nan.any() or (hi == np.inf).any():
        return anything(lo.shape)
    top = hi.max()
    low, high = np.exp(lo - top), np.exp(hi - top)
    own_low, own_high = (low, high) if fused is None else (high, low)
    least = low / (own_low + (high.sum() - high))
    most = high / (own_high + np.maximum(low.sum() - low, 0))
    sizes = np.where(np.isfinite(lo), np.abs(lo) + np.abs(hi), 0) + abs(top) + np.log(lo.shape[1])
    error = (lo.shape[1] + 16 + 2 * sizes) * UNIT + (fused or 0)
    most = np.where(np.isnan(most), 1, most) * (1 + error) + TINY
    return Range(np.fmax(least * (1 - error) - TINY, 0), most, logit.nan)


@np.errstate(all="ignore")
def weighted(prob: Range, value: Array) -> Range:
    """Outputs, [G, Dv], of probabilities [G, n] and values [n, Dv]."""
    heads = [prob[g].map(lambda x: x[:, None]) for g in range(prob.lo.shape[0])]
    return joined([total(multiply(head, exactly(value)), 0) for head in heads])


@np.errstate(all="ignore")
def over_group(x: Range, how: str) -> Range:
    """Reduce the group's query heads: [G, ...] to [...]. Under `each`, where no expression asks for it, it is the mean."""
    return fold({"mean": "mean", "max": "max", "sum": "sum", "each": "mean"}[how], x, 0)[0]
