"""The order of the text among slots, in which tokens lie wherever they found room."""

from __future__ import annotations

import torch
from torch import Tensor

FREE = -1
"""The position, and the rank, of a slot that holds no token."""


def text_order(position: Tensor) -> Tensor:
    """The slots in the order of the text, the free ones last; int64, of the shape of `position`."""
    return _place(position).argsort(dim=-1, stable=True)


def in_text_order(position: Tensor) -> bool:
    """Whether they lie so already, as those of a prompt do that nobody left."""
    return bool((_place(position).diff(dim=-1) >= 0).all())


def _place(position: Tensor) -> Tensor:
    return torch.where(position >= 0, position, torch.iinfo(torch.int32).max)


def ranks(position: Tensor) -> Tensor:
    """How many slots hold an earlier token, int32 of the shape of `position`; -1 where the slot is free."""
    return text_order(position).argsort(-1).int().masked_fill_(position < 0, FREE)


def close_gaps(rank: Tensor, leaving: Tensor) -> None:
    """Update the ranks in place when some slots are freed, without sorting: those behind a gap move up.

    Args:
        rank: int32 [batch, kv_heads, slots].
        leaving: bool, of the same shape; live slots only.
    """
    place = rank.long().clamp(min=0)
    gone = torch.zeros_like(rank).scatter_add_(-1, place, leaving.int()).cumsum(-1, dtype=torch.int32)
    rank.sub_(gone.gather(-1, place)).masked_fill_(leaving, FREE).clamp_(min=FREE)
