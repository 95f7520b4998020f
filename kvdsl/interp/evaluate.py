"""Evaluate expressions at one moment.

Every value is an array of two dimensions, slots by dims, with size 1 along an axis over which it does not vary: a number is [1, 1], a
value per slot [n, 1], a query vector [1, D], the keys [n, D]. The language's broadcasting is then NumPy's. There is no query axis:
expressions are evaluated for one query at a time, and reductions over queries come from the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvdsl.ir.nodes import PREVIOUS, Axis, Call, ColumnRef, Expr, Fold, Input, Rank, Reduce, TensorRef
from kvdsl.ir.ops import FARTHEST, MOST_STEPS, POOLS, REDUCTIONS
from kvdsl.ir.visitors import axes_of, children, of_one_slot

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.int64]
Remembered: TypeAlias = "Reduce | Fold | ColumnRef"
"""What the memory provides: a reduction over queries, a fold, or a state column."""


class Rotation(Protocol):
    """A model's rotation; see `kvdsl.interp.attention.Rope`."""

    def rotate(self, x: Array, shift: Array) -> Array:
        """Rotate vectors, [..., dim], by `shift` positions, [...]."""

    def pairs(self, x: Array) -> Array:
        """Return at each dim the L2 norm of its pair."""


def _remembers_nothing(leaf: Remembered) -> Array:
    raise LookupError(f"nothing is remembered here: {leaf!r}")


@dataclass(frozen=True)
class Scope:
    """What an expression sees at one moment.

    Attributes:
        slots: the number of slots: those that the query sees, or the live ones in a settle.
        dims: the size of a key.
        inputs: the inputs by name, each [slots or 1, dims or 1].
        params: the policy's params.
        tensors: the tensors' values for the KV head, [1, dims or 1] each; a matrix is [dims, rank].
        given: the caller's values of the slots' tokens, [slots, 1] each.
        recall: returns the value per slot, [slots, 1], of a reduction over queries, a column or a ring.
        random: returns the slots' random numbers, [slots, 1].
        page: the tokens of a page. `page_after`: the tokens before the first page.
        sketch: the sketch's dims, ascending; None before the first sketch.
        unprotected: [slots] the slots that pools count; None where nothing can be pooled.
        rope: the model's rotation; None if positions do not rotate.
        text: the prompt's queries, as position and query heads [G, D], if a score reads them.
        group, query_head: the number of query heads of the KV head, and the current one; `over_group` reduces their values, [G, ...].
        known: values of parts of an expression in the body of a reduction over others, for the slot and the other ones.
        heads: the layer's KV heads, for expressions over all of them; in a score, `place` is this head's index among them.
    """

    slots: int
    dims: int
    inputs: Mapping[str, Array]
    params: Mapping[str, float]
    tensors: Mapping[str, Array] = field(default_factory=dict)
    given: Mapping[str, Array] = field(default_factory=dict)
    recall: Callable[[Remembered], Array] = _remembers_nothing
    random: Callable[[], Array] | None = None
    page: float = 1
    page_after: float = 0
    sketch: Indices | None = None
    unprotected: Mask | None = None
    rope: Rotation | None = None
    text: Sequence[tuple[int, Array]] = ()
    group: int = 1
    query_head: int = 0
    known: Mapping[Expr, Array] = field(default_factory=dict)
    over_group: Callable[[Array], Array] = lambda x: np.asarray(x[0])
    heads: tuple[Peer, ...] = ()
    place: int = 0


@dataclass(frozen=True)
class Peer:
    """A KV head of the layer: its scope, and a function for the value of an expression, [slots or 1, 1], reduced over its group."""

    scope: Scope
    value: Callable[[Expr, Scope], Array]


def number(value: float) -> Array:
    """Return a number as a value, [1, 1]."""
    return np.array([[value]], dtype=np.float64)


def per_slot(values: object) -> Array:
    """Return one number per slot as a value, [n] to [n, 1]."""
    return np.asarray(values, dtype=np.float64).reshape(-1, 1)


@np.errstate(all="ignore")
def evaluate(expr: Expr, scope: Scope) -> Array:
    """Return the value of an expression, [slots or 1, dims or 1].

    Arithmetic and comparisons are IEEE's: x / 0 is infinite or NaN, and a NaN equals nothing.
    """
    return _value(expr, scope)


