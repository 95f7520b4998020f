"""Eviction from one layer, or from several that agree on their victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvdsl.errors import KvdslError, warn
from kvdsl.runtime.state.order import free
from kvdsl.runtime.state.shared import Together
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import sharing
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

_Noted = TypeVar("_Noted", Protection, Ballot)

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
        of_prompt: whether it is a prompt's; layers share a budget then only.
        unsaid: gets conditions and what to do where they hold, once somebody waits for the device; None: it is done at once.
    """

    state: SlotState
    kept: dict[str, Tensor]
    numbers: Tensor
    newest: Tensor
    rows: Tensor
    evicts: bool
    of_prompt: bool = False
    unsaid: list[tuple[Tensor, Callable[[], None]]] | None = None

    @property
    def waits(self) -> bool:
        """Whether the layers of the cache decide together."""
        return self.state.spec.victims == "layers" or (self.of_prompt and self.state.spec.across_layers != "")

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


Kernel = Callable[[Held], bool]
"""Evicts from a layer whose KV heads decide by themselves, as `evict` does; False, and nothing done, where it cannot."""


def no_kernel(held: Held) -> bool:
    """There is none."""
    return False


def settle(held: Held, then: Callable[[], None] = lambda: None, kernel: Kernel = no_kernel) -> None:
    """Evict what exceeds the budget, once all layers that must agree are there; then do what remains to be done.

    Args:
        kernel: is asked first, unless somebody watches.

    Raises:
        KvdslError: if layers share a budget, and this one of several is asked alone.
    """
    if held.waits and held.state.together is not None:
        _settle_together(held.state.together, held, then)
        return
    if held.waits and held.state.spec.across_layers and held.state.settings.layers > 1:
        raise KvdslError(f"the layers of {held.state.spec.name} share a budget, but layer {held.state.layer} is asked alone")
    if held.of_prompt:
        warn_of_protected([held])
    if held.evicts and (_watchers or not (_fits(held) or _nobody_leaves(held, overflow) or kernel(held))):
        evict([held], overflow)
    then()


def _fits(held: Held) -> bool:
    """Whether a prompt has so few slots that none is in excess, as far as the host knows: most chats begin with such."""
    spec = held.state.spec
    if not held.of_prompt or spec.measures or spec.across or spec.across_layers:
        return False
    return held.position.shape[-1] <= held.state.settings.table(held.numbers).least_capacity


def known_to_stay(held: Held) -> tuple[int, int] | None:
    """How many tokens the emptiest and the fullest KV head keep of a prompt that is a whole text of every row, without padding; None where
    only the device knows: budgets may be found in the data, or be heads' or layers' together.
    """
    spec, (_, _, slots) = held.state.spec, held.position.shape
    if not held.evicts:
        return slots, slots
    if spec.measures or spec.across or spec.across_layers:
        return None
    numbers = held.state.settings.per_head(held.state.settings.table(held.numbers).numbers)
    live = torch.full_like(numbers["capacity"], slots)
    least, most = (live - overflow(live, numbers)).aminmax()
    return int(least), int(most)


def _nobody_leaves(held: Held, excess: Excess) -> bool:
    """Whether nobody has to behind a decoded token, as far as that is asked: on a CPU (a GPU would be waited for), and of budgets that
    read no data and are a head's own.
    """
    spec, shared = held.state.spec, held.state.spec.across or held.state.spec.across_layers
    if held.of_prompt or held.position.device.type != "cpu" or torch.compiler.is_compiling() or spec.measures or shared:
        return False
    live = (held.position >= 0).sum(-1, keepdim=True)
    leaving = excess(live, held.state.settings.per_head(held.numbers)) * held.rows.view(-1, 1, 1)
    return not bool((leaving > 0).any())


def end_turn(state: SlotState) -> None:
    """Count a turn that has ended, in place, and let leave what may then.

    Raises:
        KvdslError: as `settle` does.
    """
    state.settings.turns += 1
    if not state.allocated:
        return
    if "turns" in state.spec.numbers:
        state.numbers[..., state.spec.numbers.index("turns")] = state.settings.turns
    if state.spec.settles_turns and state.evicts:
        state.forget_copies(halves=False)
        settle(held_in_slots(state, state.seen > 0), then=partial(state.layout.settled, state.position))


def make_room(held: Held) -> None:
    """Under a hard cap: evict before a token is placed."""
    if held.waits and held.state.together is not None:
        states = (known() for known in held.state.together.states)
        deciding = [held_in_slots(state, held.rows) for state in states if state.evicts]
        if deciding and not held.state.together.waiting:  # the first layer to place a token decides for all
            evict(deciding, overflow_before_placing)
    elif held.evicts and (_watchers or not _nobody_leaves(held, overflow_before_placing)):
        evict([held], overflow_before_placing)


