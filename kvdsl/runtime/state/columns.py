"""Which rows of a layer's table of columns hold what: one for each state column, and behind these the rings.

A ring is what each of a row's newest queries gave a slot, for reductions `over last N queries`. It has `rows` places a slot, of which a
row of the batch uses `size`. The query at text position j writes place j modulo size at the slots that it sees; so no place ever has to
be cleared, and which ones hold something can be told from positions alone: a slot at position p is seen by the queries p, p + 1, ... up
to the newest, or to the end of the model's window.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.room import whole
from kvdsl.runtime.state.settings import Settings


class ColumnIndex:
    """The rows of a table of columns, [rows, batch, kv_heads, slots].

    Attributes:
        ring_sizes: rows of each ring; none before a prompt tells.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self._columns = spec.columns
        self._rings = spec.rings
        self.ring_sizes: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self._columns) + sum(self.ring_sizes)

    def size_rings(self, settings: Settings, numbers: Tensor, cached: Tensor | None) -> None:
        """Find how many rows each ring needs: as many as the row with the longest history.

        Args:
            cached: the numbers of what is cached already, or None.

        Raises:
            KvdslError: if a history that is cached already has another size.
        """
        sizes = [settings.table(numbers).named[size] for _, size in self._rings]
        if cached is not None and self._rings:
            known = settings.named(cached.cpu())
            if any(bool((known[name] != new).any()) for (_, name), new in zip(self._rings, sizes, strict=True)):
                raise KvdslError(
                    f"{settings.spec.name} remembers a number of queries that depends on the prompt, and more of a prompt came: pass "
                    f"the prompt in one forward, and call `cache.reset()` before a later one"
                )
        self.ring_sizes = tuple(whole(float(size.max()), "queries to remember") for size in sizes)

    def single(self, columns: Tensor) -> dict[str, Tensor]:
        """The columns of one number a slot by name, [batch, kv_heads, slots] each, as views of the table."""
        return dict(zip(self._columns, columns[: len(self._columns)], strict=True))

    def rings(self, columns: Tensor) -> dict[str, Tensor]:
        """The rings by name, [size, batch, kv_heads, slots] each, as views of the table; none if they went with the prompt."""
        if len(columns) < self.rows:
            return {}
        parts = columns[len(self._columns) :].split(list(self.ring_sizes)) if self.ring_sizes else ()
        return {name: part for (name, _), part in zip(self._rings, parts, strict=True)}

    def ring_rows(self) -> Tensor:
        """The row with which each ring begins, int32 [rings]."""
        starts = accumulate(self.ring_sizes[:-1], initial=len(self._columns)) if self.ring_sizes else ()
        return torch.tensor(list(starts), dtype=torch.int32, device="cpu")


def size_name(ring: str) -> str:
    """The name of the number that is the ring's size."""
    return f"size_{ring}"


def valid(
    rows: int, size: Tensor, newest: Tensor, position: Tensor, window: int | None, since: Tensor | None = None
) -> Tensor:
    """Which places hold what a query that saw the slot gave: bool [rows, batch, kv_heads, slots].

    Args:
        size: [batch, 1, 1], whole and at least 1.
        newest: [batch, 1, 1], the newest query's position.
        position: [batch, kv_heads, slots].
        window: queries see this many tokens, or None.
        since: the first query that counts, [batch, 1, 1]; None for all.
    """
    size, newest, position = size.long(), newest.long(), position.long()
    place = torch.arange(rows, device=position.device).view(-1, 1, 1, 1)
    query = newest - (newest - place) % size  # the newest one that writes the place
    found = (place < size) & (query >= position)
    if since is not None:
        found &= query >= since
    return found if window is None else found & (query < position + window)


def writers(rows: int, size: Tensor, newest: Tensor) -> Tensor:
    """Which of a block's queries writes each place, the newest of those that do: int64 [batch, rows], -1 for none.

    Args:
        size: [batch, 1], whole and at least 1.
        newest: [batch, queries], the queries' positions; negative for padding.
    """
    size, newest = size.long(), newest.long()
    latest = (newest >= 0) & (newest > newest.amax(-1, keepdim=True) - size)
    place = torch.where(latest, newest % size, rows)  # the others share a place that is cut off again
    queries = torch.arange(newest.shape[1], device=newest.device).expand_as(newest)
    found = torch.full((len(newest), rows + 1), -1, device=newest.device).scatter(1, place, queries)
    return found[:, :rows]
