"""Eviction from one layer, or from several that decide together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvdsl.errors import KvdslError, warn
from kvdsl.runtime.forward import Later
from kvdsl.runtime.spec import PolicySpec
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
"""Computes how many tokens to evict from the live slots and the numbers; see `settle.overflow`."""


@dataclass(frozen=True)
class Held:
    """The contents of one layer at a settle.

    Attributes:
        kept: `keys`, `values`, `position` and `columns` over slots; `rank` too, in a decode step under compact positions.
        numbers: the policy's table, float64 [batch, (kv_heads,) len(spec.numbers)].
        newest: int32 [batch], the position of the row's newest token.
        rows: bool [batch], the rows that may evict.
        evicts: whether this layer evicts in this phase.
        of_prompt: whether a prompt settles. Only then do layers share a budget.
        later: takes warnings until the host waits for the device; None: at once.
    """

    state: SlotState
    kept: dict[str, Tensor]
    numbers: Tensor
    newest: Tensor
    rows: Tensor
    evicts: bool
    of_prompt: bool = False
    later: Later | None = None

    @property
    def waits(self) -> bool:
        """Whether this layer decides together with others."""
        return self.state.spec.victims == "layers" or (self.of_prompt and self.state.spec.across_layers != "")

    @property
    def position(self) -> Tensor:
        return self.kept["position"]

    def view(self) -> View:
        """Return a view of the live slots."""
        return slots_view(self.state, self.kept, self.newest, self.numbers)


def held_in_slots(state: SlotState, rows: Tensor) -> Held:
    """Return the contents of the state's own slots."""
    kept = state.in_slots() | ({"rank": state.rank} if state.spec.compact else {})
    return Held(state, kept, state.numbers, state.seen - 1, rows, state.evicts)


Watcher = Callable[[Held, "Tensor | float", Tensor], None]
"""Called at every settle before eviction with the slots' scores, [batch, kv_heads, 1, slots], and the mask of protected slots."""

