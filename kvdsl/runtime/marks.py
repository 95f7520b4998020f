"""Spans: ranges of the text that the caller has marked, and the tokens in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvdsl.budget import is_whole
from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Linked, plain_tensors
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is

EVERY_ROW = -1
_NO_END = 2**31 - 1
_FIRST_ROOM = 8
"""Initial rows of a span's table; it doubles."""


class Marks(Linked):
    """The marked ranges of one cache by span, shared by its layers.

    A range is a row (`EVERY_ROW` for all), its first position and the position behind its last. Tokens may be marked before they come or
    while they are cached, and stay marked when they are taken back and come again.
    """

    def __init__(self) -> None:
        self._stretches: dict[str, list[tuple[int, int, int]]] = {}
        self._tables: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        """Copy the ranges into separate tables."""
        made = Marks()
        made._stretches = {name: list(found) for name, found in self._stretches.items()}
        memo[id(self)] = made
        return made

    def forget(self) -> None:
        """Remove all marks."""
        self._stretches.clear()
        self._fill()

    def add(self, spec: PolicySpec, name: str, start: int, end: int | None, row: int | None, rows: int) -> None:
        """Mark a range. It closes an open range with the same start.

        Raises:
            KvdslError: if the policy has no such span, or the range is invalid.
        """
        refuse_unknown(spec, name)
        for what, value in (("start", start), ("end", end), ("row", row)):
            if not is_whole(value, 0) and (value is not None or what == "start"):
                raise KvdslError(f"`{what}` is {value!r}; give a place in the text of one row, 0 or more")
        if end is not None and end <= start:
            raise KvdslError(f"a span from {start} to {end} holds no token: `end` is the place behind its last one")
        if row is not None and rows > 0 and row >= rows:
            raise KvdslError(f"there is no row {row}: the cache holds {rows} (0 to {rows - 1})")
        found = self._stretches.setdefault(name, [])
        at = EVERY_ROW if row is None else row
        if (at, start, _NO_END) in found:
            found.remove((at, start, _NO_END))
        found.append((at, start, _NO_END if end is None else end))
        self._fill()

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row rows[i]."""
        if not self._stretches:
            return
        source = rows.tolist()
        for name, found in self._stretches.items():
            every = [one for one in found if one[0] == EVERY_ROW]
            moved = [(row, *one[1:]) for row, old in enumerate(source) for one in found if one[0] == old]
            self._stretches[name] = every + moved
        self._fill()

    def of_tokens(self, name: str, position: Tensor) -> Tensor:
        """Return whether positions, int32 [batch, heads, tokens], lie in a span: float32 of the same shape."""
        table = self._table(name, position.device)
        at, first, end = table[:, 0], table[:, 1], table[:, 2]
        row = torch.arange(len(position), device=position.device)[:, None, None, None]
        place = position[..., None]
        inside = (place >= first) & (place < end) & ((at == EVERY_ROW) | (at == row))
        return inside.any(-1).float()

    def holds(self, name: str, place: int) -> bool:
        """Whether the place lies in a span that is marked in every row."""
        return any(start <= place < end for _, start, end in self._stretches.get(name, ()))

    def mark_cached(self, state: SlotState) -> None:
        """Update the span columns of a layer's cached tokens."""
        if state.allocated and state.spec.spans:
            columns = state.column_index.single(state.columns)
            with plain_tensors():
                for name, column in state.spec.spans:
                    columns[column].copy_(self.of_tokens(name, state.position))

    def _table(self, name: str, device: torch.device) -> Tensor:
        """Return a span's table, int32 [ranges, 3]; unused rows are empty ranges."""
        table = self._tables.get(name)
        if table is None or table.device != device:
            with plain_tensors():
                table = torch.zeros(_FIRST_ROOM, 3, dtype=torch.int32, device=device)
            stays_where_it_is(table)
            self._tables[name] = table
            self._fill()
        return self._tables[name]

    def _fill(self) -> None:
        """Write the ranges into the tables, in place while they have room."""
        for name, table in self._tables.items():
            found = self._stretches.get(name, [])
            with plain_tensors():
                if len(found) > len(table):
                    table = table.new_zeros(2 ** (len(found) - 1).bit_length(), 3)
                    stays_where_it_is(table)
                    self._tables[name] = table
                table.zero_()
                if found:
                    table[: len(found)] = torch.tensor(found, dtype=torch.int32).to(table.device)


def refuse_unknown(spec: PolicySpec, name: str) -> None:
    """Raise KvdslError for a span that the policy does not read."""
    names = [known for known, _ in spec.spans]
    if name not in names:
        has = f"it reads {', '.join(f'`{known}`' for known in names)}" if names else "it reads none"
        raise KvdslError(f"{spec.name} has no span `{name}` that could be marked: {has}")
