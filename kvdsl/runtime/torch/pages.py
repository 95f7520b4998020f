"""Pages: tokens that lie together in the text, whether or not their slots do."""

from __future__ import annotations

import torch
from torch import Tensor


def page_of(position: Tensor, size: Tensor) -> Tensor:
    """The page of each slot, int64 [batch, kv_heads, slots]; negative for free slots.

    Args:
        position: int [batch, kv_heads, slots].
        size: [batch, 1, 1], whole: tokens a page.
    """
    return torch.div(position.long(), size.long(), rounding_mode="floor")


def numbered(page: Tensor) -> Tensor:
    """The pages that there are, numbered from 0 in their order: int64, below the number of slots."""
    ordered, order = page.sort(dim=-1)
    begins = torch.zeros_like(ordered)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.empty_like(page).scatter(-1, order, begins.cumsum(-1))


def spread(op: str, x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Give every slot the `max` or `min` over the slots of its page.

    Args:
        x: with the slots in dimension `dim`.
        index: `numbered` pages, with axes where x has them.
    """
    index = index.expand(x.shape)
    return torch.zeros_like(x).scatter_reduce(dim, index, x, f"a{op}", include_self=False).gather(dim, index)
