"""Taking back the last tokens: what a step overwrites is noted before it, and put back afterwards.

A step places its token in the first free slot of every KV head (design corner of all backends), changes columns, positions and
ranks anywhere, and one place of every ring. So a noted step is the rows of one slot, the small tensors whole, and of a ring the
places that the step writes: for N slots, C columns and R rings, per row and KV head,

    (key_dim + value_dim) elements of the model's dtype, and 4 N (1 + C + R) bytes, 4 N more under compact positions.

That is copied at every step while somebody records, and nothing otherwise. Under `cap hard` the step itself chooses the slot, when
it makes room; then all keys and values are noted.
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
    """One layer before a token came.

    Attributes:
        whole: by name what is declared so, and the columns of one number a slot.
        slot: int64 [batch, kv_heads, 1], where the token goes; None where all slots are noted.
        keys, values: as they are stored, of that slot [batch, kv_heads, 1, dim]; of all slots where there is none.
        rings: what the step's places of every ring hold, [batch, kv_heads, slots] each.
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
        """Note what the state's next token may overwrite."""
        whole = {name: getattr(state, name).clone() for name, one in state.declared.items() if one.noted}
        whole["columns"] = state.columns[: len(state.spec.columns)].clone()
        unknown = state.spec.hard_cap or state.spec.in_blocks
        slot = None if unknown else (state.position == FREE).int().argmax(-1, keepdim=True)
        everything = torch.arange(state.slots, device=state.position.device)
        keys, values = state.layout.read(everything if slot is None else slot)
        rings = tuple(ring[place, rows].clone() for ring, place, rows in _ring_places(state, state.seen))
        return cls(whole, slot, keys, values, rings, state.room.filled)

    def undo(self, state: SlotState) -> None:
        """Put it back, in place; the slots may have grown since."""
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
        """What the tensors occupy."""
        held = (*self.whole.values(), self.keys, self.values, *self.rings, *(() if self.slot is None else (self.slot,)))
        return sum(tensor.nbytes for tensor in held)


def _ring_places(state: SlotState, seen: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every ring, and the place in it that the token after `seen` others writes in each row of the batch."""
    rings, rows = state.column_index.rings(state.columns), torch.arange(len(seen), device=seen.device)
    sizes = {size: state.settings.of_rows(state.numbers, size).long() for _, size in state.spec.rings}
    return [(rings[name], seen.long() % sizes[size], rows) for name, size in state.spec.rings if name in rings]


class UndoLog:
    """The last steps of one layer.

    Args:
        steps: how many are kept, where a forward does not ask for more.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._noted: deque[Before] = deque()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, state: SlotState, at_least: int = 0) -> None:
        """Note the state before a token comes; the oldest step is dropped when there are more than `steps` and `at_least`."""
        self._noted.append(Before.of(state))
        while len(self._noted) > max(self.steps, at_least):
            self._noted.popleft()

    def take_back(self, state: SlotState, steps: int) -> None:
        """Make the state what it was that many steps ago, at most `len(self)`."""
        for _ in range(steps):
            self._noted.pop().undo(state)

    def forget(self) -> None:
        """No step before now can be taken back."""
        self._noted.clear()

    def bytes(self) -> int:
        """What it occupies."""
        return sum(step.bytes() for step in self._noted)


# -- without a log -----------------------------------------------------------------------------------------------------


def can_truncate(state: SlotState, length: int, left: int, prompt: int) -> bool:
    """Whether the first `left` of `length` tokens are what a text of them alone would have left.

    So it is where every row holds all its tokens, none of them padding, where no query leaves anything in those before it,
    where the budget does not read them, and where a prompt that ends there has the same numbers.

    Args:
        prompt: tokens up to the last prompt's end.
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
    """Have the first `left` tokens only."""
    state.room.filled -= int(state.seen.max()) - left
    free(state.position, state.rank if state.spec.compact else None, state.position >= left)
    state.seen.fill_(left)
    state.layout.settled(state.position)
    state.forget_copies()
