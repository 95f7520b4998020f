"""Budgets shared by layers, once all have seen the prompt: shares, and victims from one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdsl.runtime.torch.settle import STAYS, Protection, by_places, eviction_order, graded, unwilling


def shares(weight: Tensor, capacity: Tensor, floor: Tensor, live: Tensor) -> Tensor:
    """Return how many tokens each KV head of a layer keeps when layers share their budgets by worth.

    Every layer gets its floor; the rest is divided in proportion to worth. A layer whose share exceeds its tokens keeps all of them, and
    the others divide what is left. Shares are floored, so that their sum stays within the budgets.

    Args:
        weight, capacity, floor, live: [layers, batch]; capacity is inf in a layer that does not evict.

    Returns:
        float64 [layers, batch]; inf in layers that do not evict.
    """
    weight, capacity, floor, live = (x.double() for x in (weight, capacity, floor, live))
    takes = capacity.isfinite()
    weight = torch.where(takes & weight.isfinite() & (weight > 0), weight, 0.0)
    floor = torch.where(takes, torch.minimum(floor, capacity), 0.0)
    total = torch.where(takes, capacity, 0.0).sum(0)
    open_ = takes
    share = capacity
    for _ in range(len(weight) + 1):
        full = takes & ~open_
        rest = total - torch.where(full, live, 0.0).sum(0) - torch.where(open_, floor, 0.0).sum(0)
        wants = torch.where(open_, weight, 0.0)
        wants = torch.where(wants.sum(0) > 0, wants, open_.double())
        gets = floor + rest * wants / wants.sum(0)
        share = torch.where(open_, gets, torch.where(full, live, capacity))
        open_ = open_ & (share < live)
    return share.floor()


def pooled(
    scores: Sequence[Tensor | float], protections: Sequence[Protection], capacities: Sequence[Tensor],
    floors: Sequence[Tensor], rows: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Return the victims when all layers and heads share one pool: bool [batch, kv_heads, slots] per layer.

    The last `floor` slots of each head's own order are not evicted. Among equal scores and positions, the lower layer and head evict first.

    Args:
        scores: float32 [batch, kv_heads, 1, slots].
        capacities, floors: [batch, kv_heads or 1, 1]; capacity is inf in a layer that does not evict.
        rows: bool [batch], the rows that may evict.
    """
    device = protections[0].position.device
    keys, reluctance, over = [], [], torch.zeros(len(rows[0]), dtype=torch.float64, device=device)
    for score, protection, capacity, floor, may in zip(scores, protections, capacities, floors, rows, strict=True):
        bound = capacity.expand(*protection.position.shape[:2], 1)
        takes = bound.isfinite() & may.view(-1, 1, 1)
        stays = (eviction_order(score, protection) >= protection.live - floor) | ~takes
        reluctance.append(torch.where(stays, STAYS, unwilling(protection)).flatten(1).to(device))
        keys.append(graded(score, protection.position).flatten(1).to(device))
        over += torch.where(takes, protection.live - bound, 0.0).sum((1, 2)).to(device)
    leaves = by_places(torch.cat(keys, 1), torch.cat(reluctance, 1)) < over[:, None]
    parts = leaves.split([key.shape[1] for key in keys], 1)
    places = [protection.position for protection in protections]
    return [part.to(position.device).view_as(position) for part, position in zip(parts, places, strict=True)]
