"""The tokens that a cache has received, to detect a text that does not continue them."""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN = -1
"""A token without a known id: from a compiled forward, or from a part of the model without hooks."""

_LEAST = 256
"""Initial room, in tokens."""


class Text:
    """Ids of the received tokens, 4 bytes each, on the model's device, so that generation does not wait for them.

    A token that came as an embedding is identified by the bits of its first number, as a negative number.
    """

    def __init__(self) -> None:
        self._ids = torch.empty(0, 0, dtype=torch.int32)
        self._end = 0

    def note(self, ids: Tensor | None, embeddings: Tensor | None, at: int) -> None:
        """Record a forward's tokens from column `at` on: ids [batch, tokens], or embeddings [batch, tokens, any]."""
        tokens = _tokens(ids, embeddings)
        if tokens is None:
            return
        rows, end = tokens.shape[0], at + tokens.shape[1]
        if rows != self._ids.shape[0] or end > self._ids.shape[1] or tokens.device != self._ids.device:
            self._make_room(rows, end, tokens.device)
        if self._end < at:
            self._ids[:, self._end : at] = UNKNOWN
        self._ids[:, at:end] = tokens
        self._end = end

    def _make_room(self, rows: int, end: int, device: torch.device) -> None:
        """Allocate room for `end` tokens per row. Tokens of another batch become unknown."""
        old = self._ids
        with torch.inference_mode(False):
            self._ids = torch.full((rows, max(_LEAST, 2 * end)), UNKNOWN, dtype=torch.int32, device=device)
        if rows == old.shape[0]:
            self._ids[:, : self._end] = old[:, : self._end]

    def differs(self, ids: Tensor | None, embeddings: Tensor | None, length: int) -> int | None:
        """Return the first of the `length` cached tokens in which this text differs; None if it continues them."""
        tokens = _tokens(ids, embeddings)
        if tokens is None or self._ids.shape[0] % tokens.shape[0]:
            return None
        known, new = self._both(tokens, length)
        new = new.repeat_interleave(len(known) // len(new), 0)  # beams and several returned sequences
        wrong = _differing(known, new).any(0)
        return int(wrong.int().argmax()) if bool(wrong.any()) else None

    def continued_rows(self, ids: Tensor | None, embeddings: Tensor | None, length: int) -> list[int | None]:
        """Return for every row of this text the first cached row that it continues, or None; `length` tokens are cached."""
        tokens = _tokens(ids, embeddings)
        if tokens is None:
            return []
        known, new = self._both(tokens, length)
        continued = ((~_differing(known, row).any(1)).nonzero().flatten().tolist() for row in new)
        return [next(iter(rows), None) for rows in continued]

    def _both(self, tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return cached tokens and this text's tokens, [batch, tokens], at the same columns."""
        count = min(self._end, length, tokens.shape[1])
        return self._ids[:, :count], tokens[:, :count].to(self._ids.device, torch.int32)

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row rows[i]."""
        with torch.inference_mode(False):
            self._ids = self._ids.index_select(0, rows.to(self._ids.device)) if len(self._ids) else self._ids

    def forget(self) -> None:
        self._end = 0


def _differing(known: Tensor, new: Tensor) -> Tensor:
    """Return where known tokens differ: bool [rows, tokens]."""
    return (known != new) & (known != UNKNOWN) & ((known < 0) == (new < 0))


def repeats_rows(ids: Tensor | None, embeddings: Tensor | None) -> bool:
    """Whether a text contains a row twice, as in beam search."""
    tokens = _tokens(ids, embeddings)
    return tokens is not None and len(tokens.unique(dim=0)) < len(tokens)


def _tokens(ids: Tensor | None, embeddings: Tensor | None) -> Tensor | None:
    """Return a number per token, [batch, tokens]; None for other inputs."""
    if ids is not None:
        return ids if ids.ndim == 2 and not ids.is_floating_point() else None
    if embeddings is None or embeddings.ndim != 3 or not embeddings.shape[2]:
        return None
    bits = embeddings.detach()[..., 0].float().view(torch.int32)
    return (bits >> 1) | torch.iinfo(torch.int32).min
