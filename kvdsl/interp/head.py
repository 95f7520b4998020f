"""The state of one KV head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvdsl.interp.evaluate import Array, Indices
from kvdsl.interp.memory import Columns, Memory


@dataclass
class Head:
    """The cache of one KV head. All slots are live, the newest last.

    Attributes:
        key, value: [n, D], [n, Dv].
        position: [n] positions in the text, each once, in any order.
        memory: what past queries left per slot.
        seen: the row's tokens so far, which is the position of the next token.
        sketch: the dims of the newest sketch, ascending; None before the first.
        given: [n] the caller's values per token, by name.
        text: the prompt's queries, as position and query heads [G, D], if the score reads them, until it settles.
        group: the number of query heads.
        prompt_from: the position of the last prompt's first token.
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
        """The number of slots."""
        return len(self.position)

    @property
    def columns(self) -> dict[str, Array]:
        """The state columns by name, [n] each and [n, N] for a ring; empty if the memory is a history."""
        return dict(self.memory.values) if isinstance(self.memory, Columns) else {}

    def append(self, key: Array, value: Array, given: Mapping[str, Array]) -> None:
        """Append L tokens, [L, D], [L, Dv] and [L] each. The caller updates the memory."""
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
        """Return an independent copy."""
        given = {name: values.copy() for name, values in self.given.items()}
        return Head(
            self.key.copy(), self.value.copy(), self.position.copy(), self.memory.clone(), self.seen, self.sketch, given,
            list(self.text), self.group, self.prompt_from,
        )  # fmt: skip
