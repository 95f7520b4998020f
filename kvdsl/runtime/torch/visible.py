"""Reductions over the slots that queries see, and ranks among them.

Shapes are as in `kvdsl.runtime.torch.view`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvdsl.runtime.state.order import pool
from kvdsl.runtime.torch.numerics import masked_reduce
from kvdsl.runtime.torch.settle import grade

ENTRIES = 1 << 22
"""Numbers in a block of the prompt's queries, or of pairs of slots."""


@dataclass(frozen=True)
class Visible:
    """What each query sees.

    Attributes:
        mask: bool [batch, kv_heads, queries, slots].
        position: int32 [batch, kv_heads, 1, slots], the tokens' positions; FREE for free slots.
    """

    mask: Tensor
    position: Tensor

    def of_queries(self, queries: slice) -> Visible:
        """Return the part of some queries."""
        return replace(self, mask=self.mask[:, :, queries])

    def axes(self, grouped: bool) -> tuple[Tensor, Tensor]:
        """Return position and mask, with a group axis if `grouped`."""
        return (self.position.unsqueeze(2), self.mask.unsqueeze(2)) if grouped else (self.position, self.mask)

    def over(self, op: str, x: Tensor, *, grouped: bool = False, dims: bool = False) -> Tensor:
        """Reduce over the slots that each query sees, keeping the axis.

        Args:
            grouped, dims: whether x has a group axis, or a last axis of dims.
        """
        seen = self.mask.unsqueeze(2) if grouped else self.mask
        seen = seen.unsqueeze(-1) if dims else seen
        return masked_reduce(op, x.float(), seen, -2 if dims else -1)

    def counted(self, op: str, x: Tensor, *, grouped: bool = False) -> Tensor:
        """Reduce like `over` in float64, for counts of tokens."""
        return masked_reduce(op, x.double(), self.mask.unsqueeze(2) if grouped else self.mask, -1)

    def weighted(self, weights: Tensor, vectors: Tensor, *, grouped: bool = False) -> Tensor:
        """Return the weighted sum of keys or values over the slots that each query sees: [batch, kv_heads, (group,) queries, 1, dim].

        For several queries this is a matrix product; for one, a pass over the vectors is as fast.
        """
        visible = self.mask.unsqueeze(2) if grouped else self.mask
        weight, vector = weights.float(), vectors.float()
        # Invisible slots may hold infinities, and 0 * inf is NaN.
        if self.mask.shape[2] == 1 or not vector.isfinite().all():
            rows = vector[:, :, None, None] if grouped else vector.unsqueeze(2)
            return masked_reduce("sum", weight.unsqueeze(-1) * rows, visible.unsqueeze(-1), -2)
        seen = torch.where(visible, weight, 0.0)
        return torch.einsum("bhgqs,bhsd->bhgqd" if grouped else "bhqs,bhsd->bhqd", seen, vector).unsqueeze(-2)

    def over_others(
        self,
        op: str,
        body: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
        own: Sequence[Tensor],
        other: Sequence[Tensor],
        *,
        dims: bool = False,
        vectors: bool = False,
        itself: bool = False,
    ) -> Tensor:
        """Reduce for each slot over the other live slots: [batch, kv_heads, 1, slots], then dims if `dims`.

        Args:
            body: computes values from a block of slots, [batch, kv_heads, block, 1], and from the others, [batch, kv_heads, 1, slots].
            own, other: its arguments over all slots, [batch, kv_heads, 1, slots or 1] each; vectors have a last axis of dims.
            vectors: whether the body has a value per pair and dim.
            itself: whether a slot is also compared with itself.
        """
        batch, heads, _, slots = self.mask.shape
        place = torch.arange(slots, device=self.mask.device)
        columns = [x.transpose(2, 3) for x in own]
        found = []
        dim = max(x.shape[-1] for x in (*own, *other) if x.dim() > 4) if vectors else 1
        for block in place.split(max(1, ENTRIES // (batch * heads * slots * dim))):
            compared = self.mask & (itself | (block[:, None] != place))
            rows = [x if x.shape[2] == 1 else x[:, :, block] for x in columns]
            x = body(rows, other).float()
            found.append(masked_reduce(op, x, compared.unsqueeze(-1) if dims else compared, -2 if dims else -1))
        return torch.cat(found, 2).transpose(2, 3)

    def over_heads(self, op: str, x: Tensor | float) -> Tensor:
        """Reduce over the layer's KV heads, [batch, kv_heads or 1, queries or 1, slots or 1] with size 1 for heads.

        Values of slots are reduced slot by slot: all heads hold the same positions in the same order.
        """
        one = torch.as_tensor(x, dtype=torch.float32, device=self.mask.device)
        one = one if one.dim() == 4 else one.view(1, 1, 1, 1)
        of_all = one.expand(*self.mask.shape[:2], *one.shape[2:])
        return masked_reduce(op, of_all, torch.ones_like(of_all, dtype=torch.bool), 1)

    def leverage(self, x: Tensor, ridge: Tensor | float, *, grouped: bool = False) -> Tensor:
        """Return xᵀ (sum of x xᵀ over slots + ridge)⁻¹ x for each slot's x [..., 1, slots, dim]: [..., 1, slots]."""
        visible = self.mask.unsqueeze(2) if grouped else self.mask
        rows = torch.where(visible.unsqueeze(-1), x.double(), 0.0)
        columns = rows.transpose(-1, -2)
        by = torch.as_tensor(ridge, dtype=torch.float64, device=x.device)
        by = by.view(-1, *(1,) * (rows.dim() - 1)) if by.dim() else by
        gram = columns @ rows + by * torch.eye(rows.shape[-1], dtype=torch.float64, device=x.device)
        solved, info = torch.linalg.solve_ex(gram, columns)
        found = (rows * solved.transpose(-1, -2)).sum(-1)
        return torch.where(info[..., None] == 0, found, torch.nan).float()

    def enough(self, x: Tensor, share: Tensor | float, by: Tensor, *, grouped: bool = False) -> Tensor:
        """Return how many slots, by descending `by`, reach a share of the sum of x: float64, slot axis of size 1."""
        position, visible = self.axes(grouped)
        shape = torch.broadcast_shapes(x.shape, by.shape, visible.shape)
        lowest = torch.iinfo(torch.int64).min
        keys = torch.where(visible, grade(by.expand(shape), position.expand(shape)), lowest)
        order = keys.argsort(-1, descending=True)  # unseen slots come last and add 0
        sums = torch.where(visible, x.double(), 0.0).expand(shape).gather(-1, order).cumsum(-1)
        short = ~(sums >= share * sums[..., -1:])
        first = short.int().cummin(-1).values.sum(-1, keepdim=True) + 1
        return torch.minimum(first, visible.sum(-1, keepdim=True)).double()

    def pool(self, op: str, x: Tensor | float, size: Tensor | float, protected: Tensor | None) -> Tensor:
        """Pool x over each unprotected slot's neighbours in the text, [batch, kv_heads, 1, slots]; see `order.pool`."""
        assert protected is not None
        position = self.position[:, :, 0]
        values = torch.as_tensor(x, device=position.device, dtype=torch.float32)
        per_slot = values.squeeze(2) if values.dim() == 4 else values
        count = size[:, :, 0] if isinstance(size, Tensor) else torch.as_tensor(size, device=position.device)
        free = (position < 0) | protected
        return pool(op, per_slot.expand(position.shape), position, free, count).unsqueeze(2)

    def rank(self, x: Tensor, *, grouped: bool = False) -> Tensor:
        """Return how many visible slots rank lower, [batch, kv_heads, (group,) queries, slots]."""
        return standing(x, *self.axes(grouped)).float()

    def rank_over_heads(self, x: Tensor) -> Tensor:
        """Return ranks among all KV heads' slots, [batch, kv_heads, 1, slots]. On ties the older token, then the lower head ranks lower."""
        batch, heads, _, slots = self.mask.shape
        head = torch.arange(heads, device=self.mask.device).view(1, heads, 1, 1)
        tie = self.position.long().expand(self.mask.shape) * heads + head
        flat = (one.expand(self.mask.shape).reshape(batch, heads * slots) for one in (x.float(), tie, self.mask))
        return standing(*flat).float().view(batch, heads, 1, slots)


def standing(x: Tensor, position: Tensor, visible: Tensor) -> Tensor:
    """Return ranks in ascending order, int64; invisible slots come last."""
    key = torch.where(visible, grade(x, position), torch.iinfo(torch.int64).max)
    return key.argsort(dim=-1).argsort(-1)
