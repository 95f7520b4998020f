"""What generated torch code reads and writes.

Values are [batch, kv_heads, queries, slots]; an axis over which a value does not vary has size 1. A body that reads the query
vector is computed per query head, [batch, kv_heads, group, queries, slots], and then reduced by `View.over_group`; under a
reduction over dims there is one more axis, last. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class View:
    """A block of queries and the slots that they see; in a settle, the newest query alone and the live slots.

    Attributes:
        visible: bool, [batch, kv_heads, queries, slots]: what each query sees (in a settle: the live slots).
        attn, logit: float32 [batch, kv_heads, queries, slots], reduced over the group; None in a settle.
        position: float32 [batch, kv_heads, 1, slots].
        newest: float32 [batch, 1, queries, 1], the position of each query's own token.
        live: float32 [batch, kv_heads, queries, 1], the live slots as each query found them.
        window: queries see this many tokens, or None.
        numbers: the policy's numbers, float32 [batch, 1, 1, 1] each.
        columns: the state columns, float32 [batch, kv_heads, slots] each.
        query: [batch, kv_heads, group, queries, dim]; None in a settle.
        key, value: [batch, kv_heads, slots, dim].
        group: how query heads are reduced.
        random_key: (seed, layer, first KV head) of `random()`.
    """

    visible: Tensor
    position: Tensor
    newest: Tensor
    live: Tensor
    window: int | None
    numbers: dict[str, Tensor]
    columns: dict[str, Tensor]
    key: Tensor
    value: Tensor
    group: str
    random_key: tuple[int, int, int]
    attn: Tensor | None = None
    logit: Tensor | None = None
    query: Tensor | None = None

    @property
    def age(self) -> Tensor:
        """[batch, kv_heads, queries, slots]."""
        return self.newest - self.position

    @property
    def observed(self) -> Tensor:
        """How many queries could see the slot, its own token's included."""
        seen = self.age + 1
        return seen if self.window is None else seen.clamp(max=self.window)

    def number(self, name: str) -> Tensor:
        """One of the policy's numbers."""
        return self.numbers[name]

    def column(self, name: str) -> Tensor:
        """A state column."""
        return self.columns[name].unsqueeze(2)

    @property
    def q(self) -> Tensor:
        """Query vectors with room for slots: [batch, kv_heads, group, queries, 1, dim]."""
        assert self.query is not None
        return self.query.float().unsqueeze(-2)

    @property
    def k(self) -> Tensor:
        """Keys with room for queries: [batch, kv_heads, 1, slots, dim]."""
        return self.key.float().unsqueeze(2)

    @property
    def v(self) -> Tensor:
        """Values with room for queries: [batch, kv_heads, 1, slots, dim]."""
        return self.value.float().unsqueeze(2)

    @property
    def dot_qk(self) -> Tensor:
        """Unscaled dot products of every query head: [batch, kv_heads, group, queries, slots]."""
        assert self.query is not None
        return torch.einsum("bhgqd,bhsd->bhgqs", self.query.float(), self.key.float())

    def over_group(self, x: Tensor) -> Tensor:
        """Reduce the group's query heads: [batch, kv_heads, group, queries, slots] without the group."""
        if self.group == "max":
            return x.amax(2)
        return x.mean(2) if self.group == "mean" else x.sum(2)

    def over_slots(self, op: str, x: Tensor, *, grouped: bool = False, dims: bool = False) -> Tensor:
        """Reduce over the slots that each query sees, keeping the axis. The flags tell the axes beyond the four."""
        visible = self.visible.unsqueeze(2) if grouped else self.visible
        visible = visible.unsqueeze(-1) if dims else visible
        return _masked_reduce(op, x.float(), visible, -2 if dims else -1)

    def random(self) -> Tensor:
        """[batch, kv_heads, queries, slots] in [0, 1), the same on every backend."""
        seed, layer, first_head = self.random_key
        heads = torch.arange(self.position.shape[1], device=self.position.device).view(1, -1, 1, 1) + first_head
        return counter_random(seed, layer, heads, self.position.long(), self.newest.long())


def _masked_reduce(op: str, x: Tensor, visible: Tensor, dim: int) -> Tensor:
    count = visible.sum(dim, keepdim=True)
    if op in ("max", "min"):
        worst = -torch.inf if op == "max" else torch.inf
        hidden = torch.where(visible, x, worst)
        return hidden.amax(dim, keepdim=True) if op == "max" else hidden.amin(dim, keepdim=True)
    total = torch.where(visible, x, 0.0).sum(dim, keepdim=True)
    if op == "sum":
        return total
    mean = total / count
    if op == "mean":
        return mean
    variance = torch.where(visible, (x - mean) ** 2, 0.0).sum(dim, keepdim=True) / count
    return variance if op == "var" else variance.sqrt()


_WORD = 0xFFFFFFFF


def counter_random(seed: int, layer: int, head: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """A 24-bit random number in [0, 1) for every (layer, head, position, step): murmur3's finaliser over the words."""
    state = torch.full((), seed & _WORD, dtype=torch.int64, device=position.device)
    for word in (torch.full_like(state, layer), head.long(), position, step):
        state = _mix(state ^ (word * 0x9E3779B9 & _WORD))
    return (state >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _WORD
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)


@dataclass
class Columns:
    """Folds a block of queries into the state columns."""

    columns: dict[str, Tensor]
    visible: Tensor

    def put(self, name: str, x: Tensor) -> None:
        """A value of the token itself: [batch, kv_heads, 1, slots]."""
        self.columns[name].copy_(x.squeeze(2))

    def sum(self, name: str, x: Tensor) -> None:
        """Add up what the queries give."""
        self.columns[name].add_(torch.where(self.visible, x.float(), 0.0).sum(2))

    def squares(self, name: str, x: Tensor) -> None:
        """Add up the squares of what the queries give."""
        self.sum(name, x.float().square())

    def max(self, name: str, x: Tensor) -> None:
        """Keep the largest."""
        self._fold(name, torch.maximum, torch.where(self.visible, x.float(), -torch.inf).amax(2))

    def min(self, name: str, x: Tensor) -> None:
        """Keep the smallest."""
        self._fold(name, torch.minimum, torch.where(self.visible, x.float(), torch.inf).amin(2))

    def last(self, name: str, x: Tensor) -> None:
        """Keep what the last query that saw the slot gave."""
        queries = torch.arange(self.visible.shape[2], device=self.visible.device).view(1, 1, -1, 1)
        latest = torch.where(self.visible, queries, -1).amax(2, keepdim=True)
        given = x.float().expand_as(self.visible).gather(2, latest.clamp(min=0)).squeeze(2)
        self.columns[name].copy_(torch.where(latest.squeeze(2) >= 0, given, self.columns[name]))

    def _fold(self, name: str, fold: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> None:
        self.columns[name].copy_(fold(self.columns[name], x))


INITIAL = {"sum": 0.0, "squares": 0.0, "max": -torch.inf, "min": torch.inf, "last": 0.0, "token": 0.0}
"""What a column holds before its slot's first query, by rule."""
