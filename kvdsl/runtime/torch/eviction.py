"""Eviction from one layer, or from several that agree on their victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.state.order import FREE, close_gaps
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.settle import (
    Ballot,
    Protection,
    agreed,
    eviction_order,
    mean_score,
    overflow,
    overflow_before_placing,
    shared_order,
)
from kvdsl.runtime.torch.view import View, slots_view

Excess = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""From the live slots and the numbers to how many must leave; see `settle.overflow`."""


@dataclass(frozen=True)
class Held:
    """What one layer holds when some of it may have to leave.

    Attributes:
        kept: `keys`, `values`, `position` and `columns` over slots; of a decode step under compact positions `rank` as well.
        numbers: the policy's table, float64 [batch, (kv_heads,) len(spec.numbers)].
        newest: int32 [batch], the position of the row's newest token.
        rows: bool [batch], the rows that may lose slots.
        evicts: whether any may, in this layer and phase.
    """

    state: SlotState
    kept: dict[str, Tensor]
    numbers: Tensor
    newest: Tensor
    rows: Tensor
    evicts: bool

    @property
    def position(self) -> Tensor:
        """[batch, kv_heads, slots]."""
        return self.kept["position"]

    def view(self) -> View:
        """The live slots."""
        return slots_view(self.state, self.kept, self.newest, self.numbers)


def held_in_slots(state: SlotState, rows: Tensor) -> Held:
    """What the state itself holds."""
    kept = state.in_slots() | ({"rank": state.rank} if state.spec.compact else {})
    return Held(state, kept, state.numbers, state.seen - 1, rows, state.evicts)


Watcher = Callable[[Held, "Tensor | float", Tensor], None]
"""Told of every settle, before anyone leaves: the slots' scores, [batch, kv_heads, 1, slots], and what may not leave."""

_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell the watcher of every settle that is computed here: those of prompts, and the torch backend's of decoded tokens."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def settle(held: Held, then: Callable[[], None] = lambda: None) -> None:
    """Evict what exceeds the budget, once all layers that must agree are there; then do what remains to be done."""
    if held.state.together is not None:
        held.state.together.settle(held, then)
        return
    if held.evicts:
        evict([held], overflow)
    then()


def make_room(held: Held) -> None:
    """Under a hard cap: evict before a token is placed."""
    if held.state.together is not None:
        held.state.together.make_room(held.rows)
    elif held.evicts:
        evict([held], overflow_before_placing)


class Together:
    """The layers of one cache, which agree on their victims: nothing leaves before the last one has attended."""

    def __init__(self) -> None:
        self._states: list[SlotState] = []
        self._waiting: list[tuple[Held, Callable[[], None]]] = []

    def join(self, state: SlotState) -> None:
        """A layer joins, in the model's order."""
        self._states.append(state)
        state.together = self

    def forget(self) -> None:
        """Nobody waits any more: the last forward was interrupted."""
        self._waiting = []

    def settle(self, held: Held, then: Callable[[], None]) -> None:
        """A layer has attended; see `settle`."""
        self._waiting.append((held, then))
        if len(self._waiting) < len(self._states):
            return
        waiting, self._waiting = self._waiting, []
        deciding = [one for one, _ in waiting if one.evicts]
        if deciding:
            evict(deciding, overflow)
        for _, finish in waiting:
            finish()

    def make_room(self, rows: Tensor) -> None:
        """A layer is about to place a token; the first one to do so decides for all."""
        deciding = [held_in_slots(state, rows) for state in self._states if state.evicts]
        if deciding and not self._waiting:
            evict(deciding, overflow_before_placing)


def evict(layers: Sequence[Held], excess: Excess) -> None:
    """Free the victims' slots in place: their positions become FREE.

    Everything is computed at every settle, due or not: asking would wait for the device.
    """
    for held, leaving in zip(layers, _victims(layers, excess), strict=True):
        if "rank" in held.kept:
            close_gaps(held.kept["rank"], leaving)
        held.position.masked_fill_(leaving, FREE)


def _victims(layers: Sequence[Held], excess: Excess) -> list[Tensor]:
    """Who leaves, bool [batch, kv_heads, slots] per layer."""
    if layers[0].state.spec.victims != "own":
        return _common_victims(layers, excess)
    return [_own_victims(held, excess) for held in layers]


def _own_victims(held: Held, excess: Excess) -> Tensor:
    state, view, protection = held.state, held.view(), Protection(held.position)
    numbers = state.settings.per_head(held.numbers)
    state.spec.torch_kernels.protect(view, protection, numbers)
    view.protected = protection.mask
    numbers = _measured(held, view, numbers)
    score = _score(held, view)
    if state.spec.across:
        over = protection.live.sum(1, keepdim=True) - protection.live.shape[1] * numbers["capacity"]
        return shared_order(score, protection, numbers["floor"]) < over * held.rows.view(-1, 1, 1)
    return eviction_order(score, protection) < excess(protection.live, numbers) * held.rows.view(-1, 1, 1)


def _measured(held: Held, view: View, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numbers, with the budget that there is at this settle where it reads the data, [batch, kv_heads, 1]: one token at least."""
    if not held.state.spec.measures:
        return numbers
    found = held.state.spec.torch_kernels.budget(view).squeeze(-1)
    tokens = torch.where(found >= 1, found.floor(), 1.0)  # a NaN is 1 as well, as of all counts
    return {**numbers, "capacity": torch.minimum(numbers["capacity"], tokens)}


def _score(held: Held, view: View) -> Tensor | float:
    """What the slots score, when it is known what may not leave."""
    score: Tensor | float = held.state.spec.torch_kernels.score(view)
    for watcher in _watchers:
        assert view.protected is not None
        watcher(held, score, view.protected)
    return score


def _common_victims(layers: Sequence[Held], excess: Excess) -> list[Tensor]:
    """The same victims for every head of every layer, by the mean of their scores."""
    views, ballots = [held.view() for held in layers], [Ballot(held.position) for held in layers]
    tables = [held.state.settings.per_head(held.numbers) for held in layers]
    for held, view, ballot, numbers in zip(layers, views, ballots, tables, strict=True):
        held.state.spec.torch_kernels.protect(view, ballot, numbers)
    protections = [agreed(ballots, own) for own in range(len(layers))]
    scores = []
    for held, view, protection in zip(layers, views, protections, strict=True):
        view.protected = protection.mask
        scores.append(_score(held, view))
    tables = [_measured(held, view, numbers) for held, view, numbers in zip(layers, views, tables, strict=True)]
    score = mean_score(scores, [held.position for held in layers])
    return [
        eviction_order(score, protection) < excess(protection.live, numbers) * held.rows.view(-1, 1, 1)
        for held, protection, numbers in zip(layers, protections, tables, strict=True)
    ]