def _settle_together(
    together: Together[SlotState, tuple[Held, Callable[[], None]]], held: Held, then: Callable[[], None]
) -> None:
    """A layer has attended; the last one to do so decides for all."""
    waiting = together.wait((held, then))
    deciding = [one for one, _ in waiting if one.evicts]
    if deciding:
        if deciding[0].of_prompt:
            warn_of_protected(deciding)
        evict(deciding, overflow)
    for _, finish in waiting:
        finish()


def evict(layers: Sequence[Held], excess: Excess) -> None:
    """Free the victims' slots in place: their positions become FREE.

    Everything is computed, due or not: to ask a GPU is to wait for it.
    """
    for held, leaving in zip(layers, _victims(layers, excess), strict=True):
        _remember(held, leaving)
        free(held.position, held.kept.get("rank"), leaving)


def _remember(held: Held, leaving: Tensor) -> None:
    """What folds over prunes come to in the KV heads that lose slots, bool [batch, kv_heads, slots]."""
    if "prune" not in held.state.spec.column_rules:
        return
    loses, view = leaving.any(-1, keepdim=True), held.view()
    for name, x in held.state.spec.torch_kernels.prune(view).items():
        column = view.columns[name]
        column.copy_(torch.where(loses, x.float().squeeze(2), column))


def _victims(layers: Sequence[Held], excess: Excess) -> list[Tensor]:
    """Who leaves, bool [batch, kv_heads, slots] per layer."""
    spec = layers[0].state.spec
    if spec.victims == "layers":
        return _common_victims(layers, excess)
    if spec.across_layers == "pool":
        return _pooled_victims(layers)
    if spec.across_layers == "shares":
        layers = _with_shares(layers)
    if spec.victims == "heads":
        return [one for held in layers for one in _common_victims([held], excess)]
    return [_own_victims(held, excess) for held in layers]


def _own_victims(held: Held, excess: Excess) -> Tensor:
    score, protection, numbers = _judged(held)
    if held.state.spec.across:
        over = protection.live.sum(1, keepdim=True) - protection.live.shape[1] * numbers["capacity"]
        floor = numbers["head_floor" if held.state.spec.across_layers else "floor"]  # of shares: in tokens by now
        return shared_order(score, protection, floor) < over * held.rows.view(-1, 1, 1)
    return eviction_order(score, protection) < excess(protection.live, numbers) * held.rows.view(-1, 1, 1)


def _judged(held: Held) -> tuple[Tensor | float, Protection, dict[str, Tensor]]:
    """What the slots score, what may not leave, and the layer's numbers."""
    state, view, protection = held.state, held.view(), Protection(held.position)
    numbers = state.settings.per_head(held.numbers)
    state.spec.torch_kernels.protect(view, protection, numbers)
    view.protected = protection.mask
    return _score(held, view), protection, _measured(held, view, numbers)


def _pooled_victims(layers: Sequence[Held]) -> list[Tensor]:
    """Who leaves where all layers and heads lose slots to each other."""
    judged = [_judged(held) for held in layers]
    scores, protections, numbers = zip(*judged, strict=True)
    capacities, floors = ([own[name] for own in numbers] for name in ("capacity", "floor"))
    return sharing.pooled(scores, protections, capacities, floors, [held.rows for held in layers])


def _with_shares(layers: Sequence[Held]) -> list[Held]:
    """The layers, each with its share of the budgets as its capacity."""
    named = [held.state.settings.named(held.numbers) for held in layers]
    device = layers[0].position.device
    weight = torch.stack([_weight(held).to(device) for held in layers])
    live = torch.stack([(held.position >= 0).sum(-1).amax(1).to(device) for held in layers])
    capacity, floor = (torch.stack([own[name].to(device) for own in named]) for name in ("capacity", "layer_floor"))
    return [
        _with_share(held, share.to(held.numbers.device))
        for held, share in zip(layers, sharing.shares(weight, capacity, floor, live), strict=True)
    ]


def _weight(held: Held) -> Tensor:
    """What the layer's share goes by: float32 [batch]."""
    made = torch.as_tensor(held.state.spec.torch_kernels.weigh(held.view()), device=held.position.device).float()
    return made.reshape(-1).expand(len(held.position))


