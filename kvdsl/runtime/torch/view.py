"""The interface of generated torch code.

Values are [batch, kv_heads, queries, slots], with size 1 along an axis over which a value does not vary. Expressions of the query vector
are computed per query head, [batch, kv_heads, group, queries, slots], and then reduced by `View.over_group`. Under a reduction over dims
there is one more axis, last. Arithmetic is float32.
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
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.tensors import NO_CONSTANTS, Constants, constants_of
from kvdsl.runtime.torch.numerics import counter_random, masked_reduce, sqrt
from kvdsl.runtime.torch.pages import Pages, page_of
from kvdsl.runtime.torch.vectors import Rotation, Sketch
from kvdsl.runtime.torch.visible import ENTRIES, Visible

_TEXT_FOLDS: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0.0, torch.add),
    "max": (-torch.inf, torch.maximum),
    "min": (torch.inf, torch.minimum),
}
"""How blocks of the prompt's queries combine: the neutral element and the operation."""


class Weights(Protocol):
    """Attention of a block of queries per query head: float32 [batch, kv_heads, group, queries, slots]."""

    def attn(self) -> Tensor:
        """Return probabilities; arbitrary where not visible."""

    def logit(self) -> Tensor:
        """Return logits; arbitrary where not visible."""


@dataclass
class View:
    """A block of queries and their visible slots; in a settle, the newest query and the live slots.

    Attributes:
        visible: what each query sees; in a settle, the live slots.
        query_position: int32 [batch, 1, queries, 1], of each query's token.
        live: float32 [batch, kv_heads, queries, 1], the number of live slots at each query.
        window: the number of tokens that a query sees, or None.
        numbers: the policy's numbers, float32 [batch, kv_heads or 1, 1, 1] each.
        doubles: the same in float64, for counts.
        columns: the state columns, float32 [batch, kv_heads, slots] each.
        query: [batch, kv_heads, group, queries, dim]; None in a settle.
        key, value: [batch, kv_heads, slots, dim].
        group: how query heads are reduced.
        random_key: (seed, layer, first KV head) of `random()`.
        rings: the newest queries' values, float32 [size, batch, kv_heads, slots] each.
        constants: the policy's tensors.
        sketch: None for a policy without one.
        protected: bool [batch, kv_heads, slots], protected slots; None outside a settle.
        weights: attention of the queries; None in a settle.
        factor: the softmax scale.
        rope: the model's rotation, or None.
        newest: int32 [batch, 1, 1, 1], the newest token's position, in a view of the prompt's queries. None if it is the query's own.
        prompt: the prompt's queries and positions; see `SlotState.text`.
        since: int32 [batch, 1, 1], the first query that counts in rings; None for all.
    """

    visible: Visible
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
    constants: Constants = NO_CONSTANTS
    sketch: Sketch | None = None
    doubles: dict[str, Tensor] = field(default_factory=dict)
    protected: Tensor | None = None
    weights: Weights | None = None
    factor: float = 1.0
    rope: Rope | None = None
    newest: Tensor | None = None
    prompt: Sequence[tuple[Tensor, Tensor]] = ()
    since: Tensor | None = None

    def queries(self) -> Iterator[View]:
        """Yield the queries one by one in text order."""
        count = self.visible.mask.shape[2]
        if count == 1:
            yield self
            return
        for number in range(count):
            one = slice(number, number + 1)
            yield replace(
                self,
                visible=self.visible.of_queries(one),
                query_position=self.query_position[:, :, one],
                live=self.live[:, :, one],
                query=None if self.query is None else self.query[:, :, :, one],
                weights=_OneQuery(self, one),
            )

    @once
    def attn(self) -> Tensor:
        """Probabilities reduced over the group: [batch, kv_heads, queries, slots]; arbitrary where not visible."""
        assert self.weights is not None
        return self.over_group(self.weights.attn())

    @once
    def logit(self) -> Tensor:
        """Logits reduced over the group: [batch, kv_heads, queries, slots]; arbitrary where not visible."""
        assert self.weights is not None
        return self.over_group(self.weights.logit())

    @property
    def position(self) -> Tensor:
        """Positions as float32: [batch, kv_heads, 1, slots]."""
        return self.visible.position.float()

    @property
    def age(self) -> Tensor:
        """[batch, kv_heads, queries, slots]. Subtracted as integers: float32 cannot tell large neighbouring positions apart."""
        return (self.query_position - self.visible.position).float()

    @property
    def seen(self) -> Tensor:
        """The row's tokens up to the query's: [batch, 1, queries, 1]."""
        return (self.query_position + 1).float()

    @property
    def scaling(self) -> Tensor:
        """The softmax scale: [1, 1, 1, 1]."""
        return torch.full((1, 1, 1, 1), self.factor, dtype=torch.float32, device=self.visible.mask.device)

    @property
    def observed(self) -> Tensor:
        """How many queries could see the slot, its own token's included."""
        seen = self.age + 1
        return seen if self.window is None else seen.clamp(max=self.window)

    def number(self, name: str) -> Tensor:
        """Return one of the policy's numbers."""
        return self.numbers[name]

    def exact(self, name: str) -> Tensor:
        """Return a number of the policy, `live` or `seen` for counting: float64 [batch, kv_heads or 1, 1 or queries, 1]."""
        return self.doubles[name] if name in self.doubles else getattr(self, name).double()

    def column(self, name: str) -> Tensor:
        """Return a state column."""
        return self.columns[name].unsqueeze(2)

    def ring(self, name: str, op: str, argument: Tensor | float | None = None) -> Tensor:
        """Reduce the newest queries' values per slot, over those that could see it: [batch, kv_heads, 1, slots].

        Args:
            argument: of the reduction, one number per row or for all.
        """
        size = self.number(size_name(name))[:, 0]  # the same for all heads
        held = valid(
            len(self.rings[name]),
            size,
            self.query_position[:, :, 0],
            self.visible.position[:, :, 0],
            self.window,
            self.since,
        )
        if isinstance(argument, Tensor):
            argument = argument.reshape(-1, 1, 1)
        return masked_reduce(op, self.rings[name], held, 0, argument).squeeze(0).unsqueeze(2)

    @property
    def q(self) -> Tensor:
        """Query vectors broadcast over slots: [batch, kv_heads, group, queries, 1, dim]."""
        assert self.query is not None
        return self.query.float().unsqueeze(-2)

    @property
    def query_head(self) -> Tensor:
        """Indices of query heads: [1, kv_heads, group, 1, 1]."""
        assert self.query is not None
        heads, group = self.query.shape[1:3]
        first = self.random_key[2] * group
        return torch.arange(first, first + heads * group, device=self.query.device).float().view(1, heads, group, 1, 1)

    @property
    def k(self) -> Tensor:
        """Keys broadcast over queries: [batch, kv_heads, 1, slots, dim]."""
        return self.key.float().unsqueeze(2)

    @property
    def v(self) -> Tensor:
        """Values broadcast over queries: [batch, kv_heads, 1, slots, dim]."""
        return self.value.float().unsqueeze(2)

    @property
    def dot_qk(self) -> Tensor:
        """Unscaled dot products per query head: [batch, kv_heads, group, queries, slots]."""
        assert self.query is not None
        return torch.einsum("bhgqd,bhsd->bhgqs", self.query.float(), self.key.float())

    def sqrt(self, x: Tensor) -> Tensor:
        """Return the correctly rounded root, unlike torch's on CPUs."""
        return sqrt(x.float())

    def over_group(self, x: Tensor) -> Tensor:
        """Reduce [batch, kv_heads, group, queries, slots] over the group; unchanged under `each`."""
        if self.group == "each":
            return x
        if self.group == "max":
            return x.amax(2)
        return x.mean(2) if self.group == "mean" else x.sum(2)

    def product(self, query: Tensor, slot: Tensor) -> Tensor:
        """Multiply query vectors, [..., queries, 1, dim], and slot vectors, [..., 1, slots, dim]: [..., queries, slots]."""
        return query.squeeze(-2) @ slot.squeeze(-3).transpose(-1, -2)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @once
    def pages(self) -> Pages:
        """The pages of the slots."""
        numbers = {name: values[:, 0] for name, values in self.numbers.items() if name in ("page", "page_after")}
        return Pages(self.visible, page_of(self.visible.position[:, :, 0], numbers).unsqueeze(2))

    @property
    def rotation(self) -> Rotation:
        """The model's rotation."""
        return Rotation(self.rope, self.query_position if self.newest is None else self.newest)

    @property
    def text(self) -> Text:
        """The prompt's queries."""
        return Text(self)

    def random(self) -> Tensor:
        """Return numbers in [0, 1), [batch, kv_heads, queries, slots], the same on every backend."""
        seed, layer, first_head = self.random_key
        heads = (
            torch.arange(self.visible.position.shape[1], device=self.visible.position.device).view(1, -1, 1, 1) + first_head
        )
        return counter_random(seed, layer, heads, self.visible.position.long(), self.query_position.long())


