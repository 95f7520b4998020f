"""Every baseline that kvdsl is compared with, in one frozen file: a change here changes every published ratio.

All work on tensors of the same shapes: a cache of keys and values [batch, kv_heads, slots, dim], one new token a step. The
caches are allocated once and the new token overwrites the last victim's slot, so that no baseline pays for concatenation;
what each allocates besides is said where it does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Token = tuple[Tensor, Tensor, Tensor]
"""The query [batch, query_heads, 1, dim], key and value [batch, kv_heads, 1, dim] of one step."""


@dataclass
class Cache:
    """Keys and values [batch, kv_heads, slots, dim], and the query heads that share a KV head."""

    keys: Tensor
    values: Tensor
    group: int

    @property
    def heads(self) -> tuple[int, int]:
        """(batch, kv_heads)."""
        return self.keys.shape[0], self.keys.shape[1]

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def fold(self, per_query_head: Tensor) -> Tensor:
        """[batch, query_heads, 1, x] as [batch, kv_heads, group, x]."""
        return per_query_head.reshape(*self.heads, self.group, per_query_head.shape[-1])


# -- a streaming read --------------------------------------------------------------------------------------------------


@lru_cache
def _reader() -> Callable[[int, int, int], int]:
    from kvdsl.build.cxx import shared_library

    read = ctypes.CDLL(str(shared_library(Path(__file__).with_name("read.cpp"), "read"))).kvdsl_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], ctypes.c_int64
    return read  # type: ignore[no-any-return]


def streaming_read(cache: Cache) -> int:
    """Read keys and values once on torch's number of threads: no step can be faster."""
    read, threads = _reader(), torch.get_num_threads()
    return sum(read(x.data_ptr(), x.nbytes, threads) for x in (cache.keys, cache.values))


# -- attention that keeps no statistics --------------------------------------------------------------------------------


def repeat_kv(x: Tensor, group: int) -> Tensor:
    """What transformers' eager attention does: every KV head once for each of its query heads, in fresh memory."""
    batch, heads, slots, dim = x.shape
    return x[:, :, None].expand(batch, heads, group, slots, dim).reshape(batch, heads * group, slots, dim)


def sdpa_grouped(cache: Cache) -> Callable[[Token], Tensor]:
    """Torch's fused attention, told of the groups."""
    return lambda token: scaled_dot_product_attention(token[0], cache.keys, cache.values, enable_gqa=True)


def sdpa_expanded(cache: Cache) -> Callable[[Token], Tensor]:
    """Torch's fused attention over a cache that already holds every KV head `group` times (the copy is not timed)."""
    keys, values = repeat_kv(cache.keys, cache.group), repeat_kv(cache.values, cache.group)
    return lambda token: scaled_dot_product_attention(token[0], keys, values)


def sdpa_folded(cache: Cache) -> Callable[[Token], Tensor]:
    """Torch's fused attention with a group's heads posing as queries of one head: no model does it, torch can do no better."""
    return lambda token: scaled_dot_product_attention(cache.fold(token[0]), cache.keys, cache.values)


# -- the same statistics in eager torch --------------------------------------------------------------------------------

Attend = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A query -> the output and the probabilities [batch, kv_heads, group, slots], in the model's dtype."""


def attend_eager(cache: Cache) -> Attend:
    """As H2O's and EasyKV's code does: repeat_kv in fresh memory, softmax in float32 and back."""
    scale = cache.keys.shape[-1] ** -0.5

    def attend(query: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = repeat_kv(cache.keys, cache.group), repeat_kv(cache.values, cache.group)
        weights = torch.matmul(query, keys.transpose(2, 3)) * scale
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, values), cache.fold(weights)

    return attend


def attend_eager_preallocated(cache: Cache) -> Attend:
    """`attend_eager` with the repeated keys and values written into buffers that are allocated once."""
    batch, heads = cache.heads
    wide = (batch, heads, cache.group, cache.slots, cache.keys.shape[-1])
    keys, values = cache.keys.new_empty(wide), cache.values.new_empty(wide)
    scale = cache.keys.shape[-1] ** -0.5

    def attend(query: Tensor) -> tuple[Tensor, Tensor]:
        keys.copy_(cache.keys[:, :, None].expand(wide))
        values.copy_(cache.values[:, :, None].expand(wide))
        weights = torch.matmul(query, keys.flatten(1, 2).transpose(2, 3)).mul_(scale)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, values.flatten(1, 2)), cache.fold(weights)

    return attend


