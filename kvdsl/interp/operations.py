"""The operations of one KV head: place, attend, observe, select, and evaluate what a settle needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from kvdsl.interp.attention import Attention, Call, at_ranks, attend, rank_distances, selected, sketch_dims
from kvdsl.interp.evaluate import (
    Array,
    Mask,
    Peer,
    Scope,
    at_least_one,
    evaluate,
    evaluate_number,
    evaluate_slots,
    next_of,
    per_slot,
)
from kvdsl.interp.head import Head
from kvdsl.interp.inputs import NOTHING, Supplied, Tensors, filled
from kvdsl.interp.memory import Columns, History
from kvdsl.interp.numbers import Numbers
from kvdsl.interp.rounding import placed
from kvdsl.interp.scopes import Scopes, with_inputs
from kvdsl.interp.settle import protected
from kvdsl.interp.step import Attended
from kvdsl.ir.nodes import Expr, Policy

Peers: TypeAlias = "Sequence[tuple[Operations, Head, Array]]"
"""KV heads of a layer, each with its operations and its queries, [G, D]."""


@dataclass(frozen=True)
class Operations:
    """One policy's operations on KV head `head_index` of layer `numbers.layer`.

    A policy rewritten by `kvdsl.passes.columns.add_columns` runs on state columns, any other on its full history.
    """

    policy: Policy
    numbers: Numbers
    call: Call = field(default_factory=Call)
    head_index: int = 0
    seed: int = 0
    tensors: Tensors = field(default_factory=dict)
    kv_dtype: str = "model"

    @cached_property
    def scopes(self) -> Scopes:
        """What expressions see."""
        return Scopes(self.policy, self.numbers, self.call, self.head_index, self.seed, self.tensors)

    # -- heads -----------------------------------------------------------------------------------------------------

    def empty(self, key_dim: int = 0, value_dim: int = 0) -> Head:
        """Return a head with an empty cache."""
        memory = Columns(self.policy.columns) if self.policy.columns else History(self.policy)
        return Head(np.zeros((0, key_dim)), np.zeros((0, value_dim)), np.zeros(0, dtype=np.int64), memory)

    def resume(
        self,
        key: ArrayLike,
        value: ArrayLike,
        position: ArrayLike,
        columns: Mapping[str, ArrayLike],
        seen: int,
        sketch: ArrayLike | None = None,
    ) -> Head:
        """Return a head with the live slots of a backend.

        Args:
            key, value, position: [n, D], [n, Dv], [n]; free slots have a negative position.
            columns: [n] by name; a ring is [n, N] or wider, or missing if it was dropped with its prompt.
            seen: the position of the row's next token.
            sketch: the dims of the newest sketch, in any order.
        """
        place = np.asarray(position, dtype=np.int64)
        live = place >= 0
        values = {name: floats(x)[live] for name, x in columns.items()}
        for column in self.policy.columns if self.policy.forgets else ():
            if column.size is not None and column.name not in values:
                values[column.name] = np.full((int(live.sum()), int(at_least_one(self.scopes.number(column.size)))), np.nan)
        dims = None if sketch is None else np.sort(np.asarray(sketch, dtype=np.int64))
        memory = Columns(self.policy.columns, values)
        return Head(floats(key)[live], floats(value)[live], place[live], memory, seen, dims, prompt_from=seen)

    # -- a token ---------------------------------------------------------------------------------------------------

    def place(self, head: Head, key: Array, value: Array, supplied: Supplied = NOTHING) -> None:
        """Append L new tokens, [L, D] and [L, Dv], with the caller's values.

        Keys and values are rounded as `kv_dtype` says, and the tokens' own queries already see the rounded ones.
        """
        old = head.live
        key, value = placed(key, value, self.kv_dtype)
        head.append(key, value, filled(self.policy, supplied, len(key)))
        new = np.arange(old, head.live)
        scope = self.scopes.of(head, new, head.seen - 1)
        head.memory.place(len(new), lambda body: evaluate_slots(body, scope), self.scopes.number)

    def prompt(self, head: Head, q: Array, k: Array, v: Array, supplied: Supplied = NOTHING) -> Attended:
        """Run several prompt tokens up to their settle: q [L, G, D], k [L, D], v [L, Dv]."""
        first, outs = head.seen, []
        self.place(head, k, v, supplied)
        head.group = q.shape[1]
        head.text = list(enumerate(q, start=first)) if self.policy.reads_text else []
        for newest, query in enumerate(q, start=first):
            found = self.attend(head, newest, query)
            attn, logit = self.scopes.over_group(found.probs), self.scopes.over_group(found.logits)
            self.observe(head, newest, attn, logit, query)
            outs.append(found.out)
        self.refresh(head, newest, query)
        return Attended(np.stack(outs), attn, logit)

    def arrive(self, head: Head, q: Array, k: Array, v: Array, supplied: Supplied = NOTHING) -> None:
        """Place one decode token, and refresh the sketch if it is due: q [G, D], k [D], v [Dv]."""
        newest = head.seen
        self.place(head, k[None], v[None], supplied)
        head.group, head.text = len(q), []
        if self.is_refresh(head, newest):
            self.refresh(head, newest, q)

    def token(self, head: Head, q: Array, peers: Peers = (), taken: Mask | None = None) -> Attended:
        """Attend and observe for the token that has arrived, up to the settle: q [G, D].

        Args:
            peers: the KV heads of the layer if they select together, each with its operations and the token's queries.
            taken: the selection of a layer below, [n], if this layer uses it.
        """
        newest = head.seen - 1
        chosen = self.select(head, newest, q, peers) if taken is None else taken
        attended = None if self.numbers.chooses else chosen
        found = self.attend(head, newest, q, attended, self.weight(head, newest, q))
        attn, logit = self.scopes.over_group(found.probs), self.scopes.over_group(found.logits)
        self.observe(head, newest, attn, logit, q)
        return Attended(found.out, attn, logit, attended, chosen if self.numbers.chooses else None)

    def observe_given(
        self,
        head: Head,
        rows: Sequence[Mapping[int, float]],
        k: Array | None,
        v: Array | None,
        supplied: Supplied = NOTHING,
    ) -> Attended:
        """Run tokens with given attention up to their settle: each row by the slots' positions; k [L, D], v [L, Dv]."""
        first = head.seen
        key = np.zeros((len(rows), head.key.shape[1])) if k is None else k
        value = np.zeros((len(rows), head.value.shape[1])) if v is None else v
        self.place(head, key, value, supplied)
        for newest, row in enumerate(rows, start=first):
            attn = np.array([row[position] for position in head.position])
            self.observe(head, newest, attn, np.full_like(attn, np.nan), None)
        return Attended(np.zeros(0), attn, np.zeros(0))

    def attend(
        self, head: Head, newest: int, q: Array, chosen: Mask | None = None, weight: Array | None = None
    ) -> Attention:
        """Return the attention of the query at `newest`, q [G, D], over the slots that it sees, or the chosen and weighted ones."""
        if self.policy.positions == "original":
            return attend(head.key, head.value, head.position, q, newest, self.call, chosen, weight=weight)
        key, q = at_ranks(head.key, head.position, q, newest, self.call.rope)
        distance = rank_distances(head.position, newest)
        return attend(key, head.value, head.position, q, newest, self.call, chosen, distance, weight)

    def observe(self, head: Head, newest: int, attn: Array, logit: Array, q: Array | None) -> None:
        """Record what the query at `newest` gives: attn and logit [n], reduced over the group; q [G, D]."""
        seen = self.scopes.seen(head, newest)
        scope = self.scopes.of(head, seen, newest)
        scope = with_inputs(scope, attn=per_slot(attn[seen]), logit=per_slot(logit[seen]))
        moment = self.scopes.moment(head, seen, newest)
        head.memory.observe(moment, lambda body: self.scopes.per_query(body, scope, q, _observed))

    # -- what a decode query attends to ----------------------------------------------------------------------------

    def refresh(self, head: Head, newest: int, q: Array) -> None:
        """Compute the sketch's dims again, at the query at `newest`, q [G, D]."""
        if self.policy.sketch is None:
            return
        head.sketch = sketch_dims(self.sketches_by(head, newest, q), self.numbers.sketch_dims)

    def sketches_by(self, head: Head, newest: int, q: Array) -> Array:
        """Return what the sketch ranks dims by, [D], at the query at `newest`."""
        assert self.policy.sketch is not None
        scope = self.scopes.of(head, self.scopes.seen(head, newest), newest)
        return self.scopes.per_query(
            self.policy.sketch.by, scope, q, lambda expr, at: np.broadcast_to(evaluate(expr, at), (1, at.dims))[0]
        )

    def is_refresh(self, head: Head, newest: int) -> bool:
        """Return whether the decode query at `newest` refreshes the sketch before it selects."""
        return head.sketch is None or (newest - (self.numbers.prompt_end - 1)) % self.numbers.sketch_every == 0

    def select(self, head: Head, newest: int, q: Array, peers: Peers = ()) -> Mask | None:
        """Return the slots, [n], that the decode query at `newest` attends to, or [G, n] under `group each`; None without a `select`.

        The slots of `keep first` and `keep last` are always selected; other keeps protect from eviction only.
        """
        if self.policy.select is None:
            return None
        seen = self.scopes.seen(head, newest)
        places = (keep for keep in self.policy.keeps if keep.row.place)
        shield = protected(places, self.scopes.of(head, np.arange(head.live), newest), head.position)
        by = self.selects_by(head, newest, q, peers)
        count = self.selects_count(head, newest, q)
        masks = []
        for own, most in zip(by, count, strict=True):
            mask = np.zeros(head.live, dtype=bool)
            mask[seen] = selected(
                own[seen], head.position[seen], shield[seen], most, self.numbers.page, self.numbers.page_after
            )
            masks.append(mask)
        return np.stack(masks) if self.policy.group == "each" else masks[0]

    def selects_count(self, head: Head, newest: int, q: Array) -> list[float]:
        """Return how many tokens the decode query at `newest` attends to, once for each row of `selects_by`.

        A data-dependent count is the query's own.
        """
        assert self.policy.select is not None
        if self.policy.select.measured is None or not self.numbers.selects:
            return [self.numbers.select] * self.scopes.choices(q)
        scope = self.scopes.of(head, self.scopes.seen(head, newest), newest)
        found = self.scopes.per_choice(
            self.policy.select.measured, scope, q, lambda expr, at: np.array([evaluate_number(expr, at)])
        )
        return [at_least_one(float(count)) for count in found[:, 0]]

    def selects_by(self, head: Head, newest: int, q: Array, peers: Peers = ()) -> Array:
        """Return what the decode query at `newest` ranks slots by, [1, n], or [G, n] under `group each`; NaN for slots it does not see."""
        assert self.policy.select is not None
        by, seen = np.full((self.scopes.choices(q), head.live), np.nan), self.scopes.seen(head, newest)
        heads = tuple(machine.peer(other, newest, own) for machine, other, own in peers)
        scope = replace(self.scopes.of(head, seen, newest), heads=heads)
        by[:, seen] = self.scopes.per_choice(self.policy.select.by, scope, q, evaluate_slots)
        return by

    def weight(self, head: Head, newest: int, q: Array) -> Array | None:
        """Return how many times each slot counts for the decode query at `newest`, shaped like `selects_by`; None without weights."""
        if self.policy.select is None or self.policy.select.weight is None or not self.numbers.selects:
            return None
        found, seen = np.full((self.scopes.choices(q), head.live), np.nan), self.scopes.seen(head, newest)
        found[:, seen] = self.scopes.per_choice(
            self.policy.select.weight, self.scopes.of(head, seen, newest), q, evaluate_slots
        )
        return found

    def peer(self, head: Head, newest: int, q: Array) -> Peer:
        """Return the head for expressions over the layer's heads, at the query at `newest`, q [G, D]."""
        scope = self.scopes.of(head, self.scopes.seen(head, newest), newest)
        return Peer(scope, lambda expr, at: self.scopes.per_query(expr, at, q, evaluate))

    def prune(self, head: Head, scope: Scope) -> None:
        """Update folds over prunes, in a settle that evicts."""
        head.memory.prune(lambda expr: evaluate_slots(expr, scope))


def floats(x: ArrayLike) -> Array:
    """Convert to float64."""
    return np.asarray(x, dtype=np.float64)


def _observed(body: Expr, scope: Scope) -> Array:
    """Return a query's value of a body, [n]; for a fold its next value."""
    if body.kind != "fold":
        return evaluate_slots(body, scope)
    with np.errstate(all="ignore"):
        found: Array = np.broadcast_to(next_of(body, scope), (scope.slots, 1))[:, 0].copy()
    return found
