"""Who leaves: the order of eviction, in torch.

The rules are design corners that every backend shares: the lowest score leaves first, a NaN ranks lowest, -0 equals +0, of equal
scores the newer is kept; protected slots leave only when there are no others, the newest token last of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = -(2**31) + 1  # below every number, above what marks a free slot


def rank_key(x: Tensor, position: Tensor) -> Tensor:
    """Integers in the order in which slots rank: by `x` (NaN lowest, -0 = +0), then by position.

    Args:
        x: float32 [..., slots].
        position: int32 [..., slots], at least 0.

    Returns:
        int64 [..., slots].
    """
    bits = (x.float() + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(x.isnan(), _NAN, ordered)
    return (ordered.long() << 32) | position.long().clamp(min=0)


def _ranks(key: Tensor) -> Tensor:
    """Each slot's rank, 0 for the lowest key; equal keys rank by slot."""
    return key.argsort(dim=-1, stable=True).argsort(-1)


class Protection:
    """The union of a policy's `keep` lines over [batch, kv_heads, slots]; `live` tells the slots that hold a token."""

    def __init__(self, position: Tensor) -> None:
        self.position = position
        self.alive = position >= 0
        self.live = self.alive.sum(-1, keepdim=True)
        self.mask = torch.zeros_like(self.alive)

    def first(self, count: Tensor | float) -> None:
        """Protect the `count` live slots with the smallest positions."""
        key = torch.where(self.alive, self.position.long(), torch.iinfo(torch.int64).max)
        self._add(_ranks(key) < _tokens(count))

    def last(self, count: Tensor | float) -> None:
        """Protect the `count` live slots with the largest positions."""
        self._add(_ranks(self.position.long()) >= self.mask.shape[-1] - _tokens(count))

    def top(self, by: Tensor | float, count: Tensor | float) -> None:
        """Protect the `count` live slots that rank highest by `by`, [batch, kv_heads, 1, slots]."""
        key = torch.where(self.alive, rank_key(_per_slot(by, self.position), self.position), torch.iinfo(torch.int64).min)
        self._add(_ranks(key) >= self.mask.shape[-1] - _tokens(count))

    def where(self, condition: Tensor | bool) -> None:
        """Protect the slots where the condition, [batch, kv_heads, 1, slots], holds."""
        self._add(_per_slot(condition, self.position) != 0)

    def _add(self, mask: Tensor) -> None:
        self.mask |= mask & self.alive


def _per_slot(x: Tensor | float, position: Tensor) -> Tensor:
    """A value over slots, [batch, kv_heads, 1, slots] or with any of these axes of size 1, as [batch, kv_heads, slots]."""
    given = torch.as_tensor(x, device=position.device)
    return (given.squeeze(2) if given.dim() == 4 else given).expand_as(position)


def _tokens(count: Tensor | float) -> Tensor | int:
    """Counts of tokens are floored."""
    return count.floor().clamp(min=0) if isinstance(count, Tensor) else max(0, int(count // 1))


def eviction_order(score: Tensor | float, protection: Protection) -> Tensor:
    """Each slot's place in the order of leaving, 0 first; free slots come last.

    Args:
        score: float32 [batch, kv_heads, 1, slots].
    """
    position = protection.position
    by_score = rank_key(_per_slot(score, position), position)
    newest = position == position.amax(-1, keepdim=True)
    unwilling = protection.mask.int() + (protection.mask & newest).int()  # 0 free to leave, 1 protected, 2 the newest
    unwilling = torch.where(protection.alive, unwilling, 3)
    lowest_first = by_score.argsort(dim=-1, stable=True)
    order = lowest_first.gather(-1, unwilling.gather(-1, lowest_first).argsort(dim=-1, stable=True))
    return order.argsort(-1)


def overflow(live: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """How many must leave, [batch, kv_heads, 1]: none before the trigger holds (Lazy Pruning, algorithm 1).

    Args:
        live: [batch, kv_heads, 1].
        numbers: `capacity`, and `trigger`, `slack`, `max_drop` where the policy states them; [batch, 1, 1] each.
    """
    capacity = numbers["capacity"]
    over = live - capacity
    target = capacity.expand_as(over)
    if "max_drop" in numbers:
        drop = numbers["max_drop"]
        staged = torch.minimum(torch.maximum(live - drop, target), capacity + numbers["slack"])
        target = torch.where(drop > 0, staged, target)
    trigger = numbers.get("trigger", torch.ones_like(capacity))
    due = (over >= trigger) & (trigger > 0)
    return torch.where(due, live - target, torch.zeros_like(over)).clamp(min=0)
