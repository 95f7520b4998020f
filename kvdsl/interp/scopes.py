"""What a policy's expressions see on one KV head, and the values of one query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvdsl.interp.attention import Call, is_visible, over_group
from kvdsl.interp.evaluate import Array, Indices, Scope, number, per_slot
from kvdsl.interp.head import Head
from kvdsl.interp.inputs import Tensors, rows_of
from kvdsl.interp.memory import Moment
from kvdsl.interp.numbers import Numbers
from kvdsl.ir.nodes import Axis, Expr, Fold, Input, Policy, Reduce, TensorRef
from kvdsl.ir.ops import OF_QUERY_HEADS
from kvdsl.ir.visitors import children


@dataclass(frozen=True)
class Scopes:
    """The scopes of one policy's expressions on KV head `head_index` of layer `numbers.layer`."""

    policy: Policy
    numbers: Numbers
    call: Call
    head_index: int
    seed: int
    tensors: Tensors

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The tensors' values for this head, [1, dims or 1] each."""
        return rows_of(self.policy, self.tensors, self.numbers.layer, self.head_index)

    def live(self, head: Head) -> Scope:
        """Return what a settle's expressions see: the live slots, after the newest token."""
        return self.of(head, np.arange(head.live), head.seen - 1)

    def of(self, head: Head, chosen: Indices, newest: int) -> Scope:
        """Return what expressions see of the chosen slots when `newest` is the newest token."""
        position = head.position[chosen]
        moment = self.moment(head, chosen, newest)
        inputs = {**self.numbers.inputs, "k": head.key[chosen], "v": head.value[chosen]}
        inputs |= {"position": per_slot(position), "age": per_slot(newest - position), "observed": per_slot(moment.observed)}
        inputs["live"] = number(float(np.count_nonzero(head.position <= newest)))
        inputs["seen"], inputs["query_position"] = number(float(newest + 1)), number(float(newest))
        inputs["scaling"] = number(self.call.scaling)
        return Scope(
            slots=len(chosen),
            dims=head.key.shape[1],
            inputs=inputs,
            params=self.numbers.params,
            tensors=self.constants,
            given={name: per_slot(values[chosen]) for name, values in head.given.items()},
            recall=lambda leaf: head.memory.recall(leaf, moment),
            random=lambda: per_slot(uniform(self.seed, self.numbers.layer, self.head_index, position, newest)),
            page=self.numbers.page,
            page_after=self.numbers.page_after,
            sketch=head.sketch,
            rope=self.call.rope,
            text=head.text,
            group=head.group,
            over_group=self.over_group,
        )

    def over_group(self, x: Array) -> Array:
        """Reduce over the group's query heads, [G, ...] to [...]."""
        with np.errstate(all="ignore"):
            return over_group(x, self.policy.group)

    def seen(self, head: Head, newest: int) -> Indices:
        """Return the slots that the query at `newest` sees."""
        return np.flatnonzero(is_visible(head.position, newest, self.call.window))

    def moment(self, head: Head, chosen: Indices, observed: int) -> Moment:
        """Return the chosen slots and what was observed of them, up to the query at `observed`."""
        since = head.prompt_from if self.policy.remembers_prompts else 0
        return Moment(chosen, head.position[chosen], observed, self.call.window, self.number, since)

    def number(self, expr: Expr) -> float:
        """Return the value of an expression that is one number, fixed once the prompt is known."""
        return self.numbers.value(expr)

    def per_query(self, body: Expr, scope: Scope, q: Array | None, value: Callable[[Expr, Scope], Array]) -> Array:
        """Return a value of one query. If it reads q, it is evaluated per query head and reduced over the group."""
        if not _reads_q(body.body if body.kind == "fold" else body):
            return value(body, scope)
        assert q is not None, "the policy reads q, which was not given"
        return self.over_group(self._per_query_head(body, scope, q, value))

    def per_choice(self, body: Expr, scope: Scope, q: Array, value: Callable[[Expr, Scope], Array]) -> Array:
        """Return the value of a selection's expression, [1, ...], or per query head under `group each`, [G, ...]."""
        if self.policy.group == "each":
            return self._per_query_head(body, scope, q, value)
        return self.per_query(body, scope, q, value)[None]

    def choices(self, q: Array) -> int:
        """Return the number of selections of a query of the group, [G, D]."""
        return len(q) if self.policy.group == "each" else 1

    def _per_query_head(self, body: Expr, scope: Scope, q: Array, value: Callable[[Expr, Scope], Array]) -> Array:
        """Return the value for each query head, [G, ...]."""
        first = self.head_index * len(q)
        heads = [
            replace(with_inputs(scope, q=vector[None], query_head=number(first + index)), query_head=index)
            for index, vector in enumerate(q)
        ]
        return np.stack([value(body, head) for head in heads])


def _reads_q(expr: Expr) -> bool:
    """Return whether a value differs between query heads. Folds and reductions over queries or KV heads inside it do not."""
    match expr:
        case Fold() | Reduce(axis=Axis.QUERY | Axis.HEAD):
            return False
        case Input(name=name) if name in OF_QUERY_HEADS:
            return True
        case TensorRef(group=True):
            return True
    return any(map(_reads_q, children(expr)))


def with_inputs(scope: Scope, **more: Array) -> Scope:
    """Return a scope with further inputs."""
    return replace(scope, inputs={**scope.inputs, **more})


_WORD = 0xFFFFFFFF


def uniform(seed: int, layer: int, head: int, position: Indices, step: int) -> Array:
    """Return one number in [0, 1) per slot, [n], with 24 random bits; `step` is the newest position."""
    return np.array([_one(seed, (layer, head, int(slot), step)) for slot in position], dtype=np.float64)


def _one(seed: int, words: tuple[int, ...]) -> float:
    state = seed & _WORD
    for word in words:
        state = _mix(state ^ (word * 0x9E3779B9 & _WORD))
    return (state >> 8) * 2.0**-24


def _mix(x: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & _WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _WORD
    return x ^ x >> 16