def _value(expr: Expr, scope: Scope) -> Array:
    if scope.known and expr in scope.known:
        return scope.known[expr]
    return _VALUES[expr.kind](expr, scope)


def _tensor(expr: TensorRef, scope: Scope) -> Array:
    row = scope.tensors[expr.name]
    return np.atleast_2d(row[scope.query_head]) if expr.group else row


def _call(expr: Call, scope: Scope) -> Array:
    """Evaluate an operation; one that is not elementwise evaluates its operands itself."""
    if expr.op in _OPERATIONS:
        return _OPERATIONS[expr.op](scope, *expr.args)
    return _ELEMENTWISE[expr.op](*(_value(arg, scope) for arg in expr.args))


def _reduce(expr: Reduce, scope: Scope) -> Array:
    if expr.within == "text":
        return _over_text(expr, scope)
    if expr.axis is Axis.QUERY:
        return scope.recall(expr)
    return _RANGES[expr.axis](expr, scope)


def next_of(fold: Fold, scope: Scope) -> Array:
    """Return the next value of a fold, [slots or 1, 1]: its body at the previous value."""
    before = _begun(scope.recall(fold), _value(fold.start, scope))
    return _value(fold.body, replace(scope, inputs={**scope.inputs, PREVIOUS.name: before}))


def _folded(fold: Fold, scope: Scope) -> Array:
    """Return the value of a fold: NaN before the first query if the first query gives its start."""
    held = scope.recall(fold)
    return held if Axis.QUERY in axes_of(fold.start) else _begun(held, _value(fold.start, scope))


def evaluate_number(expr: Expr, scope: Scope) -> float:
    """Return the value of an expression without axes."""
    return float(evaluate(expr, scope).item())


def evaluate_slots(expr: Expr, scope: Scope) -> Array:
    """Return the value of an expression with at most the slot axis, [slots]."""
    values: Array = np.broadcast_to(evaluate(expr, scope), (scope.slots, 1))[:, 0].copy()
    return values


def evaluate_group(expr: Expr, scope: Scope) -> Array:
    """Return what a settle ranks by, [slots]; values that differ between query heads are reduced over the group."""
    if not differs_by_query_head(expr):
        return evaluate_slots(expr, scope)
    return scope.over_group(np.stack([evaluate_slots(expr, replace(scope, query_head=head)) for head in range(scope.group)]))


def differs_by_query_head(expr: Expr) -> bool:
    """Return whether a settle's value differs between the query heads of a group. Pools reduce over the group first."""
    match expr:
        case Call(op=op) if op in POOLS:
            return False
        case Reduce(axis=Axis.QUERY) if expr.within != "text":
            return False
        case TensorRef(group=True) | Input(name="q"):
            return True
    return any(map(differs_by_query_head, children(expr)))


def _over_text(expr: Reduce, scope: Scope) -> Array:
    """Reduce over the prompt's queries, for one query head."""
    first = 0.0 if expr.after is None else evaluate_number(expr.after, scope)
    position, found, holds = scope.inputs["position"], [], []
    for place, heads in scope.text:
        if place >= first:
            own = {"q": heads[scope.query_head][None], "query_position": number(place), "age": place - position}
            at_query = replace(scope, inputs={**scope.inputs, **own})
            found.append(_value(expr.body, at_query))
            holds.append(number(1) if expr.where is None else _value(expr.where, at_query))
    if not found:
        return np.full((1, scope.dims if Axis.DIM in axes_of(expr.body) else 1), REDUCTIONS[expr.op].of_nothing)
    reduced: Array = _where_it_holds(expr, np.stack(found), np.stack(holds))[0]
    return reduced


def _pairs(scope: Scope, vector: Expr) -> Array:
    x = _value(vector, scope)
    return np.abs(x) if scope.rope is None else scope.rope.pairs(x)


def _turn(scope: Scope, vector: Expr, by: Expr) -> Array:
    return _turned(_value(vector, scope), _value(by, scope), scope)