_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` at every settle computed in torch: of all prompts, and of tokens decoded by the torch backend."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


Kernel = Callable[[Held], bool]
"""Evicts like `evict` from a layer whose KV heads decide for themselves. Returns False, with nothing done, if it cannot."""


def no_kernel(held: Held) -> bool:
    """Decline: the kernel of backends without one."""
    return False


def settle(held: Held, then: Callable[[], None] = lambda: None, kernel: Kernel = no_kernel) -> None:
    """Evict what exceeds the budget, then call `then`. Layers that decide together wait for the last one.

    Args:
        kernel: tried first, unless a watcher is active.

    Raises:
        KvdslError: if layers share a budget but the other layers are missing.
    """
    if held.waits and held.state.together is not None:
        _settle_together(held.state.together, held, then)
        return
    if held.waits and held.state.spec.across_layers and held.state.settings.layers > 1:
        raise KvdslError(f"the layers of {held.state.spec.name} share a budget, but layer {held.state.layer} settles alone")
    if held.of_prompt:
        warn_of_protected([held])
    if held.evicts and (_watchers or not (_fits(held) or _nobody_leaves(held, overflow) or kernel(held))):
        evict([held], overflow)
    then()


def settle_slots(state: SlotState, rows: Tensor) -> None:
    """Evict what exceeds the budget from a state's slots, of rows, bool [batch]. Keys and values are read only if a token may leave.

    Raises:
        KvdslError: as `settle` does.
    """
    if state.spec.victims != "layers":  # layers that agree wait for each other, whether they evict or not
        fits = not state.evicts or _all_fit(state, state.position, state.numbers, rows, overflow)
        if fits and not _watchers:
            return
    settle(held_in_slots(state, rows), then=partial(state.layout.settled, state.position))


def _fits(held: Held) -> bool:
    """Whether the host knows that the prompt exceeds no budget, because it has fewer slots than any capacity."""
    spec = held.state.spec
    if not held.of_prompt or spec.measures or spec.across or spec.across_layers:
        return False
    return held.position.shape[-1] <= held.state.settings.table(held.numbers).least_capacity


def known_to_stay(held: Held, lengths: Tensor) -> tuple[int, int] | None:
    """Return the fewest and the most tokens that KV heads keep of a prompt that is the whole text of every row.

    None if only the device knows, because budgets depend on the data or are shared.

    Args:
        lengths: the rows' tokens, int32 [batch] on the CPU.
    """
    spec = held.state.spec
    if not held.evicts:
        return int(lengths.min()), int(lengths.max())
    if spec.measures or spec.across or spec.across_layers:
        return None
    numbers = held.state.settings.per_head(held.state.settings.table(held.numbers).numbers)
    live = lengths.view(-1, 1, 1).to(torch.float64).expand(numbers["capacity"].shape)
    least, most = (live - overflow(live, numbers)).aminmax()
    return int(least), int(most)


def _nobody_leaves(held: Held, excess: Excess) -> bool:
    """Whether a decode step is known to evict nothing."""
    return not held.of_prompt and _all_fit(held.state, held.position, held.numbers, held.rows, excess)


def _all_fit(state: SlotState, position: Tensor, numbers: Tensor, rows: Tensor, excess: Excess) -> bool:
    """Whether no KV head is known to exceed its budget.

    Checked on CPUs only (a GPU would have to be waited for), for budgets of single heads that do not depend on the data.
    """
    shared = state.spec.across or state.spec.across_layers
    if position.device.type != "cpu" or torch.compiler.is_compiling() or state.spec.measures or shared:
        return False
    live = (position >= 0).sum(-1, keepdim=True)
    leaving = excess(live, state.settings.per_head(numbers)) * rows.view(-1, 1, 1)
    return not bool((leaving > 0).any())


def end_turn(state: SlotState) -> None:
    """Count a turn that has ended, and evict if the policy settles at turns.

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
        settle_slots(state, state.seen > 0)


def make_room(held: Held) -> None:
    """Under a hard cap, evict before a token is placed."""
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
    """Wait until the last layer has attended, then decide for all."""
    waiting = together.wait((held, then))
    deciding = [one for one, _ in waiting if one.evicts]
    if deciding:
        if deciding[0].of_prompt:
            warn_of_protected(deciding)
        evict(deciding, overflow)
    for _, finish in waiting:
        finish()


def evict(layers: Sequence[Held], excess: Excess) -> None:
    """Free the victims' slots in place.

    The order is computed even if nothing is due: a check would wait for the GPU.
    """
    for held, leaving in zip(layers, _victims(layers, excess), strict=True):
        _remember(held, leaving)
        free(held.position, held.kept.get("rank"), leaving)


def _remember(held: Held, leaving: Tensor) -> None:
    """Update `prune` columns of the KV heads that evict; `leaving` is bool [batch, kv_heads, slots]."""
    if "prune" not in held.state.spec.column_rules:
        return
    loses, view = leaving.any(-1, keepdim=True), held.view()
    for name, x in held.state.spec.torch_kernels.prune(view).items():
        column = view.columns[name]
        column.copy_(torch.where(loses, x.float().squeeze(2), column))


def _victims(layers: Sequence[Held], excess: Excess) -> list[Tensor]:
    """Return the victims, bool [batch, kv_heads, slots] per layer."""
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
        floor = numbers["head_floor" if held.state.spec.across_layers else "floor"]  # in tokens
        return shared_order(score, protection, floor) < over * held.rows.view(-1, 1, 1)
    return eviction_order(score, protection) < excess(protection.live, numbers) * held.rows.view(-1, 1, 1)


def _judged(held: Held) -> tuple[Tensor | float, Protection, dict[str, Tensor]]:
    """Return the slots' scores, their protection, and the layer's numbers."""
    state, view, protection = held.state, held.view(), Protection(held.position)
    numbers = state.settings.per_head(held.numbers)
    state.spec.torch_kernels.protect(view, protection, numbers)
    view.protected = protection.mask
    return _score(held, view), protection, _measured(held, view, numbers)


def _pooled_victims(layers: Sequence[Held]) -> list[Tensor]:
    """Return the victims of all layers and heads in one pool."""
    judged = [_judged(held) for held in layers]
    scores, protections, numbers = zip(*judged, strict=True)
    capacities, floors = ([own[name] for own in numbers] for name in ("capacity", "floor"))
    return sharing.pooled(scores, protections, capacities, floors, [held.rows for held in layers])


def _with_shares(layers: Sequence[Held]) -> list[Held]:
    """Return the layers with their shares of the budgets as capacities."""
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
    """Return the layer's worth for its share: float32 [batch]."""
    made = torch.as_tensor(held.state.spec.torch_kernels.weigh(held.view()), device=held.position.device).float()
    return made.reshape(-1).expand(len(held.position))


def _with_share(held: Held, share: Tensor) -> Held:
    """Return the layer with another capacity, [batch], and the floor of its heads that follows."""
    names, numbers = held.state.spec.numbers, held.numbers.clone()
    numbers[:, names.index("capacity")] = share
    if "head_floor" in names:
        rate = numbers[:, names.index("head_floor")]
        numbers[:, names.index("head_floor")] = torch.where(share.isfinite(), (share * rate).floor(), 0.0)
    return replace(held, numbers=numbers)


def _measured(held: Held, view: View, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers with the current budget, at least one token, if it depends on the data: [batch, kv_heads, 1]."""
    if not held.state.spec.measures:
        return numbers
    found = held.state.spec.torch_kernels.budget(view).squeeze(-1)
    tokens = torch.where(found >= 1, found.floor(), 1.0)  # NaN becomes 1
    return {**numbers, "capacity": torch.minimum(numbers["capacity"], tokens)}


def _score(held: Held, view: View) -> Tensor | float:
    """Return the slots' scores, and pass them to watchers."""
    score: Tensor | float = held.state.spec.torch_kernels.score(view)
    for watcher in _watchers:
        assert view.protected is not None
        watcher(held, score, view.protected)
    return score


def _common_victims(layers: Sequence[Held], excess: Excess) -> list[Tensor]:
    """Return the same victims for every head of every layer, by their mean score."""
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
    """Warn, once per cache, if a prompt ends with more protected tokens than the budget keeps.

    Args:
        layers: those that decide together, before eviction.
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
        give = partial(_warn_too_many, held, over, count, room)
        if held.later is not None:
            held.later.warnings.append((over.any(), give))
        elif bool(over.any()):
            give()
            return


def _warn_too_many(held: Held, over: Tensor, count: Tensor, room: Tensor) -> None:
    """Warn, once per cache, of the first KV head that protects more than its budget."""
    warned = held.state.warned
    if "protected" not in warned:
        warned.add("protected")
        row, head = over.nonzero()[0].tolist()
        warn(_too_many(held, row, int(count[row, head]), int(room[row, head])))


def _keeps_all(held: Held) -> bool:
    """Whether the host knows that the budget keeps the whole prompt, or all that is protected."""
    spec, settings = held.state.spec, held.state.settings
    if spec.measures:
        return False
    table = settings.table(held.numbers)
    if not spec.hard_cap and held.position.shape[-1] <= table.least_capacity:
        return True
    if spec.across_layers or not hasattr(spec.torch_kernels, "counts_protected"):
        return False
    numbers = settings.per_head(table.numbers)
    counts = [torch.as_tensor(count).clamp(min=0) for count in spec.torch_kernels.counts_protected(numbers)]
    return bool((torch.stack(torch.broadcast_tensors(*counts)).sum(0) <= _room(spec, numbers)).all())


def _protections(layers: Sequence[Held]) -> Iterator[tuple[Held, Protection]]:
    """Yield each layer's protection."""
    victims = layers[0].state.spec.victims
    for together in [layers] if victims == "layers" else [[held] for held in layers]:
        if victims == "own":
            yield from ((held, _noted(held, Protection(held.position))) for held in together)
            continue
        ballots = [_noted(held, Ballot(held.position)) for held in together]
        yield from ((held, agreed(ballots, own)) for own, held in enumerate(together))


def _noted(held: Held, protection: _Noted) -> _Noted:
    """Apply the layer's `keep` lines to `protection`."""
    held.state.spec.torch_kernels.protect(held.view(), protection, held.state.settings.per_head(held.numbers))
    return protection


def _protected_and_kept(held: Held, protection: Protection) -> tuple[Tensor, Tensor]:
    """Return the numbers of protected tokens and of those that can stay, [batch, kv_heads] each; [batch, 1] where heads share a budget."""
    numbers = _measured(held, held.view(), held.state.settings.per_head(held.numbers))
    count = protection.mask.sum(-1)
    room = _room(held.state.spec, numbers).squeeze(-1).expand(count.shape)
    if held.state.spec.across or held.state.spec.across_layers:
        return count.sum(1, keepdim=True), room.sum(1, keepdim=True)
    return count, room


def _room(spec: PolicySpec, numbers: dict[str, Tensor]) -> Tensor:
    """Return how many tokens can stay, in the shape of the numbers."""
    room = numbers["capacity"]
    if "max_drop" in numbers:
        room = room + torch.where(numbers["max_drop"] > 0, numbers["slack"], 0.0)
    return room - 1 if spec.hard_cap else room


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
