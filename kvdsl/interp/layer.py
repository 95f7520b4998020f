"""Heads of one or several layers that decide together: forwards and evictions.

Heads that decide alone behave as in `kvdsl.interp.Interpreter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from kvdsl.interp.attention import Call, taken_over
from kvdsl.interp.evaluate import Array, Indices, Mask, Peer, Scope, evaluate, evaluate_group, evaluate_number
from kvdsl.interp.head import Head
from kvdsl.interp.inputs import NO_TENSORS, NOTHING, Supplied, Tensors, of_head
from kvdsl.interp.numbers import Numbers
from kvdsl.interp.operations import Operations, floats
from kvdsl.interp.settle import measured, overflow, room, shares, standing, victims, victims_across, worths
from kvdsl.interp.step import Attended, Step
from kvdsl.ir.nodes import Policy

Numbered = Numbers | Sequence[Numbers]
"""A layer's numbers, the same for all its KV heads or one for each."""

Evictions = Callable[[int, Numbers], int]
"""Returns how many of the live slots to evict."""


class Layer:
    """Runs one policy on heads that may have to agree. The heads are the leading axis of arrays, layer by layer.

    Args:
        numbers: the layer's numbers, or those of several layers, which then run every step together.
        call: options of attention, for all heads or for each, layer by layer.
        heads: KV heads of a layer.
        head_offset: the first head's index.
        tensors: the contents of the policy's files.
        kv_dtype: the storage type of keys and values, see `kvdsl.interp.rounding`.

    Attributes:
        machines: one per head, layer by layer.
    """

    def __init__(
        self,
        policy: Policy,
        numbers: Numbers | Sequence[Numbered],
        call: Call | Sequence[Call] | None = None,
        heads: int = 1,
        head_offset: int = 0,
        seed: int = 0,
        tensors: Tensors = NO_TENSORS,
        kv_dtype: str = "model",
    ) -> None:
        layers = [numbers] if isinstance(numbers, Numbers) else list(numbers)
        by_head = [own for layer in layers for own in ([layer] * heads if isinstance(layer, Numbers) else layer)]
        one = Call() if call is None else call
        calls = [one] * (len(layers) * heads) if isinstance(one, Call) else list(one)
        indices = [head_offset + head for _ in layers for head in range(heads)]
        self.policy = policy
        self.machines = tuple(
            Operations(policy, own, call, head, seed, tensors, kv_dtype)
            for own, call, head in zip(by_head, calls, indices, strict=True)
        )

    def empty(self, key_dim: int = 0, value_dim: int = 0) -> list[Head]:
        """Return heads with empty caches."""
        return [machine.empty(key_dim, value_dim) for machine in self.machines]

    # -- forwards ------------------------------------------------------------------------------------------------------

    def prefill(
        self, heads: Sequence[Head], q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Supplied = NOTHING
    ) -> list[Step]:
        """Run L prompt tokens, q [H, L, G, D], k [H, L, D], v [H, L, Dv]; each attends to earlier tokens and itself.

        Settles once, after the last token, or after each token that ends a block.

        Args:
            supplied: the caller's values, [H, L] by name.
        """
        query, key, value = floats(q), floats(k), floats(v)

        def part_of(index: int, part: slice) -> Attended:
            given = of_head(supplied, index, part)
            return self.machines[index].prompt(heads[index], query[index, part], key[index, part], value[index, part], given)

        return self._prompt(heads, key.shape[1], part_of)

    def decode(
        self, heads: Sequence[Head], q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Supplied = NOTHING
    ) -> list[Step]:
        """Run one decode token, q [H, G, D], k [H, D], v [H, Dv]; `supplied` [H, 1] by name."""
        query, key, value = floats(q), floats(k), floats(v)

        def arrive(index: int) -> None:
            given = of_head(supplied, index)
            self.machines[index].arrive(heads[index], query[index], key[index], value[index], given)

        choices: dict[tuple[int, int], tuple[Indices, Mask]] = {}  # positions and the chosen mask, by layer and KV head

        def part_of(index: int) -> Attended:
            machine, head = self.machines[index], heads[index]
            layer = next(group for group in self._by_layer() if index in group) if self.policy.heads_vote else []
            peers = [(self.machines[i], heads[i], query[i]) for i in layer]
            taken = None
            if machine.numbers.takes_over:
                taken = taken_over(head.position, *choices[machine.numbers.chooser, machine.head_index])
            attended = machine.token(head, query[index], peers, taken)
            if attended.chosen is not None:
                choices[machine.numbers.layer, machine.head_index] = head.position, attended.chosen
            return attended

        return self._token(heads, part_of, arrive)

    def observe_rows(
        self,
        heads: Sequence[Head],
        attn: Sequence[ArrayLike],
        k: ArrayLike | None = None,
        v: ArrayLike | None = None,
        supplied: Supplied = NOTHING,
    ) -> list[Step]:
        """Run L prompt tokens with given attention: per head [L, n + L], where each row counts up to its own token.

        Later rows skip the tokens evicted after a block. Keys and values, [H, L, D] and [H, L, Dv], are zero by default. There are no
        logits.
        """
        rows = [_by_position(head, x) for head, x in zip(heads, attn, strict=True)]

        def part_of(index: int, part: slice) -> Attended:
            key, value = (None if x is None else floats(x)[index, part] for x in (k, v))
            return self.machines[index].observe_given(
                heads[index], rows[index][part], key, value, of_head(supplied, index, part)
            )

        return self._prompt(heads, len(rows[0]), part_of)

    def observe_row(
        self,
        heads: Sequence[Head],
        attn: Sequence[ArrayLike],
        k: ArrayLike | None = None,
        v: ArrayLike | None = None,
        supplied: Supplied = NOTHING,
    ) -> list[Step]:
        """Run one decode token with given attention: per head [n + 1], over the slots and, last, the token itself.

        The row skips tokens evicted to make room under `cap hard`. Nothing is selected.
        """
        rows = [_by_position(head, floats(x)[None]) for head, x in zip(heads, attn, strict=True)]

        def part_of(index: int) -> Attended:
            key, value = (None if x is None else floats(x)[index][None] for x in (k, v))
            return self.machines[index].observe_given(heads[index], rows[index], key, value, of_head(supplied, index))

        return self._token(heads, part_of)

    def _prompt(self, heads: Sequence[Head], count: int, part_of: Callable[[int, slice], Attended]) -> list[Step]:
        """Run a prompt's forward in the parts that `part_of` attends; return each head's last step with all outputs."""
        evicts = self.policy.when != "decode"
        for head in heads:
            head.prompt_from = head.seen
        parts = []
        for part, ends in self._parts(heads[0].seen, count):
            attended = [part_of(index, part) for index in range(len(heads))]
            steps = self.settle(heads, overflow if ends and evicts else nobody)
            parts.append([step.with_attended(mine) for step, mine in zip(steps, attended, strict=True)])
        return [
            replace(mine[-1], out=np.concatenate([step.out for step in mine]), earlier=tuple(mine[:-1]))
            for mine in zip(*parts, strict=True)
        ]

    def _parts(self, first: int, count: int) -> Iterator[tuple[slice, bool]]:
        """Yield the parts of a forward from text position `first`, and whether a settle follows each."""
        if self.policy.prefill == "whole":
            yield slice(0, count), True
            return
        block, start = self.machines[0].numbers.prefill_block, 0
        while start < count:
            stop = int(min(count, start + block - (first + start) % block))
            yield slice(start, stop), (first + stop) % block == 0
            start = stop

    def _token(
        self, heads: Sequence[Head], part_of: Callable[[int], Attended], arrive: Callable[[int], None] = lambda index: None
    ) -> list[Step]:
        """Run a forward of one decode token. It arrives in all heads before any of them attends."""
        before = self.make_room(heads)
        for index in range(len(heads)):
            arrive(index)
        attended = [part_of(index) for index in range(len(heads))]
        steps = self.settle(heads, overflow if self.policy.when != "prefill" else nobody)
        return [
            replace(step.with_attended(mine), earlier=earlier)
            for step, mine, earlier in zip(steps, attended, before, strict=True)
        ]

    # -- settling ------------------------------------------------------------------------------------------------------

    def make_room(self, heads: Sequence[Head]) -> list[tuple[Step, ...]]:
        """Under `cap hard`, evict before a token would exceed C + slack; return each head's settle, if any."""
        capped = self.policy.cap == "hard" and self.policy.when != "prefill"
        if capped and any(room(head.live, machine.numbers) for machine, head in zip(self.machines, heads, strict=True)):
            return [(step,) for step in self.settle(heads, room)]
        return [() for _ in heads]

    def settle(self, heads: Sequence[Head], evictions: Evictions = overflow) -> list[Step]:
        """Evaluate keeps and score on the live slots, agree where heads have to, and evict."""
        scopes = [machine.scopes.live(head) for machine, head in zip(self.machines, heads, strict=True)]
        places = [head.position for head in heads]
        by, stands = self._protect(scopes, places)
        shields = [one > 0 for one in stands]
        scores = self._scores(scopes, places, shields)
        gone = [np.zeros(0, dtype=np.int64)] * len(heads)
        if scores is not None:
            gone = self._gone(scores, stands, places, evictions, self._settling(scopes))
        steps = []
        for index, head in enumerate(heads):
            score = None if scores is None else scores[index]
            steps.append(Step(places[index], score, by[index], shields[index], gone[index], head.columns))
            if len(gone[index]):
                self.machines[index].prune(head, scopes[index])
            head.drop(gone[index])
        return steps

    def end_turn(self, heads: Sequence[Head]) -> list[Step]:
        """End a turn; return the steps of the settle that follows."""
        self.machines = tuple(
            replace(machine, numbers=replace(machine.numbers, turns=machine.numbers.turns + 1)) for machine in self.machines
        )
        return self.settle(heads, overflow if self.policy.settles_turns else nobody)

    def _protect(
        self, scopes: Sequence[Scope], places: Sequence[Indices]
    ) -> tuple[list[tuple[Array | None, ...]], list[Indices]]:
        """Return per head the values of the keep lines, and the slots' standing."""
        keeps = self.policy.keeps
        lines: list[Sequence[Array | None]] = list(zip(*(worths(keeps, scope) for scope in scopes), strict=True))
        for index, keep in enumerate(keeps):
            values = [x for x in lines[index] if x is not None]
            if values:
                agree = _any if keep.row.holds else _mean
                lines[index] = self._agreed(values, places, agree)
        by = [tuple(line[head] for line in lines) for head in range(len(scopes))]
        ends_last = self.policy.ends_last
        return by, [standing(keeps, *one, ends_last=ends_last) for one in zip(by, scopes, places, strict=True)]

    def _scores(self, scopes: Sequence[Scope], places: Sequence[Indices], shields: Sequence[Mask]) -> list[Array] | None:
        """Return per head the score, which may pool over the unprotected slots."""
        if self.policy.score is None:
            return None
        scopes = [replace(scope, unprotected=~shield) for scope, shield in zip(scopes, shields, strict=True)]
        if self.policy.across is not None:
            peers = {group[0]: tuple(Peer(scopes[i], evaluate) for i in group) for group in self._by_layer()}
            scopes = [
                replace(scopes[i], heads=peers[group[0]], place=place)
                for group in self._by_layer()
                for place, i in enumerate(group)
            ]
        return self._agreed([evaluate_group(self.policy.score, scope) for scope in scopes], places, _mean)

    def _gone(
        self,
        scores: Sequence[Array],
        stands: Sequence[Indices],
        places: Sequence[Indices],
        evictions: Evictions,
        numbers: Sequence[Numbers],
    ) -> list[Indices]:
        heads = list(zip(scores, stands, places, strict=True))
        if evictions is nobody or not self.policy.heads_share:
            return [victims(*head, evictions(len(head[0]), own)) for head, own in zip(heads, numbers, strict=True)]
        gone = [np.zeros(0, dtype=np.int64)] * len(places)
        for group in [self._evicting()] if self.policy.one_pool else self._by_layer():
            found = victims_across([heads[index] for index in group], [numbers[index] for index in group])
            for index, slots in zip(group, found, strict=True):
                gone[index] = slots
        return gone

    def _settling(self, scopes: Sequence[Scope]) -> list[Numbers]:
        """Return each head's numbers, with the budget of this settle if it depends on the data or is shared by the layers."""
        numbers = measured(self.policy, [machine.numbers for machine in self.machines], scopes, self._together())
        by = None if self.policy.across_layers is None else self.policy.across_layers.by
        sharing = [group for group in self._by_layer() if np.isfinite(numbers[group[0]].capacity)]
        if by is None or not sharing:
            return numbers
        own = [numbers[group[0]] for group in sharing]
        worth = [
            evaluate_number(by, replace(scopes[group[0]], heads=tuple(Peer(scopes[i], evaluate) for i in group)))
            for group in sharing
        ]
        live = [max(scopes[index].slots for index in group) for group in sharing]
        found = shares(worth, [one.budget for one in own], [one.layer_floor for one in own], live)
        for group, share in zip(sharing, found, strict=True):
            for index in group:
                numbers[index] = numbers[index].with_share(share)
        return numbers

    def _agreed(self, values: Sequence[Array], places: Sequence[Indices], agree: Callable[[Array], Array]) -> list[Array]:
        """Return each head's values, [n], or the common ones of heads that agree.

        Such heads hold the same positions, possibly in different slots.
        """
        agreed = list(values)
        for group in self._together():
            shared = agree(np.stack([values[index][np.argsort(places[index])] for index in group]))
            for index in group:
                agreed[index] = shared[np.argsort(np.argsort(places[index]))]
        return agreed

    def _together(self) -> list[list[int]]:
        """Return the groups of heads, by index, that share victims."""
        if self.policy.victims == "layers":
            return [self._evicting()] if self._evicting() else []
        return self._by_layer() if self.policy.victims == "heads" else []

    def _evicting(self) -> list[int]:
        """Return the heads of layers that evict."""
        return [index for index, machine in enumerate(self.machines) if np.isfinite(machine.numbers.capacity)]

    def _by_layer(self) -> list[list[int]]:
        layers = dict.fromkeys(machine.numbers.layer for machine in self.machines)
        return [[i for i, machine in enumerate(self.machines) if machine.numbers.layer == layer] for layer in layers]


def nobody(live: int, numbers: Numbers) -> int:
    """Evict nothing, in a phase in which the policy does not evict."""
    return 0


def _mean(values: Array) -> Array:
    """Average over heads: [heads, n] to [n]."""
    with np.errstate(all="ignore"):
        return np.asarray(values.mean(axis=0))


def _any(values: Array) -> Array:
    """Return 1 where any head has a nonzero value: [heads, n] to [n]."""
    return np.asarray((values != 0).any(axis=0), dtype=np.float64)


def _by_position(head: Head, attn: ArrayLike) -> list[dict[int, float]]:
    """Return rows [L, n + L], over a head's slots and the L new tokens, as maps from positions."""
    rows = floats(attn)
    coming = range(head.seen, head.seen + len(rows))
    return [dict(zip([*head.position.tolist(), *coming], row.tolist(), strict=True)) for row in rows]