def _ahead(scope: Scope, vector: Expr, by: Expr, step: Expr | None = None) -> Array:
    """Return the mean of a vector, rotated back by the positions of future queries."""
    x = _value(vector, scope)
    newest, count = float(scope.inputs["seen"].item()) - 1, int(at_least_one(evaluate_number(by, scope)))
    factor = None if step is None else evaluate_number(step, scope)
    count = min(count, FARTHEST if factor is None else MOST_STEPS)
    places = range(1, count + 1) if factor is None else [factor**n for n in range(count)]
    turned: Array = np.mean([_turned(x, number(-(newest + place)), scope) for place in places], axis=0)
    return turned


def _turned(x: Array, shift: Array, scope: Scope) -> Array:
    rows = max(len(x), len(shift))
    x, shift = np.broadcast_to(x, (rows, x.shape[1])), np.broadcast_to(shift[:, 0], (rows,))
    return np.array(x) if scope.rope is None else scope.rope.rotate(x, shift)


def _project(scope: Scope, vector: Expr, matrix: Expr) -> Array:
    projected: Array = _value(vector, scope) @ _value(matrix, scope)
    return projected


def _random(scope: Scope) -> Array:
    assert scope.random is not None
    return scope.random()


def _leverage(scope: Scope, vector: Expr, add: Expr) -> Array:
    """Evaluate the definition: x (XᵀX + ridge I)⁻¹ x for each row x of X."""
    x = _value(vector, scope)
    x = np.broadcast_to(x, (scope.slots, x.shape[1]))
    size, ridge = x.shape[1], evaluate_number(add, scope)
    place = np.arange(size)
    gram = np.where(place[:, None] == place[None], x.T @ x + ridge, x.T @ x)
    try:
        return per_slot(np.sum(x * np.linalg.solve(gram, x.T).T, axis=1))
    except np.linalg.LinAlgError:
        return per_slot(np.full(scope.slots, np.nan))


def _over_heads(expr: Reduce, scope: Scope) -> Array:
    """Reduce over the layer's KV heads: one number each, or one per position, which all of them hold."""
    values, holds = (
        [number(1) if part is None else peer.value(part, replace(peer.scope, heads=scope.heads)) for peer in scope.heads]
        for part in (expr.body, expr.where)
    )
    if all(len(value) == 1 for value in (*values, *holds)):
        return _where_it_holds(expr, np.concatenate(values), np.concatenate(holds))
    orders = [np.argsort(peer.scope.inputs["position"][:, 0]) for peer in scope.heads]
    texts, where = (
        np.stack([np.broadcast_to(value, (len(order), 1))[order] for value, order in zip(of, orders, strict=True)])
        for of in (values, holds)
    )
    folded = _where_it_holds(expr, texts, where)[0]
    own: Array = folded[np.argsort(np.argsort(scope.inputs["position"][:, 0]))]
    return own


def _over_slots(expr: Reduce, scope: Scope) -> Array:
    """Reduce over slots: all, those with each slot's key, those of its page or of the next.

    A body that does not vary over slots counts once for each.
    """
    body = _value(expr.body, scope)
    body = np.broadcast_to(body, (scope.slots, body.shape[1]))
    holds = np.broadcast_to(number(1) if expr.where is None else _value(expr.where, scope), (scope.slots, 1))
    if expr.by is None and expr.within == "all":
        return _where_it_holds(expr, body, holds)
    if expr.by is None:
        keys = page_of(scope.inputs["position"][:, 0], scope.page, scope.page_after).astype(np.float64)
    else:
        keys = evaluate_slots(expr.by, scope)
    numbers = set(keys[~np.isnan(keys)].tolist())
    folded = {key: _where_it_holds(expr, body[keys == key], holds[keys == key]) for key in numbers}
    nothing = np.full((1, body.shape[1]), REDUCTIONS[expr.op].of_nothing)
    found = [nothing if math.isnan(key) else folded.get(key + (expr.within == "next"), nothing) for key in keys.tolist()]
    return np.concatenate(found)


def _where_it_holds(expr: Reduce, x: Array, holds: Array) -> Array:
    """Reduce along the first axis where the condition holds, straight from the definition, line by line."""
    if expr.where is None:
        return fold(expr.op, x, axis=0)
    x = np.where(_truth(holds), x, x)  # broadcast to the shape of both
    chosen = np.broadcast_to(_truth(holds), x.shape)
    lines, masks = x.reshape(len(x), -1), chosen.reshape(len(x), -1)
    of_nothing = REDUCTIONS[expr.op].of_nothing
    found = [
        fold(expr.op, line[mask], axis=0).item() if mask.any() else of_nothing
        for line, mask in zip(lines.T, masks.T, strict=True)
    ]
    return np.array(found).reshape(1, *x.shape[1:])


