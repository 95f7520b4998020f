"""A step of a policy on ranges (`precision`): what a float32 backend may remember, attend to and evict.

It starts from a backend's own state, which is exact, and follows the interpreter's step: same tokens, same slots. Where the
interpreter has a number, the shadow has the bounds within which a backend's number must lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvdsl.interp.attention import Call, at_ranks, rank_distances, taken_over
from kvdsl.interp.evaluate import Scope as ExactScope
from kvdsl.interp.evaluate import at_least_one, evaluate_number, page_of
from kvdsl.interp.inputs import NOTHING, Supplied, filled
from kvdsl.interp.operations import Operations
from kvdsl.interp.scopes import uniform
from kvdsl.interp.settle import PROTECTS
from kvdsl.interp.step import Step
from kvdsl.ir.nodes import Axis, Column, ColumnRef, Expr, Input, Keep, Reduce, TensorRef
from kvdsl.ir.ops import OF_QUERY_HEADS, REDUCTIONS, RULES
from kvdsl.ir.visitors import children

from .precision import Scope, biased, bounds, bounds_of_slots, logits, over_group, probabilities, weighted
from .ranges import (
    FUNCTIONS,
    LIBRARY,
    Array,
    Mask,
    Range,
    add,
    anything,
    choose,
    exactly,
    fold,
    highest,
    in_top,
    joined,
    multiply,
    rounded,
    square,
    stack,
    total,
    widened,
    with_argument,
)

Indices: TypeAlias = NDArray[np.int64]
FRESH = {name: row.fresh for name, row in RULES.items() if name not in ("token", "ring")}


class Held(Protocol):
    """As much of a head as a shadow starts from."""

    key: Array
    value: Array
    position: Indices
    seen: int
    sketch: Indices | None

    @property
    def columns(self) -> dict[str, Array]:
        """By name."""


class OutOfBounds(Exception):
    """What lies where nothing should."""


class Shadow:
    """One KV head.

    Attributes:
        columns: ranges, [n] each, [n, N] of a ring.
        key, value, position, seen, sketch: as the interpreter's head has them, exact.
        undecided: what a query attends to lies within precision, so that nothing that follows is known.
    """

    def __init__(self, machine: Operations, head: Held) -> None:
        self.machine, self.policy, self.numbers = machine, machine.policy, machine.numbers
        self.key, self.value, self.position, self.seen = head.key, head.value, head.position, head.seen
        self.sketch = head.sketch
        self.columns = {name: exactly(x) for name, x in head.columns.items()}
        self.undecided = False
        self.since = self.seen if self.policy.remembers_prompts else 0  # the first query that rings tell of
        self.text: list[tuple[int, Array]] = []
        self.group = 1
        self._new: dict[str, Array] = {}  # what the caller gave of the newest tokens

    # -- forwards ------------------------------------------------------------------------------------------------------

    def prompt(self, q: Array, k: Array, v: Array, fused: float, supplied: Supplied = NOTHING) -> Range:
        """Tokens of a prompt, up to their settle: q [L, G, D], k [L, D], v [L, Dv]. The outputs, [L, G, Dv].

        Args:
            fused: the precision of the attention that serves prompts.
        """
        first_new = self.seen
        self.text, self.group = list(enumerate(q, start=first_new)), q.shape[1]
        self._place(k, v, supplied)
        return self._queries(q, first_new, None, fused)

    def arrive(self, q: Array, k: Array, v: Array, sketch: Indices | None, supplied: Supplied = NOTHING) -> None:
        """One token after the prompt is placed: q [G, D], k [D], v [Dv].

        Args:
            sketch: the dims at which the interpreter looks.
        """
        newest = self.seen
        self.text, self.group = [], len(q)
        self._place(k[None], v[None], supplied)
        if self.policy.sketch is not None and self.machine.is_refresh(_Sketched(self.sketch), newest):  # type: ignore[arg-type]
            self.refresh(q, newest, sketch)

    def token(self, q: Array, step: Step, peers: Sequence[tuple[Shadow, Array]] = ()) -> Range:
        """The token that has arrived, up to its settle: q [G, D].

        Args:
            step: the interpreter's, with what it attended to and what it chose for the layers above.
            peers: the KV heads of the layer, and the token's queries of each.
        """
        newest = self.seen - 1
        attended, chosen = (
            None if mask is None else taken_over(self.position, step.position, mask) for mask in (step.selected, step.chosen)
        )
        if chosen is not None:
            self._check_selection(q, newest, chosen, peers)
        elif attended is not None and not self.numbers.takes_over:
            self._check_selection(q, newest, attended, peers)
        return self._queries(q[None], newest, attended, weight=self._weight(q, newest))

    def _weight(self, q: Array, newest: int) -> list[Range] | None:
        """How many times what the query sees counts, once or for each query head; None: once each."""
        if self.policy.select is None or self.policy.select.weight is None or not self.numbers.selects:
            return None
        scope = self._scope(self._visible(newest), newest)
        return self._per_choice(self.policy.select.weight, scope, q, bounds_of_slots)

    def _asked(self, newest: int, q: Array) -> tuple[Scope, Callable[[Expr, Scope], Range]]:
        """The head as one of its layer's that are asked together."""
        return self._scope(self._visible(newest), newest), lambda expr, at: self._per_query(expr, at, q, bounds)

    def refresh(self, q: Array, newest: int, dims: Indices | None) -> None:
        """Find the sketch at the query at `newest`: `dims`, if nothing else is possible."""
        assert self.policy.sketch is not None and dims is not None
        scope = self._scope(self._visible(newest), newest)
        size = self.key.shape[1]
        by = self._per_query(
            self.policy.sketch.by,
            scope,
            q,
            lambda expr, at: bounds(expr, at).map(lambda x: np.broadcast_to(x, (1, size))[0]),
        )
        may, must = in_top(by, self.numbers.sketch_dims, -np.arange(size))
        self.undecided |= bool((may != must).any())
        self.sketch = np.flatnonzero(must) if not self.undecided else dims

    def prune(self) -> None:
        """Tokens are about to leave: what folds over prunes come to."""
        scope = self.live_scope()
        self.columns |= {
            column.name: bounds_of_slots(column.body, scope) for column in self.policy.columns if column.rule == "prune"
        }

    def drop(self, gone: Indices) -> None:
        """Go on without these positions."""
        kept = ~np.isin(self.position, gone)
        self.key, self.value, self.position = self.key[kept], self.value[kept], self.position[kept]
        self.columns = {name: column[kept] for name, column in self.columns.items()}

    def _place(self, k: Array, v: Array, supplied: Supplied) -> None:
        self._new = {name: x[:, None] for name, x in filled(self.policy, supplied, len(k)).items()}
        old = len(self.position)
        self.key, self.value = np.concatenate([self.key, k]), np.concatenate([self.value, v])
        self.position = np.concatenate([self.position, self.seen + np.arange(len(k))])
        self.seen += len(k)
        new = np.arange(len(self.position)) >= old
        for column in self.policy.columns:
            begin = self._begin(column, new)
            self.columns[column.name] = joined([self.columns[column.name], begin]) if old else begin

    def _begin(self, column: Column, new: Mask) -> Range:
        count = int(new.sum())
        if column.rule == "token":
            return bounds_of_slots(column.body, self._scope(new, self.seen - 1))
        if column.rule != "ring":
            return exactly(np.full(count, FRESH[column.rule]))
        held = self.columns.get(column.name)
        places = held.lo.shape[1] if held is not None and held.lo.size else self.ring_size(column)
        return exactly(np.full((count, places), np.nan))

    def _queries(
        self,
        queries: Array,
        first_new: int,
        chosen: Mask | None,
        fused: float | None = None,
        weight: list[Range] | None = None,
    ) -> Range:
        """Attend and observe one query after the other: the outputs."""
        folded = [column for column in self.policy.columns if column.rule not in ("token", "fold", "prune")]
        folds = [column for column in self.policy.columns if column.rule == "fold"]
        given: dict[str, list[Range]] = {column.name: [] for column in folded}
        newest = first_new + np.arange(len(queries))
        seen, outs = np.stack([self._visible(t) for t in newest]), []
        for query, t, visible in zip(queries, newest, seen, strict=True):
            prob, logit, out = self._attend(query, int(t), visible, chosen, fused, weight)
            outs.append(out)
            scope = self._scope(visible, int(t), prob, logit)
            for column in folded:
                given[column.name].append(_spread(self._per_query(column.body, scope, query, bounds_of_slots), visible))
            self.columns |= {
                column.name: choose(
                    visible,
                    _spread(self._per_query(column.body, scope, query, bounds_of_slots), visible),
                    self.columns[column.name],
                )
                for column in folds
            }
        for column in folded:
            old = self.columns[column.name]
            self.columns[column.name] = self._folded(column, old, stack(given[column.name]), seen, newest)
        return stack(outs)

    def _attend(
        self,
        q: Array,
        newest: int,
        visible: Mask,
        chosen: Mask | None,
        fused: float | None,
        weight: list[Range] | None = None,
    ) -> tuple[Range, Range, Range]:
        """Probabilities and logits, [G, visible slots], and the output, [G, Dv]; `chosen`: [n], or [G, n] of each query head."""
        if chosen is not None and chosen.ndim == 2:
            call = self.machine.call
            own_weights = [None] * len(chosen) if weight is None else weight
            heads = [
                self._attend_as(call.of(g), q[g : g + 1], newest, visible, own, fused, own_weights[g])
                for g, own in enumerate(chosen)
            ]
            prob, logit, out = (joined(list(parts)) for parts in zip(*heads, strict=True))
            return prob, logit, out
        return self._attend_as(self.machine.call, q, newest, visible, chosen, fused, None if weight is None else weight[0])

    def _attend_as(
        self,
        call: Call,
        q: Array,
        newest: int,
        visible: Mask,
        chosen: Mask | None,
        fused: float | None,
        weight: Range | None = None,
    ) -> tuple[Range, Range, Range]:
        key = self.key
        compact = self.policy.positions == "compact"
        turned = compact and call.rope is not None
        infinite = np.isinf(q).any() | np.isinf(key[visible]).any(1)
        if turned:
            key, q = at_ranks(key, self.position, q, newest, call.rope)
        attended = np.ones(visible.sum(), dtype=bool) if chosen is None else chosen[visible]
        logit = logits(q, key[visible], call.scaling, call.softcap, turned=turned)
        if call.slopes is not None:
            behind = rank_distances(self.position, newest) if compact else newest - self.position
            logit = biased(logit, call.slopes, behind[visible])
        if turned:  # of infinite keys, turning the key or the query the other way makes other infinities, or NaN
            logit = choose(np.broadcast_to(infinite, logit.lo.shape), anything(logit.lo.shape), logit)
        weighed = logit
        if weight is not None:
            if (weight[attended].nan | (weight[attended].lo <= 0) | np.isinf(weight[attended].hi)).any():
                self.undecided = True  # whether it has a share at all; what weighs nothing is not tried at random
            weighed = add(logit, FUNCTIONS["log"](weight).map(lambda x: np.broadcast_to(x, logit.lo.shape)))
        some = probabilities(weighed[:, attended], call.sinks, fused)
        out = weighted(some, self.value[visible][attended])
        prob = joined([_spread(some[g], attended).map(lambda x: x[None]) for g in range(len(q))])
        return prob, logit, out

    def _folded(self, column: Column, old: Range, given: Range, seen: Mask, newest: Indices) -> Range:
        """A column after L queries that gave [L, n], of which those count that see the slot."""
        rules: dict[str, Callable[[], Range]] = {
            "sum": lambda: total(_after(old, choose(seen, given, exactly(0.0))), 0)[0],
            "squares": lambda: total(_after(old, choose(seen, square(given), exactly(0.0))), 0)[0],
            "max": lambda: fold("max", _after(old, choose(seen, given, exactly(-np.inf))), 0)[0],
            "min": lambda: fold("min", _after(old, choose(seen, given, exactly(np.inf))), 0)[0],
        }
        if column.rule in rules:
            return rules[column.rule]()
        for index, (t, visible) in enumerate(zip(newest, seen, strict=True)):
            old = self._next(column, old, given[index], visible, int(t))
        return old

    def _next(self, column: Column, old: Range, given: Range, visible: Mask, newest: int) -> Range:
        if column.rule == "last":
            return choose(visible, given, old)
        if column.rule == "ring":
            at = visible[:, None] & (np.arange(old.lo.shape[1]) == newest % self.ring_size(column))
            return choose(at, given.map(lambda x: x[:, None]), old)
        assert column.rule == "ema" and column.decay is not None
        decay = rounded([self._number(column.decay)])
        rest = widened(rounded([1 - self._number(column.decay)]), LIBRARY)
        later = widened(add(multiply(decay, old), multiply(rest, given)), LIBRARY)
        return choose(visible, choose(self.position == newest, given, later), old)

    # -- what expressions see --------------------------------------------------------------------------------------------

    def _visible(self, newest: int) -> Mask:
        window = self.machine.call.window
        age = newest - self.position
        return (age >= 0) & (age < (np.inf if window is None else window))

    def _observed(self, position: Indices, newest: int) -> Indices:
        """How many queries could see each slot, up to the newest that has been observed."""
        window = self.machine.call.window
        latest = np.full(len(position), newest) if window is None else np.minimum(newest, position + window - 1)
        return np.maximum(latest - position + 1, 0)

    def live_scope(self) -> Scope:
        """What a settle's expressions see."""
        return self._scope(np.ones(len(self.position), dtype=bool), self.seen - 1)

    def _scope(self, chosen: Mask, newest: int, prob: Range | None = None, logit: Range | None = None) -> Scope:
        position = self.position[chosen]
        inputs = {name: rounded(value) for name, value in self.numbers.inputs.items()}
        per_slot = {"position": position, "age": newest - position, "observed": self._observed(position, newest)}
        inputs |= {name: exactly(value).map(lambda x: x[:, None]) for name, value in per_slot.items()}
        inputs |= {"k": exactly(self.key[chosen]), "v": exactly(self.value[chosen])}
        inputs["live"] = exactly([[np.count_nonzero(self.position <= newest)]])
        inputs["seen"], inputs["query_position"] = exactly([[newest + 1]]), exactly([[newest]])
        inputs["scaling"] = rounded([[self.machine.call.scaling]])
        for name, value in (("attn", prob), ("logit", logit)):
            if value is not None:
                inputs[name] = over_group(value, self.policy.group).map(lambda x: x[:, None])
        machine = self.machine
        return Scope(
            slots=len(position),
            dims=self.key.shape[1],
            inputs=inputs,
            numbers=self._exact(live=inputs["live"].lo, seen=inputs["seen"].lo),
            recall=lambda leaf: self._recall(leaf, chosen, newest),
            random=lambda: uniform(machine.seed, self.numbers.layer, machine.head_index, position, newest)[:, None],
            rope=machine.call.rope,
            text=self.text,
            group=self.group,
            how=self.policy.group,
        )

    def _exact(self, **inputs: Array) -> ExactScope:
        """Numbers are computed in float64 everywhere."""
        known = {**self.numbers.inputs, **inputs}
        return ExactScope(
            0,
            0,
            known,
            self.numbers.params,
            self.machine.scopes.constants,
            self._new,
            page=self.numbers.page,
            page_after=self.numbers.page_after,
            sketch=self.sketch,
        )

    def _number(self, expr: Expr) -> float:
        return evaluate_number(expr, self._exact())

    def _recall(self, leaf: Expr, chosen: Mask, newest: int) -> Range:
        assert isinstance(leaf, ColumnRef), leaf
        if leaf.op is not None:
            return self._over_ring(leaf, leaf.op, chosen, newest)
        return self.columns[leaf.name][chosen].map(lambda x: x[:, None])

    def ring_size(self, column: Column) -> int:
        """How many queries a ring holds."""
        assert column.size is not None
        return int(at_least_one(self._number(column.size)))

    def ring_places(self, column: Column, newest: int | None = None) -> Mask:
        """Which places of a ring hold what a query that saw the slot gave, [n, N]: `kvdsl.runtime.state.columns` in NumPy."""
        size, newest = self.ring_size(column), self.seen - 1 if newest is None else newest
        writer = newest - (newest - np.arange(size)) % size
        position, window = self.position[:, None], self.machine.call.window
        return (writer >= position) & (writer >= self.since) & (writer < position + (np.inf if window is None else window))

    def _over_ring(self, leaf: ColumnRef, op: str, chosen: Mask, newest: int) -> Range:
        column = next(column for column in self.policy.columns if column.name == leaf.name)
        valid, held = self.ring_places(column, newest)[chosen], self.columns[leaf.name][chosen]
        nothing = exactly(REDUCTIONS[op].of_nothing).map(lambda x: x.reshape(1))
        rows = [held[slot, : valid.shape[1]][valid[slot]] for slot in range(len(valid))]
        if not rows:
            return exactly(np.zeros((0, 1)))
        reduced = (
            partial(fold, axis=0) if leaf.argument is None else partial(with_argument, argument=self._number(leaf.argument))
        )
        return joined([reduced(op, row) if row.lo.size else nothing for row in rows]).map(lambda x: x[:, None])

    def _per_query(self, body: Expr, scope: Scope, q: Array, value: Callable[[Expr, Scope], Range]) -> Range:
        """What belongs to one query: per query head where it reads q, then reduced over the group."""
        if not _reads_q(body):
            return value(body, scope)
        return over_group(stack(self._per_query_head(body, scope, q, value)), self.policy.group)

    def _per_query_head(self, body: Expr, scope: Scope, q: Array, value: Callable[[Expr, Scope], Range]) -> list[Range]:
        first = self.machine.head_index * len(q)
        own = [{"q": exactly(head[None]), "query_head": exactly([[first + index]])} for index, head in enumerate(q)]
        return [value(body, replace(scope, inputs={**scope.inputs, **head}, query_head=n)) for n, head in enumerate(own)]

    def _per_choice(self, body: Expr, scope: Scope, q: Array, value: Callable[[Expr, Scope], Range]) -> list[Range]:
        """What choices go by: that of the group, or of each query head."""
        if self.policy.group == "each":
            return self._per_query_head(body, scope, q, value)
        return [self._per_query(body, scope, q, value)]

    # -- what a query attends to -----------------------------------------------------------------------------------------

    def _check_selection(self, q: Array, newest: int, chosen: Mask, peers: Sequence[tuple[Shadow, Array]]) -> None:
        """Whether another selection than the chosen slots, [n] or [G, n], is possible."""
        assert self.policy.select is not None
        visible = self._visible(newest)
        measured = self.policy.select.measured if self.numbers.selects else None
        if np.isinf(self.numbers.select) and measured is None:
            if (chosen != visible).any():
                raise OutOfBounds("the interpreter's selection")
            return
        position = self.position[visible]
        scope = self.live_scope()
        places = [keep for keep in self.policy.keeps if keep.row.place]
        pinned = np.any([by_place(keep, self.position, scope) for keep in places] or [visible & False], axis=0)[visible]
        heads = tuple(peer._asked(newest, own) for peer, own in peers)
        asked_by = replace(self._scope(visible, newest), heads=heads)
        by = self._per_choice(self.policy.select.by, asked_by, q, bounds_of_slots)
        asked = [(self.numbers.select, self.numbers.select)] * len(by)
        if measured is not None:
            asked = self._counts(measured, self._scope(visible, newest), q)
        for own, count, mask in zip(by, asked, chosen.reshape(len(by), -1), strict=True):
            self._check_choice(own, *count, mask[visible], position, pinned)

    def _check_choice(self, by: Range, asked: float, most: float, chosen: Mask, position: Indices, pinned: Mask) -> None:
        """The same of one choice, among the slots that the query sees; of `asked` to `most` tokens."""
        if asked != most:
            self.undecided = True
            return
        unit_of = page_of(position, self.numbers.page, self.numbers.page_after)
        units = np.unique(unit_of)
        certain = np.array([pinned[unit_of == unit].any() for unit in units])
        count = at_least_one(asked / self.numbers.page) - certain.sum()
        best = stack([highest(by[unit_of == unit]) for unit in units])
        others = ~certain
        could, does = in_top(best[others], count, units[others])
        if (could != does).any():
            self.undecided = True
            return
        selected = np.concatenate([units[certain], units[others][does]])
        if (np.isin(unit_of, selected) != chosen).any():
            raise OutOfBounds("the interpreter's selection")

    def _counts(self, measured: Expr, scope: Scope, q: Array) -> list[tuple[float, float]]:
        """To how many tokens a query attends: at least, and at most; once for each choice."""
        from .counts import value

        counts = self._per_choice(measured, scope, q, lambda expr, at: value(expr, [at], at).map(lambda x: x.reshape(1)))
        return [
            (1.0, np.inf) if found.nan.any() else (at_least_one(float(found.lo[0])), at_least_one(float(found.hi[0])))
            for found in counts
        ]


