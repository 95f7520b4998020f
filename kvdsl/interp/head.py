"""The state of one KV head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdsl.interp.evaluate import Array, Indices
from kvdsl.interp.memory import Columns, Memory


@dataclass
class Head:
    """What one KV head has cached. Every slot here is live; new ones come last.

    Attributes:
        key, value: [n, D], [n, Dv].
        position: [n] places in the text, each once, in any order.
        memory: what the queries gave the slots.
        seen: the row's tokens so far: the position of its next token.
        sketch: the dims of the newest sketch, ascending; None before the first.
    """

    key: Array
    value: Array
    position: Indices
    memory: Memory
    seen: int = 0
    sketch: Indices | None = None

    @property
    def live(self) -> int:
        """How many slots hold a token."""
        return len(self.position)

    @property
    def columns(self) -> dict[str, Array]:
        """The state columns by name, [n] each and [n, N] of a ring; none where the memory is a history."""
        return dict(self.memory.values) if isinstance(self.memory, Columns) else {}

    def append(self, key: Array, value: Array) -> None:
        """Put L tokens, [L, D] and [L, Dv], into new slots; the memory has to be told by the caller."""
        self.key = np.concatenate([self.key, key])
        self.value = np.concatenate([self.value, value])
        self.position = np.concatenate([self.position, self.seen + np.arange(len(key))])
        self.seen += len(key)

    def drop(self, gone: Indices) -> None:
        """Free these slots; the others keep their order."""
        kept = np.delete(np.arange(self.live), gone)
        self.key, self.value, self.position = self.key[kept], self.value[kept], self.position[kept]
        self.memory.keep(kept)

    def clone(self) -> Head:
        """An independent copy."""
        return Head(self.key.copy(), self.value.copy(), self.position.copy(), self.memory.clone(), self.seen, self.sketch)
