"""Several states: those of a cache's layers, and those of a serving engine's requests, which have a place each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Weakly
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.shared import Choices, Together
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import EMPTY


def slot_state(spec: PolicySpec, params: Mapping[str, float | None], **where: Any) -> SlotState:
    """Create the slots of one layer in the layout that the policy needs. Further arguments are those of `SlotState`."""
    return SlotState(spec, params, layout=_layout(spec), **where)


def _layout(spec: PolicySpec) -> Layout:
    if spec.in_blocks:
        return Blocks()
    kept_beside = spec.compact or spec.selects
    lengths_differ = (spec.across and spec.when == "prefill") or spec.heads_differ
    return Flat() if lengths_differ and not kept_beside else SlotAfterSlot()


def introduce(states: Iterable[SlotState]) -> None:
    """Link the layers of a cache: they share warnings, joint decisions, and selections that some layers make for others.

    Raises:
        KvdslError: if a layer would reuse the selection of a layer that is not among them.
    """
    known: dict[int, SlotState] = {state.layer: state for state in states}
    warned: set[str] = set()
    together: Together[SlotState, Any] = Together()
    for state in known.values():
        state.warned = warned
        if state.spec.victims == "layers" or state.spec.across_layers:
            together.states.append(Weakly(state))
            state.together = together
    made: dict[int, Choices] = {}
    for layer, state in known.items():
        chooser = state.settings.chooser()
        if chooser < 0:
            continue
        if chooser not in known:
            raise KvdslError(
                f"layer {layer} would attend to what layer {chooser} chooses, but {state.spec.name} does not serve that one, whose "
                f"window is the model's own: name another layer in `from layers`"
            )
        state.choices = made.setdefault(chooser, Choices(chooser))


# -- requests of an engine ----------------------------------------------------------------------------------------------


def put(left: SlotState, rows: Tensor, places: Mapping[str, Tensor], slots: int) -> None:
    """Copy each row of a state into its place. Derived tensors (`EMPTY`) are not copied.

    Every number of a place is overwritten, so that nothing of an earlier request remains.

    Args:
        rows: int64 [batch of `left`], the number of each row's place.
        places: by name, the tensors of a state with one row, stacked: [places, *shape].
        slots: per KV head of a place.

    Raises:
        KvdslError: if a row holds more tokens than `slots`.
    """
    if left.room.filled > slots:
        raise KvdslError(f"{left.spec.name} has kept {left.room.filled} tokens of a prompt, and a page holds {slots}")
    found = left.tensors()
    for name in places.keys() - EMPTY.keys():
        place, tensor, declared = places[name], found[name].unsqueeze(0), left.declared[name]
        dim = declared.slots
        if declared.batch is not None:  # the state's batch axis becomes the axis of places
            tensor = tensor.transpose(0, declared.batch + 1)
        if dim is None:
            place[rows] = tensor
            continue
        held = min(left.slots, slots)  # kept tokens lie in the first slots
        place.narrow(dim + 1, 0, held)[rows] = tensor.narrow(dim + 1, 0, held)
        place.narrow(dim + 1, held, slots - held)[rows] = FREE if name in ("position", "rank") else 0


def places_of(state: SlotState) -> dict[str, Tensor]:
    """Return views of the state's tensors as places, for `put`."""
    batches = {name: one.batch for name, one in state.declared.items() if one.batch is not None}
    found = state.tensors()
    return {
        name: found[name].unsqueeze(batch + 1).movedim(batch, 0) for name, batch in batches.items() if found[name].numel()
    }