@dataclass(frozen=True)
class _OneQuery:
    """One query of a block whose values are computed once and already reduced over the group."""

    block: View
    query: slice

    def attn(self) -> Tensor:
        return self.block.attn[:, :, self.query].unsqueeze(2)

    def logit(self) -> Tensor:
        return self.block.logit[:, :, self.query].unsqueeze(2)


class Text:
    """The prompt's queries, each with all slots of a view."""

    def __init__(self, slots: View) -> None:
        self._slots = slots

    def over(
        self,
        op: str,
        body: Callable[[View], Tensor],
        *,
        grouped: bool = False,
        dims: bool = False,
        after: Tensor | float = 0,
    ) -> Tensor:
        """Reduce over the prompt's queries, keeping the axis.

        Args:
            body: computes values from a view of a block of queries.
            grouped, dims: whether the values have a group axis, or a last axis of dims.
            after: queries before this position do not count.
        """
        axis = -3 if dims else -2

        def folded(op: str, body: Callable[[View], Tensor]) -> Tensor:
            fill, fold = _TEXT_FOLDS[op]
            total = torch.full((1, 1, 1, 1), fill, dtype=torch.float32, device=self._slots.visible.mask.device)
            for view, counts in self._blocks(after):
                counts = counts.unsqueeze(2) if grouped else counts
                counts = counts.unsqueeze(-1) if dims else counts
                x = torch.where(counts, body(view).float(), fill)
                total = fold(total, x.sum(axis, keepdim=True) if op == "sum" else getattr(x, f"a{op}")(axis, keepdim=True))
            return total

        if op in _TEXT_FOLDS:
            return folded(op, body)
        count = torch.as_tensor(sum(counts.sum(2, keepdim=True) for _, counts in self._blocks(after)))
        count = count.unsqueeze(2) if grouped else count
        count = count.unsqueeze(-1) if dims else count
        mean = folded("sum", body) / count
        if op == "mean":
            return mean
        variance = folded("sum", lambda text: (body(text) - mean).square()) / count
        return variance if op == "var" else variance.sqrt()

    def _blocks(self, after: Tensor | float) -> Iterator[tuple[View, Tensor]]:
        """Yield blocks of the prompt's queries with all slots, and which queries count, bool [batch, kv_heads or 1, queries, 1]."""
        batch, heads, _, slots = self._slots.visible.mask.shape
        for query, position in self._slots.prompt:
            size = max(1, ENTRIES // (batch * query.shape[1] * slots))
            for start in range(0, position.shape[1], size):
                part = slice(start, start + size)
                at = position[:, None, part, None]
                own = query.unflatten(1, (heads, -1))[:, :, :, part]
                yield (
                    replace(self._slots, query=own, query_position=at, newest=self._slots.query_position, prompt=()),
                    (at >= 0) & (at >= after),
                )


# -- making views ------------------------------------------------------------------------------------------------------


def visible_slots(position: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """Return what queries see, bool [batch, kv_heads, queries, slots]: tokens up to their own, at most `window`."""
    age = query_position[:, None, :, None] - position[:, :, None, :]
    visible = (position[:, :, None, :] >= 0) & (age >= 0)
    return visible if window is None else visible & (age < window)


def row_view(state: SlotState, kept: dict[str, Tensor], query: Tensor, query_position: Tensor, numbers: Tensor) -> View:
    """Return a view of a block of queries and what they see, without their attention.

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
    """Return a view of the live slots when the newest token is at `newest`, int32 [batch]."""
    return _view(state, kept, newest[:, None], (kept["position"] >= 0).unsqueeze(2), numbers)


def _view(state: SlotState, kept: dict[str, Tensor], query_position: Tensor, visible: Tensor, numbers: Tensor) -> View:
    age = query_position[:, None, :, None] - kept["position"][:, :, None, :]
    placed = (kept["position"][:, :, None, :] >= 0) & (age >= 0)
    doubles = {name: value.unsqueeze(-1) for name, value in state.settings.per_head(numbers).items()}
    return View(
        visible=Visible(visible & (query_position >= 0)[:, None, :, None], kept["position"].unsqueeze(2)),
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
        constants=constants_of(state.spec.tensors, state.constants),
        sketch=Sketch(state.sketch, kept["keys"].shape[-1]) if state.sketch.dim() > 1 else None,
        factor=state.scaling,
        rope=state.rope,
        prompt=state.text,
        since=state.prompt_from,
    )
