"""Rows of a layer's table of columns: one per state column, then the rings.

A ring stores what each of a row's newest queries gave a slot, for reductions `over last N queries`. It has `rows` places per slot; a
row of the batch uses the first `size` of them. The query at text position j writes place j modulo size of the slots that it sees. Places
are never cleared. Positions alone tell which places are valid: a slot at position p is seen by queries p, p + 1, ... up to the newest,
or to the end of the model's window.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.room import whole
from kvdsl.runtime.state.settings import Settings


class ColumnIndex:
    """The rows of a table of columns, [rows, batch, kv_heads, slots].

    Attributes:
        ring_sizes: rows of each ring; empty before the first prompt.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self._columns = spec.columns
        self._rings = spec.rings
        self.ring_sizes: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return len(self._columns) + sum(self.ring_sizes)

    def size_rings(self, settings: Settings, numbers: Tensor, cached: Tensor | None) -> None:
        """Set each ring's number of rows: the largest size in the batch.

        Args:
            cached: the numbers of the tokens already cached, or None.

        Raises:
            KvdslError: if a cached ring has another size.
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
        """Return the columns of one number per slot by name, [batch, kv_heads, slots] each, as views."""
        return dict(zip(self._columns, columns[: len(self._columns)], strict=True))

    def rings(self, columns: Tensor) -> dict[str, Tensor]:
        """Return the rings by name, [size, batch, kv_heads, slots] each, as views; none if they were dropped with the prompt."""
        if len(columns) < self.rows:
            return {}
        parts = columns[len(self._columns) :].split(list(self.ring_sizes)) if self.ring_sizes else ()
        return {name: part for (name, _), part in zip(self._rings, parts, strict=True)}

    def ring_rows(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the first row of each ring, int32 [rings]. Layers share it."""
        return _ring_rows(len(self._columns), self.ring_sizes, device)


@lru_cache
def _ring_rows(columns: int, sizes: tuple[int, ...], device: torch.device | str) -> Tensor:
    starts = accumulate(sizes[:-1], initial=columns) if sizes else ()
    with plain_tensors():
        return torch.tensor(list(starts), dtype=torch.int32, device=device)


def size_name(ring: str) -> str:
    """Return the name of the number that is the ring's size."""
    return f"size_{ring}"


def valid(
    rows: int, size: Tensor, newest: Tensor, position: Tensor, window: int | None, since: Tensor | None = None
) -> Tensor:
    """Return which places hold the contribution of a query that saw the slot: bool [rows, batch, kv_heads, slots].

    Args:
        size: [batch, 1, 1], whole and at least 1.
        newest: [batch, 1, 1], the newest query's position.
        position: [batch, kv_heads, slots].
        window: the number of tokens that a query sees, or None.
        since: [batch, 1, 1], the first query that counts; None for all.
    """
    size, newest, position = size.long(), newest.long(), position.long()
    place = torch.arange(rows, device=position.device).view(-1, 1, 1, 1)
    query = newest - (newest - place) % size  # the newest query that writes this place
    found = (place < size) & (query >= position)
    if since is not None:
        found &= query >= since
    return found if window is None else found & (query < position + window)


def writers(rows: int, size: Tensor, newest: Tensor) -> Tensor:
    """Return which of a block's queries writes each place last: int64 [batch, rows], -1 for none.

    Args:
        size: [batch, 1], whole and at least 1.
        newest: [batch, queries], the queries' positions; negative for padding.
    """
    size, newest = size.long(), newest.long()
    latest = (newest >= 0) & (newest > newest.amax(-1, keepdim=True) - size)
    place = torch.where(latest, newest % size, rows)  # others go to an extra place, dropped below
    queries = torch.arange(newest.shape[1], device=newest.device).expand_as(newest)
    found = torch.full((len(newest), rows + 1), -1, device=newest.device).scatter(1, place, queries)
    return found[:, :rows]