def _over_others(expr: Reduce, scope: Scope) -> Array:
    """Reduce over all other slots, or also the slot itself, for each slot in turn."""
    both = (expr.body,) if expr.where is None else (expr.body, expr.where)
    parts = {part: _of_every_slot(part, scope) for expr_ in both for part in of_one_slot(expr_)}
    place, reduced = np.arange(scope.slots), []
    for slot in place:
        others = (place != slot) if expr.within == "all" else (place >= 0)
        known = {part: x[others if part.kind == "other" else place == slot] for part, x in parts.items()}
        compared = replace(scope, slots=int(others.sum()), known=known)
        body = _value(expr.body, compared)
        body = np.broadcast_to(body, (compared.slots, body.shape[1]))
        nothing = np.full((1, body.shape[1]), REDUCTIONS[expr.op].of_nothing)
        holds = number(1) if expr.where is None else _value(expr.where, compared)
        holds = np.broadcast_to(holds, (compared.slots, 1))
        reduced.append(_where_it_holds(expr, body, holds) if len(body) else nothing)
    return np.concatenate(reduced)


def _of_every_slot(part: Expr, scope: Scope) -> Array:
    """Return for every slot a part that belongs to one of two compared slots, [slots, dims or 1]."""
    found = _value(part.body if part.kind == "other" else part, scope)
    return np.broadcast_to(found, (scope.slots, found.shape[1]))


def _over_dims(expr: Reduce, scope: Scope) -> Array:
    """Reduce over dims, or those of the sketch. A body that does not vary over dims counts once for each."""
    body, holds = _value(expr.body, scope), None if expr.where is None else _truth(_value(expr.where, scope))
    rows, dims = body.shape if holds is None else np.where(holds, body, body).shape
    varies = any(part is not None and Axis.DIM in axes_of(part) for part in (expr.body, expr.where))
    shape = (rows, dims if varies else scope.dims)
    body, holds = np.broadcast_to(body, shape), None if holds is None else np.broadcast_to(holds, shape)
    if expr.within == "sketch":
        if scope.sketch is None:
            raise LookupError("there is no sketch before the prompt's last query")
        body, holds = body[:, scope.sketch], None if holds is None else holds[:, scope.sketch]
    return over_dims(expr.op, body) if holds is None else _over_some_dims(expr.op, body, holds)


def _over_some_dims(op: str, x: Array, holds: Mask) -> Array:
    """Reduce the dims for which a condition holds, [n, D] each to [n, 1], with the same order of additions as without a filter."""
    if op in ("max", "min"):
        return over_dims(op, np.where(holds, x, REDUCTIONS[op].of_nothing))
    if op == "sum":
        return over_dims(op, np.where(holds, x, 0))
    count: Array = over_dims("sum", _as_number(holds))
    mean: Array = over_dims("sum", np.where(holds, x, 0)) / count
    if op == "mean":
        return mean
    variance: Array = over_dims("sum", np.where(holds, (x - mean) ** 2, 0)) / count
    deviation: Array = np.sqrt(variance)
    return variance if op == "var" else deviation


@np.errstate(all="ignore")
def over_dims(op: str, x: Array) -> Array:
    """Reduce dims, [n, D] to [n, 1], in the order of additions that all backends share."""
    if op not in ("sum", "mean", "var", "std"):
        return fold(op, x, axis=1)
    if op == "sum":
        return _folded_in_half(x)
    mean: Array = _folded_in_half(x) / x.shape[1]
    if op == "mean":
        return mean
    variance: Array = _folded_in_half((x - mean) ** 2) / x.shape[1]
    deviation: Array = np.sqrt(variance)
    return variance if op == "var" else deviation


