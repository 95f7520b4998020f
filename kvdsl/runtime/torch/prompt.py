"""The new tokens of a forward of a prompt, in slots behind the cached ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.forward import Later
from kvdsl.runtime.lifetimes import once
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.attention import bias_of, distances, rank_of, turned_keys, turned_queries
from kvdsl.runtime.torch.view import View, row_view, visible_slots

Kept = dict[str, Tensor]
"""`keys`, `values`, `position` and `columns` over any number of slots."""

FAR = 4096.0
"""Log-sum-exps further from 0 are rounded by more than 2e-4. Probabilities recomputed from them and from logits as large would be wrong."""


@dataclass
class Prompt:
    """The data for attention over a prompt and for its observation.

    Cached slots come first, then one slot per new token in text order. So a query sees no slot behind its own token's.

    Attributes:
        kept: the slots, the new tokens' included.
        position: int32 [batch, tokens], the new tokens' positions in the text, FREE for padding.
        numbers: the policy's table, float64 [batch, (kv_heads,) len(spec.numbers)].
        later: takes checks that are deferred; None to check at once.
        far: whether a log-sum-exp is NaN or further from 0 than FAR; None if not checked. With `later` it is assumed not to be.
    """

    state: SlotState
    call: AttentionCall
    kept: Kept
    position: Tensor
    numbers: Tensor
    later: Later | None = None
    far: bool | None = None

    @property
    def tokens(self) -> int:
        """New tokens per row, padding included."""
        return self.position.shape[1]

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.kept["position"].shape[2]

    @property
    def cached(self) -> int:
        """Slots before the new tokens'."""
        return self.slots - self.tokens

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.kept["keys"].shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.call.query.shape[1] // self.heads

    @property
    def turns(self) -> bool:
        """Whether keys must be rotated to compact positions. Before the first eviction they are in place."""
        return self.state.spec.compact and self.call.rope is not None and self.cached > 0

    @once
    def keys(self) -> Tensor:
        """[batch, kv_heads, slots, dim], as attention uses them."""
        return turned_keys(self.state, self.call, self.kept) if self.turns else self.kept["keys"]

    @once
    def live(self) -> Tensor:
        """How many live slots each query finds, its own token's included: int64 [batch, kv_heads, tokens]."""
        before = (self.kept["position"][..., : self.cached] >= 0).sum(-1, keepdim=True)
        return before + (self.position >= 0).cumsum(1)[:, None]

    def queries(self, rows: slice, heads: slice, tokens: slice) -> Tensor:
        """Return queries as attention uses them, [rows, KV heads, group, tokens, dim]."""
        query = self.call.query.unflatten(1, (self.heads, self.group))[rows, heads, :, tokens]
        if not self.turns:
            return query
        live, newest = self.live[rows, heads, tokens, None], self.position[rows, None, tokens, None]
        return turned_queries(self.state, self.call, query, live, newest)

    @once
    def rank(self) -> Tensor:
        """How many live slots hold an earlier token, [batch, kv_heads, slots]."""
        return rank_of(self.kept)

    def bias(self, rows: slice, heads: slice, tokens: slice, slots: slice) -> Tensor | None:
        """Return the ALiBi bias of these queries, [rows, KV heads, group, tokens, slots], or None."""
        if self.call.slopes is None:
            return None
        kept = {"position": self.kept["position"][rows, heads, slots], "rank": self.rank[rows, heads, slots]}
        live, newest = self.live[rows, heads, tokens, None], self.position[rows, None, tokens, None]
        return bias_of(self.call, heads, distances(self.state, kept, live, newest))

    def reach(self, rows: slice, heads: slice, tokens: slice) -> slice:
        """Return a range of slots that contains all that these queries see."""
        stop = self.cached + tokens.stop
        window = self.call.window
        if window is None or self.slots <= window:
            return slice(0, stop)
        position = self.kept["position"][rows, heads, :stop]
        real = self.position[rows, tokens]
        oldest = torch.where(real >= 0, real, torch.iinfo(torch.int32).max).amin(1) - window
        seen = (position > oldest[:, None, None]) & (position >= 0)
        return slice(int(seen.any(1).any(0).int().argmax()), stop)

    def visible(self, rows: slice, heads: slice, tokens: slice, slots: slice) -> Tensor:
        """Return what each query sees: bool [rows, KV heads, tokens, slots]; arbitrary for padding."""
        return visible_slots(self.kept["position"][rows, heads, slots], self.position[rows, tokens], self.call.window)

    def view(self, rows: slice, heads: slice, tokens: slice, slots: slice) -> View:
        """Return a view of a block of queries and some slots, among them all that they see."""
        kept = {name: tensor[rows, heads, slots] for name, tensor in self.kept.items() if name != "columns"}
        kept["columns"] = self.kept["columns"][:, rows, heads, slots]
        query = self.call.query[rows, heads.start * self.group : heads.stop * self.group, tokens]
        numbers = self.numbers[rows] if self.numbers.dim() == 2 else self.numbers[rows, heads]
        view = row_view(self.state, kept, query, self.position[rows, tokens], numbers)
        view.live = self.live[rows, heads, tokens, None].float()
        seed, layer, first_head = view.random_key
        view.random_key = (seed, layer, first_head + heads.start)
        view.constants = view.constants.of_heads(heads)
        return view

    def tiles(self, first: int, entries: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield blocks of rows, KV heads and tokens from `first` on; per head in text order.

        Args:
            entries: the most numbers per block, one per query head and slot.
        """
        batch, tokens = self.position.shape
        per_query = self.group * self.slots
        queries = min(max(1, tokens - first), max(1, entries // per_query))
        heads = min(self.heads, max(1, entries // (per_query * queries)))
        rows = min(batch, max(1, entries // (per_query * queries * heads)))
        for row in range(0, batch, rows):
            for head in range(0, self.heads, heads):
                for token in range(first, tokens, queries):
                    yield (
                        slice(row, min(row + rows, batch)),
                        slice(head, min(head + heads, self.heads)),
                        slice(token, min(token + queries, tokens)),
                    )