def attend_grouped(cache: Cache) -> Attend:
    """The same without repeat_kv: one product per KV head with the group's queries as rows."""
    scale = cache.keys.shape[-1] ** -0.5

    def attend(query: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.matmul(cache.fold(query), cache.keys.transpose(2, 3)).mul_(scale)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, cache.values), weights

    return attend


class Evicting:
    """Place, attend, accumulate, choose a victim: one decode step in eager torch.

    Args:
        cache: overwritten in place.
        attend: how to attend.
        by_std: RoCo's scope (the half with the lowest deviation may leave, and of it the lowest mean leaves); otherwise
            H2O's (the older half may leave, and of it the lowest sum leaves).
    """

    def __init__(self, cache: Cache, attend: Attend, *, by_std: bool) -> None:
        self._cache, self._attend, self._by_std = cache, attend, by_std
        shape, device = (*cache.heads, cache.slots), cache.keys.device
        self._total = torch.zeros(shape, device=device)
        self._squares = torch.zeros(shape, device=device)
        self._count = torch.arange(cache.slots, 0, -1, device=device).float().expand(shape).contiguous()
        self._position = torch.arange(cache.slots, device=device).expand(shape).contiguous()
        self._newest = cache.slots - 1
        self._slot = torch.zeros(*cache.heads, 1, dtype=torch.int64, device=device)

    def step(self, token: Token) -> Tensor:
        """One token: the output, [batch, query_heads, 1, dim] or the group's heads as rows."""
        query, key, value = token
        self._place(key, value)
        out, weights = self._attend(query)
        self._accumulate(weights.mean(2, dtype=torch.float32))
        self._slot = self._victim_by_std() if self._by_std else self._victim_by_sum()
        return out

    def _place(self, key: Tensor, value: Tensor) -> None:
        """The new token into the last victim's slot."""
        at = self._slot[..., None].expand(*key.shape)
        self._cache.keys.scatter_(2, at, key)
        self._cache.values.scatter_(2, at, value)
        self._newest += 1
        self._position.scatter_(2, self._slot, self._newest)
        for statistic in (self._total, self._squares, self._count):
            statistic.scatter_(2, self._slot, 0.0)

    def _accumulate(self, attn: Tensor) -> None:
        self._total.add_(attn)
        if self._by_std:
            self._squares.addcmul_(attn, attn)
            self._count.add_(1.0)

    def _victim_by_std(self) -> Tensor:
        mean = self._total / self._count
        std = (self._squares / self._count - mean * mean).clamp_(min=0.0).sqrt_()
        feasible = std.topk(self._cache.slots - self._cache.slots // 2, dim=-1, largest=False, sorted=False).indices
        return feasible.gather(-1, mean.gather(-1, feasible).argmin(-1, keepdim=True))

    def _victim_by_sum(self) -> Tensor:
        recent = self._position > self._newest - self._cache.slots // 2
        return self._total.masked_fill(recent, torch.inf).argmin(-1, keepdim=True)


def repeated(step: Callable[[Token], object], tokens: list[Token]) -> Callable[[], object]:
    """Calls of `step` with the tokens in turn."""
    endless: Iterator[Token] = cycle(tokens)
    return lambda: step(next(endless))


# -- evicting some and inserting as many -------------------------------------------------------------------------------


class Shifting:
    """Shift and append: what is left is moved together and the new tokens come behind it (Hugging Face's and H2O's way).

    Keys and values are copied to and fro between two buffers that are allocated once.

    Args:
        keys, values: [batch, kv_heads, slots, dim].
        evict: how many tokens leave, and come, at a time.
    """

    def __init__(self, keys: Tensor, values: Tensor, evict: int) -> None:
        batch, heads, slots, dim = keys.shape
        self._evict, self._shape = evict, (batch, heads, slots, dim)
        # Behind every cache, room for the new tokens: then one gather moves and appends.
        self._buffers = [[_with_room(x, batch * heads * evict) for _ in range(2)] for x in (keys, values)]
        self._now = 0

    def shift(self, first: int, new: tuple[Tensor, Tensor]) -> None:
        """The tokens in places first .. first + evict of every head leave.

        Args:
            new: keys and values [batch, kv_heads, evict, dim].
        """
        for buffers, tokens in zip(self._buffers, new, strict=True):
            old, to = (self._cache(buffers[which]) for which in (self._now, 1 - self._now))
            torch.cat([old[:, :, :first], old[:, :, first + self._evict :], tokens], dim=2, out=to)
        self._now = 1 - self._now

    def rows(self, victims: Tensor) -> Tensor:
        """Where `gather` takes each row from, int64 [batch * kv_heads * slots], if these places leave: [batch, kv_heads, evict]."""
        batch, heads, slots, _ = self._shape
        leaves = torch.zeros(batch, heads, slots, dtype=torch.int8).scatter_(2, victims, 1)
        survivors = leaves.argsort(dim=-1, stable=True)[..., : slots - self._evict]
        head = torch.arange(batch * heads).view(batch, heads, 1)
        appended = batch * heads * slots + head * self._evict + torch.arange(self._evict)
        return torch.cat([head * slots + survivors, appended], -1).flatten()

    def gather(self, rows: Tensor, new: tuple[Tensor, Tensor]) -> None:
        """Other tokens of every head leave; arguments as in `rows` and `shift`."""
        count = self._shape[0] * self._shape[1] * self._shape[2]
        for buffers, tokens in zip(self._buffers, new, strict=True):
            old, to = buffers[self._now], buffers[1 - self._now]
            old[count:] = tokens.reshape(-1, tokens.shape[-1])
            torch.index_select(old, 0, rows, out=to[:count])
        self._now = 1 - self._now

    def copy(self) -> None:
        """Keys and values from one buffer into the other: no shift can be faster."""
        for one, other in self._buffers:
            self._cache(other).copy_(self._cache(one))

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are now."""
        keys, values = (self._cache(buffers[self._now]) for buffers in self._buffers)
        return keys, values

    def _cache(self, buffer: Tensor) -> Tensor:
        batch, heads, slots, _ = self._shape
        return buffer[: batch * heads * slots].view(self._shape)


def _with_room(x: Tensor, rows: int) -> Tensor:
    """The rows of x, [any, dim], and room for more."""
    made = x.new_empty(x.shape[:3].numel() + rows, x.shape[3])
    made[: x.shape[:3].numel()] = x.reshape(-1, x.shape[3])
    return made


def shift_in_fresh_memory(keys: Tensor, values: Tensor, first: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`Shifting.shift` as it is written in models' code: concatenation into memory that is allocated for it."""
    evict = new[0].shape[2]
    made = (
        torch.cat([x[:, :, :first], x[:, :, first + evict :], tokens], dim=2)
        for x, tokens in zip((keys, values), new, strict=True)
    )
    return next(made), next(made)


def gather_in_fresh_memory(keys: Tensor, values: Tensor, stay: Tensor, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`Shifting.gather` as H2O's code writes it: a mask [batch, kv_heads, slots] of what stays picks, then concatenation."""
    batch, heads, _, dim = keys.shape
    made = (
        torch.cat([x[stay].view(batch, heads, -1, dim), tokens], dim=2)
        for x, tokens in zip((keys, values), new, strict=True)
    )
    return next(made), next(made)


# -- a whole prompt ----------------------------------------------------------------------------------------------------


def sdpa_prompt(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's fused attention of a prompt: [batch, query_heads, tokens, dim]."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def eager_prompt(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As H2O's code does: every probability at once, and their sums over the queries, [batch, query_heads, tokens]."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    keys, values = repeat_kv(key, group), repeat_kv(value, group)
    weights = torch.matmul(query, keys.transpose(2, 3)) * query.shape[-1] ** -0.5
    weights += torch.full((tokens, tokens), -torch.inf, dtype=weights.dtype).triu_(1)
    weights = weights.softmax(-1, dtype=torch.float32)
    return torch.matmul(weights.to(query.dtype), values), weights.sum(2)