# -- small things ------------------------------------------------------------------------------------------------------------


def by_place(keep: Keep, position: Indices, scope: Scope) -> Mask:
    """Whom `keep first` or `keep last` protects."""
    assert keep.count is not None
    return PROTECTS[keep.scope](position, None, evaluate_number(keep.count, scope.numbers))


class _Sketched:
    """As much of a head as `is_refresh` asks for."""

    def __init__(self, sketch: Indices | None) -> None:
        self.sketch = sketch


def _reads_q(expr: Expr) -> bool:
    if isinstance(expr, Reduce) and expr.axis is Axis.QUERY:
        return False
    own = (isinstance(expr, Input) and expr.name in OF_QUERY_HEADS) or (isinstance(expr, TensorRef) and expr.group)
    return own or any(_reads_q(child) for child in children(expr))


def _spread(x: Range, chosen: Mask) -> Range:
    """Over all slots what is given for the chosen ones, and 0 elsewhere."""
    made = exactly(np.zeros(len(chosen)))
    for whole, part in zip((made.lo, made.hi, made.nan), (x.lo, x.hi, x.nan), strict=True):
        whole[chosen] = part
    return made


def _after(old: Range, given: Range) -> Range:
    """What was there, [n], before what L queries give, [L, n]."""
    return joined([old.map(lambda x: x[None]), given])