def _folded_in_half(x: Array) -> Array:
    """Sum the dims: pad with zeros to a power of two, then add the second half to the first until one is left."""
    size = 1
    while size < x.shape[1]:
        size *= 2
    x = np.pad(x, ((0, 0), (0, size - x.shape[1])))
    while size > 1:
        size //= 2
        x = x[:, :size] + x[:, size:]
    return x


def _rank(expr: Rank, scope: Scope) -> Array:
    """Return each slot's rank: among all slots, those of its key, of its page, or of all heads."""
    if expr.within == "heads":
        return _rank_over_heads(expr, scope)
    body, position = evaluate_slots(expr.body, scope), scope.inputs["position"][:, 0]
    keys = np.zeros(scope.slots)
    if expr.by is not None:
        keys = evaluate_slots(expr.by, scope)
    elif expr.within == "page":
        keys = page_of(position, scope.page, scope.page_after).astype(np.float64)
    ranks = np.zeros(scope.slots)
    for key in set(keys.tolist()):
        own = np.flatnonzero(keys == key)
        ranks[own[ascending(body[own], position[own])]] = np.arange(len(own))
    return per_slot(ranks)


def _rank_over_heads(expr: Rank, scope: Scope) -> Array:
    """Rank the slots of all heads. Among equals the older comes first, then the lower head's."""
    found = [evaluate_slots(expr.body, replace(peer.scope, heads=scope.heads)) for peer in scope.heads]
    places = np.concatenate([peer.scope.inputs["position"][:, 0] for peer in scope.heads])
    heads = np.repeat(np.arange(len(found)), [len(one) for one in found])
    order = ascending(np.concatenate(found), places * len(found) + heads)
    ranks = np.zeros(len(order))
    ranks[order] = np.arange(len(order))
    return per_slot(ranks[heads == scope.place])


def _enough(scope: Scope, values: Expr, share: Expr, order: Expr) -> Array:
    """Count the slots, the highest first, until their values reach a share of the total."""
    body, by = (evaluate_slots(part, scope) for part in (values, order))
    highest_first = ascending(by, scope.inputs["position"][:, 0].astype(np.int64))[::-1]
    sums = np.cumsum(body[highest_first])
    reached = np.flatnonzero(sums >= evaluate_number(share, scope) * sums[-1:])
    return number(float(reached[0] + 1 if len(reached) else scope.slots))


