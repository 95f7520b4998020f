"""The interpreter: place, attend, observe, settle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from kvdsl.interp.attention import Call, attend, is_visible, over_group
from kvdsl.interp.evaluate import Array, Indices, Mask, Scope, evaluate_slots, number, per_slot
from kvdsl.interp.head import Head
from kvdsl.interp.memory import Columns, History
from kvdsl.interp.numbers import Numbers
from kvdsl.interp.randomness import uniform
from kvdsl.interp.settle import overflow, protected, victims
from kvdsl.ir.nodes import Axis, Expr, Input, Policy, Reduce
from kvdsl.ir.visitors import children


@dataclass(frozen=True)
class Step:
    """What one forward did. All but `out` is over the n slots live before the settle, the new ones last.

    Attributes:
        position: [n].
        score: [n], or None for a policy without one.
        by: per keep line what it ranks or chooses by, [n], or None.
        protected: [n] bool.
        victims: indices of the slots that left, the first to leave first.
        columns: the state columns, [n] each; none where the head keeps its history.
        out: [G, Dv] of a decode step, [L, G, Dv] of a prefill.
        attn, logit: [n] of the last query, reduced over the group; 0 and -inf where it does not see the slot.
    """

    position: Indices
    score: Array | None
    by: tuple[Array | None, ...]
    protected: Mask
    victims: Indices
    columns: dict[str, Array]
    out: Array = field(default_factory=lambda: np.zeros(0))
    attn: Array = field(default_factory=lambda: np.zeros(0))
    logit: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def evicted(self) -> Indices:
        """The positions of the tokens that left, the first to leave first."""
        return self.position[self.victims]

    @property
    def kept(self) -> Indices:
        """The positions of the tokens that stayed, ascending."""
        return np.setdiff1d(self.position, self.evicted)


@dataclass(frozen=True)
class Interpreter:
    """Runs one policy on KV head `head_index` of layer `numbers.layer`.

    A policy that `kvdsl.passes.columns.add_columns` has rewritten is run on state columns, any other on its
    full history.
    """

    policy: Policy
    numbers: Numbers
    call: Call = field(default_factory=Call)
    head_index: int = 0
    seed: int = 0

    def empty(self, key_dim: int = 0, value_dim: int = 0) -> Head:
        """A head that has seen nothing."""
        memory = Columns(self.policy.columns) if self.policy.columns else History(self.policy)
        return Head(np.zeros((0, key_dim)), np.zeros((0, value_dim)), np.zeros(0, dtype=np.int64), memory)

    def resume(
        self,
        key: ArrayLike,
        value: ArrayLike,
        position: ArrayLike,
        columns: Mapping[str, ArrayLike],
        seen: int,
    ) -> Head:
        """A head that goes on from a backend's slots; the free ones are left out.

        Args:
            key, value, position: [n, D], [n, Dv], [n]; the position of a free slot is negative.
            columns: [n] by name.
            seen: the position of the row's next token.
        """
        place = np.asarray(position, dtype=np.int64)
        live = place >= 0
        values = {name: np.asarray(x, dtype=np.float64)[live] for name, x in columns.items()}
        return Head(_floats(key)[live], _floats(value)[live], place[live], Columns(self.policy.columns, values), seen)

    def decode(self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike) -> Step:
        """One token: q [G, D], k [D], v [Dv]."""
        step = self.prefill(head, _floats(q)[None], _floats(k)[None], _floats(v)[None])
        return replace(step, out=step.out[0])

    def prefill(self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike) -> Step:
        """Several tokens, q [L, G, D], k [L, D], v [L, Dv]; each sees what was there and those before it.

        One settle, after the last.
        """
        if self.policy.positions != "original":
            raise NotImplementedError("attention at compact positions")
        first = head.seen
        self.place(head, _floats(k), _floats(v))
        outs = []
        for newest, query in enumerate(_floats(q), start=first):
            found = attend(head.key, head.value, head.position, query, newest, self.call)
            attn, logit = self._over_group(found.probs), self._over_group(found.logits)
            self.observe(head, newest, attn, logit, query)
            outs.append(found.out)
        return replace(self.settle(head), out=np.stack(outs), attn=attn, logit=logit)

    def observe_row(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """One token whose attention is given: attn [n + 1] over the slots and, last, the token itself."""
        key, value = (None if x is None else _floats(x)[None] for x in (k, v))
        return self.observe_rows(head, _floats(attn)[None], key, value)

    def observe_rows(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """L tokens whose attention is given, attn [L, n + L], of which each row counts up to its own token.

        Keys and values, [L, D] and [L, Dv], are zero unless given. Logits are NaN.
        """
        rows, first = _floats(attn), head.seen
        key = np.zeros((len(rows), head.key.shape[1])) if k is None else _floats(k)
        value = np.zeros((len(rows), head.value.shape[1])) if v is None else _floats(v)
        self.place(head, key, value)
        for newest, row in enumerate(rows, start=first):
            self.observe(head, newest, row, np.full_like(row, np.nan), None)
        return replace(self.settle(head), attn=rows[-1])

    def place(self, head: Head, key: Array, value: Array) -> None:
        """Put L new tokens, [L, D] and [L, Dv], into slots of their own."""
        old = head.live
        head.append(key, value)
        new = np.arange(old, head.live)
        head.memory.place(len(new), lambda body: evaluate_slots(body, self._scope(head, new, head.seen - 1)))

    def observe(self, head: Head, newest: int, attn: Array, logit: Array, q: Array | None) -> None:
        """Remember what the query at `newest` gives: attn and logit [n], reduced over the group; q [G, D]."""
        seen = np.flatnonzero(is_visible(head.position, newest, self.call.window))
        scope = self._scope(head, seen, newest)
        scope = _with_inputs(scope, attn=per_slot(attn[seen]), logit=per_slot(logit[seen]))
        head.memory.observe(seen, lambda body: self._per_query(body, scope, q))

    def settle(self, head: Head) -> Step:
        """Evaluate score and keeps on the live slots, and evict if the trigger holds."""
        everything = np.arange(head.live)
        scope = self._scope(head, everything, head.seen - 1)
        score = None if self.policy.score is None else evaluate_slots(self.policy.score, scope)
        shielded = protected(self.policy.keeps, scope, head.position)
        gone = everything[:0]
        if score is not None:
            gone = victims(score, shielded, head.position, overflow(head.live, self.numbers))
        by = tuple(None if keep.by is None else evaluate_slots(keep.by, scope) for keep in self.policy.keeps)
        step = Step(head.position, score, by, shielded, gone, head.columns)
        head.drop(gone)
        return step

    def _scope(self, head: Head, chosen: Indices, newest: int) -> Scope:
        """What expressions see of the chosen slots when `newest` is the newest token."""
        position = head.position[chosen]
        age = newest - position
        observed = age + 1 if self.call.window is None else np.minimum(age + 1, self.call.window)
        inputs = self.numbers.inputs() | {"k": head.key[chosen], "v": head.value[chosen]}
        inputs |= {"position": per_slot(position), "age": per_slot(age), "observed": per_slot(observed)}
        inputs["live"] = number(float(np.count_nonzero(head.position <= newest)))
        return Scope(
            slots=len(chosen),
            dims=head.key.shape[1],
            inputs=inputs,
            params=self.numbers.params,
            recall=lambda leaf: head.memory.recall(leaf, chosen),
            random=lambda: per_slot(uniform(self.seed, self.numbers.layer, self.head_index, position, newest)),
        )

    def _per_query(self, body: Expr, scope: Scope, q: Array | None) -> Array:
        """The body of a reduction over queries for one query, [n].

        What reads q is evaluated per query head, and its result reduced over the group.
        """
        if not _reads_q(body):
            return evaluate_slots(body, scope)
        assert q is not None, "the policy reads q, which was not given"
        return self._over_group(np.stack([evaluate_slots(body, _with_inputs(scope, q=vector[None])) for vector in q]))

    def _over_group(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            return over_group(x, self.policy.group)


def _reads_q(expr: Expr) -> bool:
    """Whether the value differs between query heads; that of a reduction over queries inside it does not."""
    if isinstance(expr, Reduce) and expr.axis is Axis.QUERY:
        return False
    return expr == Input(name="q") or any(_reads_q(child) for child in children(expr))


def _with_inputs(scope: Scope, **more: Array) -> Scope:
    return replace(scope, inputs={**scope.inputs, **more})


def _floats(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)
