"""Rows of a state that are put into places of their own, as a serving engine keeps them: a place holds what one request has left."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import EMPTY


def put(left: SlotState, rows: Tensor, places: Mapping[str, Tensor], slots: int) -> None:
    """Copy the rows of a state, each to its place. What is made from others (`EMPTY`) is not copied.

    Every number there is written, so that nothing of the requests that had the places before can be seen.

    Args:
        rows: int64 [batch of `left`], the places' numbers.
        places: by name what a state of one row has, one for each place: [places, *shape].
        slots: per KV head of a place.

    Raises:
        KvdslError: if a row holds more than that.
    """
    if left.room.filled > slots:
        raise KvdslError(f"{left.spec.name} has kept {left.room.filled} tokens of a prompt, and a page holds {slots}")
    found = left.tensors()
    for name in places.keys() - EMPTY.keys():
        place, tensor, declared = places[name], found[name].unsqueeze(0), left.declared[name]
        dim = declared.slots
        if declared.batch is not None:  # a row goes to where its place has its only one
            tensor = tensor.transpose(0, declared.batch + 1)
        if dim is None:
            place[rows] = tensor
            continue
        held = min(left.slots, slots)  # those who stayed lie in front
        place.narrow(dim + 1, 0, held)[rows] = tensor.narrow(dim + 1, 0, held)
        place.narrow(dim + 1, held, slots - held)[rows] = FREE if name in ("position", "rank") else 0


def places_of(state: SlotState) -> dict[str, Tensor]:
    """The rows of a state as places; its tensors, seen otherwise."""
    batches = {name: one.batch for name, one in state.declared.items() if one.batch is not None}
    found = state.tensors()
    return {
        name: found[name].unsqueeze(batch + 1).movedim(batch, 0) for name, batch in batches.items() if found[name].numel()
    }