def _pool(op: str, scope: Scope, values: Expr, size: Expr) -> Array:
    """Pool each unprotected slot with its unprotected neighbours in the order of the text; a protected slot is alone."""
    if scope.unprotected is None:
        raise LookupError("only a score can pool")
    body = evaluate_group(values, scope)
    radius = int(min(at_least_one(evaluate_number(size, scope)), 2 * scope.slots) // 2)
    slots = np.flatnonzero(scope.unprotected)
    in_order = slots[np.argsort(scope.inputs["position"][slots, 0])]
    pooled = body.copy()
    for place, slot in enumerate(in_order):
        near = in_order[max(place - radius, 0) : place + radius + 1]
        pooled[slot] = fold(op, body[near], axis=0)[0]
    return per_slot(pooled)


def ascending(x: Array, position: Array | Indices) -> Indices:
    """Return indices from lowest to highest: NaN lowest, -0 equal to +0, among equals the older first."""
    is_number = ~np.isnan(x)
    return np.lexsort((position, np.where(is_number, x, 0), is_number)).astype(np.int64)


def page_of(position: Array | Indices, page: float, after: float = 0) -> Indices:
    """Return the page, [n], of each position; pages count from 0, after the first `after` tokens."""
    return np.floor((position - after) / page).astype(np.int64)


@np.errstate(over="ignore")
def as_float32(x: Array) -> Array:
    """Round to float32; numbers too large for it become infinite."""
    return x.astype(np.float32).astype(np.float64)


def floored(count: float) -> float:
    """Round a count of tokens down; inf and NaN stay as they are."""
    return float(math.floor(count)) if math.isfinite(count) else count


def counted(count: float) -> float:
    """Round a count of tokens down; negative ones and NaN become 0."""
    count = floored(count)
    return count if count > 0 else 0.0


def some(count: float) -> float:
    """Round a count down whose 0 has a special meaning: 0 < count < 1 becomes 1; negative ones and NaN become 0."""
    return 1.0 if 0 < count < 1 else counted(count)


def at_least_one(count: float) -> float:
    """Round a count down, but return at least 1, also for NaN."""
    count = floored(count)
    return count if count > 1 else 1.0


@np.errstate(all="ignore")
def fold(op: str, x: Array, axis: int) -> Array:
    """Reduce an axis to size 1, straight from the definitions; `std` and `var` are the population's."""
    result: Array = np.expand_dims(_REDUCTIONS[op](x, axis), axis)
    return result


def _quantile(x: Array, p: float) -> Array:
    """Interpolate between the two values around index p * (n - 1) of the sorted ones; NaN if any value is."""
    x, place = np.sort(x), min(max(p, 0), 1) * (len(x) - 1)
    low, high, rest = x[math.floor(place)], x[math.ceil(place)], place - math.floor(place)
    between: Array = low if rest == 0 else (1 - rest) * low + rest * high
    return between if not np.isnan(x).any() else x[-1:].sum()


_REDUCTIONS: dict[str, Callable[[Array, int], Array]] = {
    "sum": np.sum,
    "mean": np.mean,
    "var": np.var,
    "std": np.std,
    "max": np.max,
    "min": np.min,
    "median": np.median,
    "last": lambda x, axis: x.take(np.array(-1), axis),
}
"""The definitions of the reductions of `kvdsl.ir.ops`, except `ema`, which is in `kvdsl.interp.memory.over_queries`."""

WITH_ARGUMENT: dict[str, Callable[[Array, float], Array]] = {"quantile": _quantile}
"""The definitions of reductions with an argument, for the values of one slot."""


def _truth(x: Array) -> Mask:
    """Convert numbers to truth: everything but 0 is true, NaN too."""
    mask: Mask = x != 0
    return mask


def _as_number(condition: Mask) -> Array:
    return condition.astype(np.float64)


def _where(condition: Array, yes: Array, no: Array) -> Array:
    chosen: Array = np.where(_truth(condition), yes, no)
    return chosen


def _begun(held: Array, start: Array) -> Array:
    begun: Array = np.where(np.isnan(held), start, held)
    return begun


_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "neg": np.negative,
    "not": lambda x: _as_number(~_truth(x)),
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "acos": np.arccos,
    "floor": np.floor,
    "ceil": np.ceil,
    "min": lambda *args: reduce(np.minimum, args),
    "max": lambda *args: reduce(np.maximum, args),
    "where": _where,
    "begun": _begun,
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.mod,  # floored: the remainder has the divisor's sign
    "**": np.power,
    "<": lambda a, b: _as_number(a < b),
    "<=": lambda a, b: _as_number(a <= b),
    ">": lambda a, b: _as_number(a > b),
    ">=": lambda a, b: _as_number(a >= b),
    "==": lambda a, b: _as_number(a == b),
    "!=": lambda a, b: _as_number(a != b),
    "and": lambda a, b: _as_number(_truth(a) & _truth(b)),
    "or": lambda a, b: _as_number(_truth(a) | _truth(b)),
}

_OPERATIONS: dict[str, Callable[..., Array]] = {
    "random": _random,
    "project": _project,
    "turn": _turn,
    "ahead": _ahead,
    "pairs": _pairs,
    "leverage": _leverage,
    "enough": _enough,
    "max_pool": partial(_pool, "max"),
    "mean_pool": partial(_pool, "mean"),
}

_RANGES: dict[Axis, Callable[[Reduce, Scope], Array]] = {
    Axis.SLOT: _over_slots,
    Axis.DIM: _over_dims,
    Axis.OTHER: _over_others,
    Axis.HEAD: _over_heads,
}

_VALUES: dict[str, Callable[..., Array]] = {
    "number": lambda expr, _: number(expr.value),
    "param": lambda expr, scope: number(scope.params[expr.name]),
    "tensor": _tensor,
    "given": lambda expr, scope: scope.given[expr.name],
    "input": lambda expr, scope: scope.inputs[expr.name],
    "column": lambda expr, scope: scope.recall(expr),
    "call": _call,
    "reduce": _reduce,
    "rank": _rank,
    "fold": lambda expr, scope: _folded(expr, scope) if expr.over == "queries" else next_of(expr, scope),
}
"""The value of each kind of node, except `Other`, which only a reduction over others knows."""
