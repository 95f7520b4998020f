"""What generated torch code reads and writes.

Values are [batch, kv_heads, queries, slots]; an axis over which a value does not vary has size 1. A body that reads the query
vector is computed per query head, [batch, kv_heads, group, queries, slots], and then reduced by `View.over_group`; under a
reduction over dims there is one more axis, last. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from kvdsl.runtime.lifetimes import once
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.columns import size_name, valid
from kvdsl.runtime.state.order import pool
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import ahead, pages
from kvdsl.runtime.torch.numerics import counter_random, masked_reduce, sqrt
from kvdsl.runtime.torch.settle import grade

_ENTRIES = 1 << 22
"""Numbers of a block of the prompt's queries, or of slots that are compared with others."""

_TEXT_FOLDS: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0.0, torch.add),
    "max": (-torch.inf, torch.maximum),
    "min": (torch.inf, torch.minimum),
}
"""How blocks of the prompt's queries go together: what there is of none, and of two."""


class Weights(Protocol):
    """What a block of queries gives the slots, per query head: [batch, kv_heads, group, queries, slots] float32."""

    def attn(self) -> Tensor:
        """Probabilities; without meaning where a query does not see the slot."""

    def logit(self) -> Tensor:
        """Scaled scores; likewise."""


@dataclass
class View:
    """A block of queries and the slots that they see; in a settle, the newest query alone and the live slots.

    Attributes:
        visible: bool, [batch, kv_heads, queries, slots]: what each query sees (in a settle: the live slots).
        slot_position: int32 [batch, kv_heads, 1, slots]; FREE for free slots.
        query_position: int32 [batch, 1, queries, 1], of each query's own token.
        live: float32 [batch, kv_heads, queries, 1], the live slots as each query found them.
        window: queries see this many tokens, or None.
        numbers: the policy's numbers, float32 [batch, kv_heads or 1, 1, 1] each. `doubles`: the same in float64, as counts read them.
        columns: the state columns, float32 [batch, kv_heads, slots] each.
        query: [batch, kv_heads, group, queries, dim]; None in a settle.
        key, value: [batch, kv_heads, slots, dim].
        group: how query heads are reduced.
        random_key: (seed, layer, first KV head) of `random()`.
        rings: what the newest queries gave, float32 [size, batch, kv_heads, slots] each.
        constants: what the policy's tensors have, float32 [kv_heads, dim] each, of a matrix [kv_heads, rank, dim].
        sketch: int32 [batch, kv_heads, any], dims of keys and queries, -1 for none; None for a policy without a sketch.
        protected: bool [batch, kv_heads, slots], what may not leave; None until a settle knows.
        weights: what the queries give the slots; None in a settle.
        factor: what products of queries and keys are multiplied by. `rope`: how the model rotates, or None.
        newest: int32 [batch, 1, 1, 1], the newest token's place, in a view of the prompt's queries; elsewhere it is the query's own.
        text: the prompt's queries, and their places; see `SlotState.text`.
        since: int32 [batch, 1, 1], the first query that rings tell of; None for all.
    """

    visible: Tensor
    slot_position: Tensor
    query_position: Tensor
    live: Tensor
    window: int | None
    numbers: dict[str, Tensor]
    columns: dict[str, Tensor]
    key: Tensor
    value: Tensor
    group: str
    random_key: tuple[int, int, int]
    query: Tensor | None = None
    rings: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    sketch: Tensor | None = None
    doubles: dict[str, Tensor] = field(default_factory=dict)
    protected: Tensor | None = None
    weights: Weights | None = None
    factor: float = 1.0
    rope: Rope | None = None
    newest: Tensor | None = None
    text: Sequence[tuple[Tensor, Tensor]] = ()
    since: Tensor | None = None

    def queries(self) -> Iterator[View]:
        """The block's queries one by one, in the order of the text."""
        if self.visible.shape[2] == 1:
            yield self
            return
        for number in range(self.visible.shape[2]):
            one = slice(number, number + 1)
            yield replace(
                self,
                visible=self.visible[:, :, one],
                query_position=self.query_position[:, :, one],
                live=self.live[:, :, one],
                query=None if self.query is None else self.query[:, :, :, one],
                weights=_OneQuery(self, one),
            )

    @once
    def attn(self) -> Tensor:
        """Probabilities reduced over the group: [batch, kv_heads, queries, slots], without meaning for what is not visible."""
        assert self.weights is not None
        return self.over_group(self.weights.attn())

    @once
    def logit(self) -> Tensor:
        """Scaled scores, likewise."""
        assert self.weights is not None
        return self.over_group(self.weights.logit())

    @property
    def position(self) -> Tensor:
        """As a number of an expression: [batch, kv_heads, 1, slots]."""
        return self.slot_position.float()

    @property
    def age(self) -> Tensor:
        """[batch, kv_heads, queries, slots]. Found in integers: far into a text, float32 cannot tell neighbours apart."""
        return (self.query_position - self.slot_position).float()

    @property
    def seen(self) -> Tensor:
        """How many tokens of the row there were when the query's had come: [batch, 1, queries, 1]."""
        return (self.query_position + 1).float()

    @property
    def asked(self) -> Tensor:
        """The query's own place: [batch, 1, queries, 1]."""
        return self.query_position.float()

    @property
    def scaling(self) -> Tensor:
        """The factor of products of queries and keys: [1, 1, 1, 1]."""
        return torch.full((1, 1, 1, 1), self.factor, dtype=torch.float32, device=self.visible.device)

    @property
    def observed(self) -> Tensor:
        """How many queries could see the slot, its own token's included."""
        seen = self.age + 1
        return seen if self.window is None else seen.clamp(max=self.window)

    def number(self, name: str) -> Tensor:
        """One of the policy's numbers."""
        return self.numbers[name]

    def exact(self, name: str) -> Tensor:
        """One of the policy's numbers, or `live` or `seen`, where tokens are counted: float64 [batch, kv_heads or 1, 1 or queries, 1]."""
        return self.doubles[name] if name in self.doubles else getattr(self, name).double()

    def in_layers(self, count: Tensor, *, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        """The count, perhaps one of each query head, in layers `low` to `high`, ends included; inf in the others."""
        layer = self.exact("layer")
        outside = torch.zeros_like(layer, dtype=torch.bool)
        outside = outside if low is None else outside | (layer < low)
        outside = outside if high is None else outside | (layer > high)
        return torch.where(outside if count.dim() == 4 else outside.unsqueeze(2), torch.inf, count)

    def scalar(self, name: str) -> Tensor:
        """What a tensor without dims has: [1, kv_heads, 1, 1]."""
        return self.constants[name][None, :, :1, None]

    def of_head(self, name: str) -> Tensor:
        """The same as a number that tokens are counted by: float64 [1, kv_heads, 1]."""
        return self.constants[name][None, :, :1].double()

    def vector(self, name: str) -> Tensor:
        """What a tensor with dims has, with room for queries and slots: [1, kv_heads, 1, 1, dim]."""
        return self.constants[name][None, :, None, None]

    def vectors(self, name: str) -> Tensor:
        """What a tensor has of each query head, with room for queries and slots: [1, kv_heads, group, 1, 1, dim]."""
        return self.constants[name][None, :, :, None, None]

    def project_group(self, name: str, x: Tensor) -> Tensor:
        """A vector, [batch, kv_heads, group or 1, queries, slots, dim], over the rank of each query head's matrix."""
        return x.float() @ self.constants[name][None, :, :, None].transpose(-1, -2)

    def project(self, name: str, x: Tensor) -> Tensor:
        """A vector, [batch, kv_heads, ..., dim], over the rank of a tensor: [batch, kv_heads, ..., rank]."""
        return torch.einsum("bh...d,hrd->bh...r", x.float(), self.constants[name])

    def column(self, name: str) -> Tensor:
        """A state column."""
        return self.columns[name].unsqueeze(2)

    def ring(self, name: str, op: str) -> Tensor:
        """Reduce what the newest queries gave each slot, of those that could see it: [batch, kv_heads, 1, slots]."""
        size = self.number(size_name(name))[:, 0]  # which all heads have in common
        held = valid(
            len(self.rings[name]), size, self.query_position[:, :, 0], self.slot_position[:, :, 0], self.window, self.since
        )
        return masked_reduce(op, self.rings[name], held, 0).squeeze(0).unsqueeze(2)

    @property
    def q(self) -> Tensor:
        """Query vectors with room for slots: [batch, kv_heads, group, queries, 1, dim]."""
        assert self.query is not None
        return self.query.float().unsqueeze(-2)

    @property
    def query_head(self) -> Tensor:
        """The query heads' numbers: [1, kv_heads, group, 1, 1]."""
        assert self.query is not None
        heads, group = self.query.shape[1:3]
        first = self.random_key[2] * group
        return torch.arange(first, first + heads * group, device=self.query.device).float().view(1, heads, group, 1, 1)

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

    def sqrt(self, x: Tensor) -> Tensor:
        """The root, rounded correctly: torch's own is not, on CPUs."""
        return sqrt(x.float())

    def over_group(self, x: Tensor) -> Tensor:
        """Reduce the group's query heads: [batch, kv_heads, group, queries, slots] without the group; under `each` as it is."""
        if self.group == "each":
            return x
        if self.group == "max":
            return x.amax(2)
        return x.mean(2) if self.group == "mean" else x.sum(2)

    def over_slots(self, op: str, x: Tensor, *, grouped: bool = False, dims: bool = False) -> Tensor:
        """Reduce over the slots that each query sees, keeping the axis. The flags tell the axes beyond the four."""
        visible = self.visible.unsqueeze(2) if grouped else self.visible
        visible = visible.unsqueeze(-1) if dims else visible
        return masked_reduce(op, x.float(), visible, -2 if dims else -1)

    def counted(self, op: str, x: Tensor, *, grouped: bool = False) -> Tensor:
        """`over_slots` in float64, for what tokens are counted by."""
        return masked_reduce(op, x.double(), self.visible.unsqueeze(2) if grouped else self.visible, -1)

    def enough(self, x: Tensor, share: Tensor | float, by: Tensor, *, grouped: bool = False) -> Tensor:
        """How many slots it takes, the highest `by` first, until their x come to a share of the sum: float64, the slots' axis of size 1."""
        visible = self.visible.unsqueeze(2) if grouped else self.visible
        position = self.slot_position.unsqueeze(2) if grouped else self.slot_position
        shape = torch.broadcast_shapes(x.shape, by.shape, visible.shape)
        lowest = torch.iinfo(torch.int64).min
        keys = torch.where(visible, grade(by.expand(shape), position.expand(shape)), lowest)
        order = keys.argsort(-1, descending=True)  # unseen slots come last, and have nothing
        sums = torch.where(visible, x.double(), 0.0).expand(shape).gather(-1, order).cumsum(-1)
        short = ~(sums >= share * sums[..., -1:])
        first = short.int().cummin(-1).values.sum(-1, keepdim=True) + 1
        return torch.minimum(first, visible.sum(-1, keepdim=True)).double()

    def weighted_vs(self, weights: Tensor, *, grouped: bool = False) -> Tensor:
        """The sum over the slots that each query sees of the cached values, [batch, kv_heads, (group,) queries, 1, dim]."""
        return self._weighted(weights, self.value, grouped)

    def weighted_ks(self, weights: Tensor, *, grouped: bool = False) -> Tensor:
        """The same of the cached keys."""
        return self._weighted(weights, self.key, grouped)

    def _weighted(self, weights: Tensor, vectors: Tensor, grouped: bool) -> Tensor:
        """A product of matrices, but for a single query, where one pass over the vectors is as fast."""
        visible = self.visible.unsqueeze(2) if grouped else self.visible
        weight, vector = weights.float(), vectors.float()
        # What a query does not see may be infinite, and 0 * inf is no 0.
        if self.visible.shape[2] == 1 or not vector.isfinite().all():
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
        """Reduce for each slot what it makes of the other live ones, [batch, kv_heads, 1, slots]; with `dims` these behind.

        Args:
            body: from what a block of slots has, [batch, kv_heads, block, 1], and what the others have, [batch, kv_heads, 1, slots].
            own, other: this of all slots, [batch, kv_heads, 1, slots or 1] each, vectors with their dims behind.
            vectors: whether the body has a value for every pair and dim.
            itself: whether a slot is compared with itself, too.
        """
        batch, heads, _, slots = self.visible.shape
        place = torch.arange(slots, device=self.visible.device)
        columns = [x.transpose(2, 3) for x in own]
        found = []
        for block in place.split(max(1, _ENTRIES // (batch * heads * slots * (self.key.shape[-1] if vectors else 1)))):
            compared = self.visible & (itself | (block[:, None] != place))
            rows = [x if x.shape[2] == 1 else x[:, :, block] for x in columns]
            x = body(rows, other).float()
            found.append(masked_reduce(op, x, compared.unsqueeze(-1) if dims else compared, -2 if dims else -1))
        return torch.cat(found, 2).transpose(2, 3)

    def over_heads(self, op: str, x: Tensor | float) -> Tensor:
        """Reduce over the layer's KV heads what each has, [batch, kv_heads or 1, queries or 1, slots or 1]: the same with one head.

        What slots have is reduced slot by slot: the heads hold the same positions in the same order.
        """
        one = torch.as_tensor(x, dtype=torch.float32, device=self.visible.device)
        one = one if one.dim() == 4 else one.view(1, 1, 1, 1)
        of_all = one.expand(*self.visible.shape[:2], *one.shape[2:])
        return masked_reduce(op, of_all, torch.ones_like(of_all, dtype=torch.bool), 1)

    def over_page(self, op: str, x: Tensor, *, grouped: bool = False, dims: bool = False, following: bool = False) -> Tensor:
        """Give every slot what its page has: `op`, one of `pages.SPREAD`, of the page's slots that the query sees.

        Args:
            grouped: whether x has the query heads of a group. dims: whether it has dims behind the slots.
            following: not its own page, but the one behind it.
        """
        page, visible = self._page, self.visible
        if grouped:
            page, visible = page.unsqueeze(2), visible.unsqueeze(2)
        if dims:
            page, visible = page.unsqueeze(-1), visible.unsqueeze(-1)
        index = pages.numbered(self._page).view(page.shape)
        own = pages.spread(op, x.float(), visible, index, -2 if dims else -1)
        return pages.following(op, own, page, index, -2 if dims else -1) if following else own

    @property
    def _page(self) -> Tensor:
        """Of each slot: [batch, kv_heads, 1, slots]."""
        numbers = {name: values[:, 0] for name, values in self.numbers.items() if name in ("page", "page_after")}
        return pages.page_of(self.slot_position[:, :, 0], numbers).unsqueeze(2)

    # -- rotated vectors, and the prompt's queries -----------------------------------------------------------------------

    def turn(self, x: Tensor, shift: Tensor | float) -> Tensor:
        """A vector, [batch, kv_heads, ..., dim], turned on by `shift` places, [batch, kv_heads, ...]."""
        by = torch.as_tensor(shift, dtype=torch.float64, device=x.device)
        shape = torch.broadcast_shapes(x.shape[:-1], by.shape)
        if self.rope is None:
            return x.float().expand(*shape, x.shape[-1])
        return self.rope.rotate(x, by)

    def pairs(self, x: Tensor) -> Tensor:
        """At each dim the length of the pair that turns together."""
        return x.float().abs() if self.rope is None else self.rope.pair_lengths(x)

    def ahead(self, x: Tensor, count: Tensor | float, factor: Tensor | float | None = None) -> Tensor:
        """A key, [batch, kv_heads, ..., dim], turned back by the next places, on average: see `kvdsl.ir.nodes.Rotate`."""
        if self.rope is None:
            return x.float()
        newest = (self.query_position if self.newest is None else self.newest).double()
        frequencies = self.rope.frequencies(x.device)
        places = ahead.places(count, newest)
        angle, weight = (
            ahead.series(frequencies, newest, places) if factor is None else ahead.steps(frequencies, newest, places, factor)
        )
        for _ in range(x.dim() - 5):  # the group
            angle, weight = angle.unsqueeze(3), weight.unsqueeze(3)
        return self.rope.rotate_mean(x, -angle, weight)

    def product(self, query: Tensor, slot: Tensor) -> Tensor:
        """Products of queries' vectors, [..., queries, 1, dim], and slots', [..., 1, slots, dim]: [..., queries, slots]."""
        return query.squeeze(-2) @ slot.squeeze(-3).transpose(-1, -2)

    def over_text(
        self,
        op: str,
        body: Callable[[View], Tensor],
        *,
        grouped: bool = False,
        dims: bool = False,
        after: Tensor | float = 0,
    ) -> Tensor:
        """Reduce what the prompt's queries give, keeping the axis.

        Args:
            body: from a view of a block of queries. The flags tell the axes of its values beyond the four.
            after: queries before this place do not count.
        """
        axis = -3 if dims else -2

        def folded(op: str, body: Callable[[View], Tensor]) -> Tensor:
            fill, fold = _TEXT_FOLDS[op]
            total = torch.full((1, 1, 1, 1), fill, dtype=torch.float32, device=self.visible.device)
            for view, counts in self._text(after):
                counts = counts.unsqueeze(2) if grouped else counts
                counts = counts.unsqueeze(-1) if dims else counts
                x = torch.where(counts, body(view).float(), fill)
                total = fold(total, x.sum(axis, keepdim=True) if op == "sum" else getattr(x, f"a{op}")(axis, keepdim=True))
            return total

        if op in _TEXT_FOLDS:
            return folded(op, body)
        count = torch.as_tensor(sum(counts.sum(2, keepdim=True) for _, counts in self._text(after)))
        count = count.unsqueeze(2) if grouped else count
        count = count.unsqueeze(-1) if dims else count
        mean = folded("sum", body) / count
        if op == "mean":
            return mean
        variance = folded("sum", lambda text: (body(text) - mean).square()) / count
        return variance if op == "var" else variance.sqrt()

    def _text(self, after: Tensor | float) -> Iterator[tuple[View, Tensor]]:
        """Blocks of the prompt's queries, each before all slots, and which of them count, bool [batch, kv_heads or 1, queries, 1]."""
        batch, heads, _, slots = self.visible.shape
        for query, position in self.text:
            size = max(1, _ENTRIES // (batch * query.shape[1] * slots))
            for start in range(0, position.shape[1], size):
                part = slice(start, start + size)
                at = position[:, None, part, None]
                own = query.unflatten(1, (heads, -1))[:, :, :, part]
                yield (
                    replace(self, query=own, query_position=at, newest=self.query_position, text=()),
                    (at >= 0) & (at >= after),
                )

    def leverage(self, x: Tensor, ridge: Tensor | float, *, grouped: bool = False) -> Tensor:
        """X times the inverse of (the sum of x xᵀ over slots + ridge) times x, of each slot's x [..., 1, slots, dim]: [..., 1, slots]."""
        visible = self.visible.unsqueeze(2) if grouped else self.visible
        rows = torch.where(visible.unsqueeze(-1), x.double(), 0.0)
        columns = rows.transpose(-1, -2)
        by = torch.as_tensor(ridge, dtype=torch.float64, device=x.device)
        by = by.view(-1, *(1,) * (rows.dim() - 1)) if by.dim() else by
        gram = columns @ rows + by * torch.eye(rows.shape[-1], dtype=torch.float64, device=x.device)
        solved, info = torch.linalg.solve_ex(gram, columns)
        found = (rows * solved.transpose(-1, -2)).sum(-1)
        return torch.where(info[..., None] == 0, found, torch.nan).float()

    def rank(self, x: Tensor, *, grouped: bool = False) -> Tensor:
        """How many of the slots that the query sees rank lower, [batch, kv_heads, (group,) queries, slots]."""
        return _standing(x, *self._places(grouped)).float()

    def rank_in_page(self, x: Tensor, *, grouped: bool = False) -> Tensor:
        """The same among those of the slot's page, [batch, kv_heads, (group,) queries, slots]."""
        position, visible = self._places(grouped)
        index = pages.numbered(self._page).view(position.shape)
        standing = _standing(x, position, visible)
        order = standing.argsort(-1)
        by_page = order.gather(-1, index.expand(standing.shape).gather(-1, order).argsort(dim=-1, stable=True))
        place = by_page.argsort(-1)
        return (place - pages.spread("min", place, visible, index, -1)).float()

    def _places(self, grouped: bool) -> tuple[Tensor, Tensor]:
        """Positions of slots and which are visible, with room for a group's query heads."""
        if grouped:
            return self.slot_position.unsqueeze(2), self.visible.unsqueeze(2)
        return self.slot_position, self.visible

    def rank_over_heads(self, x: Tensor) -> Tensor:
        """The same among the slots of all KV heads of the layer, [batch, kv_heads, 1, slots]; of equals the older, then the lower head."""
        batch, heads, _, slots = self.visible.shape
        head = torch.arange(heads, device=self.visible.device).view(1, heads, 1, 1)
        tie = self.slot_position.long().expand(self.visible.shape) * heads + head
        flat = (one.expand(self.visible.shape).reshape(batch, heads * slots) for one in (x.float(), tie, self.visible))
        return _standing(*flat).float().view(batch, heads, 1, slots)

    def over_sketch(self, op: str, x: Tensor) -> Tensor:
        """Reduce the last axis, of size dim or 1, over the sketch's dims only."""
        chosen, valid = self._sketched(x.float())
        return masked_reduce(op, chosen, valid, -1).squeeze(-1)

    @property
    def dot_sketch(self) -> Tensor:
        """`dot_qk` over the sketch's dims only: [batch, kv_heads, group, queries, slots]."""
        assert self.query is not None
        (query, valid), (key, _) = self._sketched(self.query.float()), self._sketched(self.key.float())
        return torch.einsum("bhgqd,bhsd->bhgqs", query.masked_fill(~valid, 0), key.masked_fill(~valid.squeeze(2), 0))

    def _sketched(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sketch's dims of x [batch, kv_heads, ..., dim], and which of them are any, bool with axes of size 1 between."""
        assert self.sketch is not None
        batch, heads, count = self.sketch.shape
        index = self.sketch.long().view(batch, heads, *(1,) * (x.dim() - 3), count)
        between = x.shape[2:-1]
        full = x.expand(batch, heads, *between, self.key.shape[-1])
        return full.gather(-1, index.clamp(min=0).expand(batch, heads, *between, count)), index >= 0

    def max_pool(self, x: Tensor | float, size: Tensor | float) -> Tensor:
        """The largest value of each slot's neighbours in the text, [batch, kv_heads, 1, slots]; see `kvdsl.runtime.state.order.pool`."""
        return self._pool("max", x, size)

    def mean_pool(self, x: Tensor | float, size: Tensor | float) -> Tensor:
        """The mean value of each slot's neighbours in the text, [batch, kv_heads, 1, slots]; see `kvdsl.runtime.state.order.pool`."""
        return self._pool("mean", x, size)

    def _pool(self, op: str, x: Tensor | float, size: Tensor | float) -> Tensor:
        assert self.protected is not None
        position = self.slot_position[:, :, 0]
        values = torch.as_tensor(x, device=position.device, dtype=torch.float32)
        per_slot = values.squeeze(2) if values.dim() == 4 else values
        count = size[:, :, 0] if isinstance(size, Tensor) else torch.as_tensor(size, device=position.device)
        free = (position < 0) | self.protected
        return pool(op, per_slot.expand(position.shape), position, free, count).unsqueeze(2)

    def random(self) -> Tensor:
        """[batch, kv_heads, queries, slots] in [0, 1), the same on every backend."""
        seed, layer, first_head = self.random_key
        heads = torch.arange(self.slot_position.shape[1], device=self.slot_position.device).view(1, -1, 1, 1) + first_head
        return counter_random(seed, layer, heads, self.slot_position.long(), self.query_position.long())


@dataclass(frozen=True)
class _OneQuery:
    """What one query of a block gives: the block's is found once, and reduced over the group already."""

    block: View
    query: slice

    def attn(self) -> Tensor:
        return self.block.attn[:, :, self.query].unsqueeze(2)

    def logit(self) -> Tensor:
        return self.block.logit[:, :, self.query].unsqueeze(2)


def _standing(x: Tensor, position: Tensor, visible: Tensor) -> Tensor:
    """Each one's place in the order in which slots rank, int64; what is not visible comes last."""
    key = torch.where(visible, grade(x, position), torch.iinfo(torch.int64).max)
    return key.argsort(dim=-1).argsort(-1)


# -- looking at slots --------------------------------------------------------------------------------------------------


def visible_slots(position: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """Bool [batch, kv_heads, queries, slots]: a query sees the tokens up to its own, at most `window` back."""
    age = query_position[:, None, :, None] - position[:, :, None, :]
    visible = (position[:, :, None, :] >= 0) & (age >= 0)
    return visible if window is None else visible & (age < window)


def row_view(state: SlotState, kept: dict[str, Tensor], query: Tensor, query_position: Tensor, numbers: Tensor) -> View:
    """A block of queries and what they see; what they attend to is not known yet.

    Args:
        kept: `keys`, `values`, `position` and `columns` over slots.
        query: [batch, query_heads, queries, key_dim].
        query_position: int32 [batch, queries], FREE for padding.
    """
    visible = visible_slots(kept["position"], query_position, state.window)
    view = _view(state, kept, query_position, visible, numbers)
    heads = kept["position"].shape[1]
    view.query = query.unflatten(1, (heads, query.shape[1] // heads))
    return view


def slots_view(state: SlotState, kept: dict[str, Tensor], newest: Tensor, numbers: Tensor) -> View:
    """The live slots when the row's newest token is at `newest`, int32 [batch]."""
    return _view(state, kept, newest[:, None], (kept["position"] >= 0).unsqueeze(2), numbers)


def _view(state: SlotState, kept: dict[str, Tensor], query_position: Tensor, visible: Tensor, numbers: Tensor) -> View:
    age = query_position[:, None, :, None] - kept["position"][:, :, None, :]
    placed = (kept["position"][:, :, None, :] >= 0) & (age >= 0)
    doubles = {name: value.unsqueeze(-1) for name, value in state.settings.per_head(numbers).items()}
    return View(
        visible=visible & (query_position >= 0)[:, None, :, None],
        slot_position=kept["position"].unsqueeze(2),
        query_position=query_position[:, None, :, None],
        live=placed.sum(-1, keepdim=True).float(),
        window=state.window,
        numbers={name: value.float() for name, value in doubles.items()},
        doubles=doubles,
        columns=state.column_index.single(kept["columns"]),
        key=kept["keys"],
        value=kept["values"],
        group=state.spec.group,
        random_key=(state.seed, state.layer, state.head_offset),
        rings=state.column_index.rings(kept["columns"]),
        constants=state.constants_of(),
        sketch=state.sketch if state.sketch.dim() > 1 else None,
        factor=state.scaling,
        rope=state.rope,
        text=state.text,
        since=state.prompt_from,
    )
