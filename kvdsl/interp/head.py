"""The state of one KV head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        given: [n] what the caller gave of the tokens, by name.
        text: the prompt's queries, where the score reads them until it settles: the place of each, and its query heads, [G, D].
        group: how many query heads it serves.
        prompt_from: the place of the last prompt's first token.
    """

    key: Array
    value: Array
    position: Indices
    memory: Memory
    seen: int = 0
    sketch: Indices | None = None
    given: dict[str, Array] = field(default_factory=dict)
    text: list[tuple[int, Array]] = field(default_factory=list)
    group: int = 1
    prompt_from: int = 0

    @property
    def live(self) -> int:
        """How many slots hold a token."""
        return len(self.position)

    @property
    def columns(self) -> dict[str, Array]:
        """The state columns by name, [n] each and [n, N] of a ring; none where the memory is a history."""
        return dict(self.memory.values) if isinstance(self.memory, Columns) else {}

    def append(self, key: Array, value: Array, given: Mapping[str, Array]) -> None:
        """Put L tokens, [L, D], [L, Dv] and [L] each, into new slots; the memory has to be told by the caller."""
        before = {name: self.given.get(name, np.full(self.live, np.nan)) for name in given}
        self.given = {name: np.concatenate([before[name], values]) for name, values in given.items()}
        self.key = np.concatenate([self.key, key])
        self.value = np.concatenate([self.value, value])
        self.position = np.concatenate([self.position, self.seen + np.arange(len(key))])
        self.seen += len(key)

    def drop(self, gone: Indices) -> None:
        """Free these slots; the others keep their order."""
        kept = np.delete(np.arange(self.live), gone)
        self.key, self.value, self.position = self.key[kept], self.value[kept], self.position[kept]
        self.given = {name: values[kept] for name, values in self.given.items()}
        self.memory.keep(kept)

    def clone(self) -> Head:
        """An independent copy."""
        given = {name: values.copy() for name, values in self.given.items()}
        return Head(
            self.key.copy(), self.value.copy(), self.position.copy(), self.memory.clone(), self.seen, self.sketch, given,
            list(self.text), self.group, self.prompt_from,
        )  # fmt: skip