def _with_share(held: Held, share: Tensor) -> Held:
    """The layer with another capacity, [batch], and the floor of its heads that follows from it."""
    names, numbers = held.state.spec.numbers, held.numbers.clone()
    numbers[:, names.index("capacity")] = share
    if "head_floor" in names:
        rate = numbers[:, names.index("head_floor")]
        numbers[:, names.index("head_floor")] = torch.where(share.isfinite(), (share * rate).floor(), 0.0)
    return replace(held, numbers=numbers)


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
        eviction_order(score.to(protection.live.device), protection)
        < excess(protection.live, numbers) * held.rows.view(-1, 1, 1)
        for held, protection, numbers in zip(layers, protections, tables, strict=True)
    ]


# -- more protected than kept ------------------------------------------------------------------------------------------


def warn_of_protected(layers: Sequence[Held]) -> None:
    """Warn, once for all layers of a cache, where a prompt's end protects more tokens than the budget keeps.

    Args:
        layers: those that decide together, before any token leaves.
    """
    spec, warned = layers[0].state.spec, layers[0].state.warned
    if not spec.overprotects or "protected" in warned or all(_keeps_all(held) for held in layers):
        return
    if spec.across_layers == "shares":
        layers = _with_shares(layers)
    counts, rooms = zip(*(_protected_and_kept(held, protection) for held, protection in _protections(layers)), strict=True)
    if spec.across_layers == "pool":
        counts, rooms = (
            tuple(torch.stack([x.to(one[0].device) for x in one]).sum(0, keepdim=True)) for one in (counts, rooms)
        )
    for held, count, room in zip(layers, counts, rooms, strict=False):
        over = (count > room) & held.rows[:, None]
        say = partial(_say_too_many, held, over, count, room)
        if held.unsaid is not None:
            held.unsaid.append((over.any(), say))
        elif bool(over.any()):
            say()
            return


def _say_too_many(held: Held, over: Tensor, count: Tensor, room: Tensor) -> None:
    """Warn of the first KV head that protects more than its budget keeps, once a cache."""
    warned = held.state.warned
    if "protected" not in warned:
        warned.add("protected")
        row, head = over.nonzero()[0].tolist()
        warn(_too_many(held, row, int(count[row, head]), int(room[row, head])))


def _keeps_all(held: Held) -> bool:
    """Whether the host knows that the budget keeps whatever the prompt left."""
    spec = held.state.spec
    if spec.measures or spec.hard_cap:
        return False
    return held.position.shape[-1] <= held.state.settings.table(held.numbers).least_capacity


def _protections(layers: Sequence[Held]) -> Iterator[tuple[Held, Protection]]:
    """What may not leave each layer."""
    victims = layers[0].state.spec.victims
    for together in [layers] if victims == "layers" else [[held] for held in layers]:
        if victims == "own":
            yield from ((held, _noted(held, Protection(held.position))) for held in together)
            continue
        ballots = [_noted(held, Ballot(held.position)) for held in together]
        yield from ((held, agreed(ballots, own)) for own, held in enumerate(together))


def _noted(held: Held, protection: _Noted) -> _Noted:
    """What the layer's `keep` lines ask for, noted."""
    held.state.spec.torch_kernels.protect(held.view(), protection, held.state.settings.per_head(held.numbers))
    return protection


def _protected_and_kept(held: Held, protection: Protection) -> tuple[Tensor, Tensor]:
    """How many tokens are protected, and how many of these can stay: [batch, kv_heads] each, or [batch, 1] where heads share them."""
    numbers = _measured(held, held.view(), held.state.settings.per_head(held.numbers))
    room = numbers["capacity"].squeeze(-1)
    if "max_drop" in numbers:
        room = room + torch.where(numbers["max_drop"] > 0, numbers["slack"], 0.0).squeeze(-1)
    count = protection.mask.sum(-1)
    room = (room - 1 if held.state.spec.hard_cap else room).expand(count.shape)
    if held.state.spec.across or held.state.spec.across_layers:
        return count.sum(1, keepdim=True), room.sum(1, keepdim=True)
    return count, room


def _too_many(held: Held, row: int, count: int, room: int) -> str:
    state = held.state
    whose = "all layers" if state.spec.across_layers == "pool" else f"layer {state.layer}"
    if not (state.spec.across or state.spec.across_layers):
        whose += ", each KV head" if state.spec.victims != "own" else ", a KV head"
    return (
        f"{state.spec.name} protects {count} tokens in row {row} ({whose}), but its budget keeps {room} of them: protected tokens leave, "
        f"the lowest-scored first, and in edition 2 those of `keep first` and `keep last` last. "
        f"Raise the budget, protect fewer, or have the budget grow with the prompt (`budget prompt + 512` in "
        f"the policy). `kvdsl explain {state.spec.stem}` says what is protected"
    )
