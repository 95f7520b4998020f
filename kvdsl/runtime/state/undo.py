"""Undo of the last tokens: a step's old numbers are saved before it and restored afterwards.

A step places its token in the first free slot of every KV head, may change any column, position and rank, and writes one place of
every ring. So a saved step holds one slot's rows, the small tensors whole, and the written places of each ring. For N slots, C columns
and R rings, that is per row and KV head

    (key_dim + value_dim) elements of the model's dtype, and 4 N (1 + C + R) bytes, 4 N more under compact positions.

Steps cost this copy only while a log records. Under `cap hard` the step evicts before it chooses the slot,
and in blocks it may free one for another row. Then all keys and values are saved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.state.order import FREE, free
from kvdsl.runtime.state.slots import SlotState


@dataclass(frozen=True)
class Before:
    """One layer before a token.

    Attributes:
        whole: tensors declared as `noted`, and the columns of one number per slot, by name.
        slot: int64 [batch, kv_heads, 1], the slot of the token; None if all slots are saved.
        keys, values: as stored, of that slot, [batch, kv_heads, 1, dim], or of all slots.
        rings: the old numbers of the places that the step writes, [batch, kv_heads, slots] per ring.
        filled: `Room.filled`.
    """

    whole: dict[str, Tensor]
    slot: Tensor | None
    keys: Tensor
    values: Tensor
    rings: tuple[Tensor, ...]
    filled: int

    @classmethod
    def of(cls, state: SlotState) -> Before:
        """Save what the state's next token may overwrite."""
        whole = {name: getattr(state, name).clone() for name, one in state.declared.items() if one.noted}
        whole["columns"] = state.columns[: len(state.spec.columns)].clone()
        unknown = state.spec.hard_cap or state.spec.in_blocks
        slot = None if unknown else (state.position == FREE).int().argmax(-1, keepdim=True)
        everything = torch.arange(state.slots, device=state.position.device)
        keys, values = state.layout.read(everything if slot is None else slot)
        rings = tuple(ring[place, rows].clone() for ring, place, rows in _ring_places(state, state.seen))
        return cls(whole, slot, keys, values, rings, state.room.filled)

    def undo(self, state: SlotState) -> None:
        """Restore the state in place. Its slots may have grown since."""
        slots = self.whole["position"].shape[-1]
        state.position.fill_(FREE)
        if state.spec.compact:
            state.rank.fill_(FREE)
        for name, old in self.whole.items():
            tensor = state.columns[: len(old)] if name == "columns" else getattr(state, name)
            (tensor[..., :slots] if name in ("columns", "position", "rank") else tensor).copy_(old)
        if self.slot is None:
            state.layout.write_all(state.position, self.keys, self.values)
        else:
            everywhere = torch.ones_like(state.seen, dtype=torch.bool).unsqueeze(1)
            state.layout.write(self.slot, self.keys, self.values, everywhere)
        for (ring, place, rows), old in zip(_ring_places(state, self.whole["seen"]), self.rings, strict=True):
            ring[place, rows, :, :slots] = old
        state.room.filled = self.filled
        state.forget_copies()

    def bytes(self) -> int:
        """Return the size in bytes."""
        held = (*self.whole.values(), self.keys, self.values, *self.rings, *(() if self.slot is None else (self.slot,)))
        return sum(tensor.nbytes for tensor in held)


def _ring_places(state: SlotState, seen: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each ring, and the place in it that the token after `seen` others writes, per row of the batch."""
    rings, rows = state.column_index.rings(state.columns), torch.arange(len(seen), device=seen.device)
    sizes = {size: state.settings.of_rows(state.numbers, size).long() for _, size in state.spec.rings}
    return [(rings[name], seen.long() % sizes[size], rows) for name, size in state.spec.rings if name in rings]


class UndoLog:
    """The last steps of one layer.

    Args:
        steps: how many to keep unless a forward asks for more.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._noted: deque[Before] = deque()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, state: SlotState, at_least: int = 0) -> None:
        """Save the state before a token. Beyond max(steps, at_least) the oldest step is dropped."""
        self._noted.append(Before.of(state))
        while len(self._noted) > max(self.steps, at_least):
            self._noted.popleft()

    def take_back(self, state: SlotState, steps: int) -> None:
        """Restore the state of `steps` steps ago, at most `len(self)`."""
        for _ in range(steps):
            self._noted.pop().undo(state)

    def forget(self) -> None:
        """Drop all steps."""
        self._noted.clear()

    def bytes(self) -> int:
        """Return the size in bytes."""
        return sum(step.bytes() for step in self._noted)


# -- without a log -----------------------------------------------------------------------------------------------------


def can_truncate(state: SlotState, length: int, left: int, prompt: int) -> bool:
    """Whether the first `left` of `length` tokens are the same as a cache of a text with these tokens only.

    That requires that every row holds all its tokens without padding, that queries leave no trace in earlier tokens, that the budget does
    not depend on the data, and that a prompt ending there has the same numbers.

    Args:
        prompt: tokens up to the end of the last prompt.
    """
    spec = state.spec
    learns = (spec.rings and not spec.forgets) or set(spec.column_rules) - {"token"}
    if not state.allocated or left < 1 or spec.sketches or spec.measures or learns:
        return False
    if not bool((state.seen == length).all()) or not bool(((state.position >= 0).sum(-1) == length).all()):
        return False
    if left >= prompt or not spec.numbers:
        return True
    numbers = state.settings.tried(float(max(left, state.expected)))
    return spec.when != "prefill" and numbers is not None and bool((numbers.to(state.numbers.device) == state.numbers).all())


def truncate(state: SlotState, left: int) -> None:
    """Keep the first `left` tokens only."""
    state.room.filled -= int(state.seen.max()) - left
    free(state.position, state.rank if state.spec.compact else None, state.position >= left)
    state.seen.fill_(left)
    state.layout.settled(state.position)
    state.forget_copies()
