"""Copies of a state's rows in separate places, as a serving engine stores them: one place per request."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import EMPTY


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
