"""Rings: what each of a row's newest queries gave a slot, for reductions `over last N queries`.

A ring has `rows` places a slot, of which a row of the batch uses `size`. The query at text position j writes place j modulo
size at the slots that it sees; so no place ever has to be cleared, and which ones hold something can be told from positions
alone: a slot at position p is seen by the queries p, p + 1, ... up to the newest, or to the end of the model's window.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
