"""Position ids compared with token counts: compact positions rotate keys by the count.

A constant offset is allowed, because only distances matter to rotated keys. Gaps are not: behind an image whose tokens share positions
(M-RoPE), behind padding that the model counts, and between packed texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError

_UNKNOWN = torch.iinfo(torch.int64).min
"""The offset of a row without tokens so far."""


class Counting:
    """The offset between positions and counts for each axis of positions and each row, shared by the layers of a cache.

    Attributes:
        heard: position ids of the coming forward, as passed to the text model, or None.
    """

    def __init__(self) -> None:
        self.heard: Tensor | None = None
        self._offset: Tensor | None = None

    def take(self, positions: Tensor | None) -> Tensor | None:
        """Return this forward's position ids: the recorded ones, which may have axes (M-RoPE), else those passed to attention."""
        heard, self.heard = self.heard, None
        return positions if heard is None else heard

    def check(self, positions: Tensor, real: Tensor | None, seen: Tensor, policy: str) -> None:
        """Check a forward's positions, padding excluded.

        Args:
            positions: int [batch or 1, tokens], or [axes, batch or 1, tokens].
            real: bool [batch, tokens], False for padding, or None.
            seen: int [batch], tokens before this forward.

        Raises:
            KvdslError: if positions do not continue those of the row's last tokens one by one.
        """
        positions = positions.to(seen.device, torch.int64).reshape(-1, *positions.shape[-2:])
        if self._goes_on(positions, real, seen):
            return
        places = _places(real, seen, positions.shape[2])
        offset = positions - places
        least, most, came = _extent(offset, real)
        before = self._before(least, seen)
        strays = (least < most) | ((before != _UNKNOWN) & came & (least != before))
        if bool(strays.any()):
            expected = torch.where(before == _UNKNOWN, _first(offset, real), before)
            raise _refusal(positions, places, offset != expected[..., None], real, strays, policy)
        self._offset = torch.where(came, least, before)

    def _goes_on(self, positions: Tensor, real: Tensor | None, seen: Tensor) -> bool:
        """Return True quickly in the common case: one token per row, at the expected position."""
        if positions.shape[2] > 1 or self._offset is None or not torch.equal(positions[..., 0] - seen, self._offset):
            return False
        return real is None or bool(real.all())

    def _before(self, like: Tensor, seen: Tensor) -> Tensor:
        """Return the offsets so far, int64 [axes, batch]."""
        before, known = torch.full_like(like, _UNKNOWN), self._offset
        if known is not None and known.shape[1] == like.shape[1]:
            axes = min(len(known), len(like))  # the last axes rotate keys; a first one may number packed texts
            before[-axes:] = known[-axes:]
        return before.masked_fill(seen == 0, _UNKNOWN)

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row rows[i]."""
        if self._offset is not None:
            self._offset = self._offset.index_select(1, rows.to(self._offset.device))

    def forget(self) -> None:
        self.heard = self._offset = None


def _places(real: Tensor | None, seen: Tensor, tokens: int) -> Tensor:
    """Return every token's count, int64 [batch, tokens]; arbitrary for padding."""
    if real is None:
        return seen[:, None] + torch.arange(tokens, device=seen.device)
    return seen[:, None] + real.cumsum(1) - 1


def _extent(offset: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest and largest offset per row, int64 [axes, batch], and which rows have tokens, bool [batch]."""
    if real is None:
        return offset.amin(2), offset.amax(2), torch.ones_like(offset[0, :, 0], dtype=torch.bool)
    limits = torch.iinfo(torch.int64)
    return offset.masked_fill(~real, limits.max).amin(2), offset.masked_fill(~real, limits.min).amax(2), real.any(1)


def _first(offset: Tensor, real: Tensor | None) -> Tensor:
    """Return the offset of each row's first token, int64 [axes, batch]."""
    if real is None:
        return offset[..., 0]
    return offset.gather(2, real.int().argmax(1)[None, :, None].expand(len(offset), -1, 1))[..., 0]


def _refusal(
    positions: Tensor, places: Tensor, wrong: Tensor, real: Tensor | None, strays: Tensor, policy: str
) -> KvdslError:
    """Return the error for the first wrong token.

    Args:
        positions: int64 [axes, batch or 1, tokens].
        places: int64 [batch, tokens].
        wrong: bool [axes, batch, tokens], tokens with another offset than the row's first.
        strays: bool [axes, batch].
    """
    axis, row = (int(index) for index in strays.nonzero()[0])
    wrong = wrong[axis, row] if real is None else wrong[axis, row] & real[row]
    token = int(wrong.int().argmax())
    at = int(positions[axis].expand(len(places), -1)[row, token])
    return KvdslError(
        f"{policy} has `positions compact`, for which the model must count tokens one by one, but in row {row} token "
        f"{int(places[row, token])} has position {at}: behind an image, padding or a gap, or in packed texts, it does not; pass plain text "
        f"with `position_ids` that count it, or use `positions original`"
    )
