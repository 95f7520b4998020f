"""Whether what was measured is the policy's doing: what its caches held, and whether anything ever left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdsl.runtime.state.slots import SlotState

KEYS = ("evicted", "most_held", "note")
"""What `Usage.row` adds to a row."""


class Usage:
    """What the caches of one measurement held when each run ended.

    Attributes:
        evicted: whether any KV head has lost a token; None if no cache of kvdsl was seen.
        skipped: whether a selection left out a token.
        most_held: the most tokens that a KV head held.
    """

    def __init__(self) -> None:
        self.evicted: bool | None = None
        self.skipped = False
        self.most_held: int | None = None
        self._decides: set[str] = set()

    def see(self, cache: Any) -> None:
        """A run has ended with this cache; those that are not kvdsl's tell nothing."""
        for index in getattr(cache, "managed", ()):
            self.see_layer(cache.layers[index].state)

    def see_layer(self, state: SlotState) -> None:
        """The same of one layer."""
        if not state.allocated:
            return
        live = (state.position >= 0).sum(-1)
        self.evicted = bool(self.evicted) or bool((live < state.seen[:, None]).any())
        self.most_held = max(self.most_held or 0, int(live.max()))
        if state.spec.bounded:
            self._decides.add("evicts")
        if state.spec.selects:
            self._decides.add("selects")
            count = state.settings.per_head(state.numbers)["select"][..., 0]
            self.skipped |= bool((live > count).any())

    @property
    def note(self) -> str | None:
        """What a reader must know of a row: that the policy did nothing, so that the full cache was measured."""
        if self.evicted or self.skipped or not self._decides:
            return None
        what = "never evicted" if "evicts" in self._decides else "never selected"
        return f"{what}, {self.most_held} tokens held"

    def row(self) -> dict[str, Any]:
        """`evicted, most_held, note`."""
        return {"evicted": self.evicted, "most_held": self.most_held, "note": self.note}


def without_usage(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without what `Usage.row` adds."""
    return {name: value for name, value in row.items() if name not in KEYS}


def notes(rows: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The rows that a reader must know something of, without their usage, and what."""
    return [(without_usage(row), str(row["note"])) for row in rows if row.get("note")]
