"""New tokens: where they stand in their rows' texts, and what they have by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.lifetimes import once
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.supplied import supplied_of
from kvdsl.runtime.tensors import NO_CONSTANTS, Constants
from kvdsl.runtime.torch.numerics import sqrt

_BLOCK = 1 << 19
"""Numbers of a block of new tokens' keys: as doubles they should stay in a CPU's cache."""


def seen_before(state: SlotState, call: AttentionCall) -> Tensor:
    """How many tokens every row has had before the call, int32 [batch]."""
    return state.seen if state.allocated else call.key.new_zeros(call.key.shape[0]).int()


def known_lengths(state: SlotState, call: AttentionCall) -> Tensor | None:
    """How many tokens every row has with the call's, int32 [batch] on the CPU; None where only the device knows."""
    if state.allocated or call.real is not None:
        return None
    batch, _, tokens, _ = call.key.shape
    return torch.full((batch,), tokens, dtype=torch.int32)


def new_positions(state: SlotState, call: AttentionCall) -> Tensor:
    """Positions of the new tokens in their rows' texts, int32 [batch, tokens], FREE for padding."""
    batch, tokens, before = call.key.shape[0], call.key.shape[2], seen_before(state, call)
    if call.real is None:
        return (before[:, None] + torch.arange(tokens, dtype=torch.int32, device=before.device)).expand(batch, tokens)
    position = before[:, None] + call.real.cumsum(1).int() - 1
    return position.masked_fill(~call.real, FREE).int()


def place(state: SlotState, call: AttentionCall, columns: Tensor) -> None:
    """Compute the columns that the new tokens have by themselves, [at least len(spec.columns), batch, kv_heads, tokens]."""
    if "token" not in state.spec.column_rules:
        return
    named, tokens = state.column_index.single(columns), call.key.shape[2]
    constants = state.constants_of()
    given: dict[str, Tensor] = {}
    if state.spec.supplied:
        names = (name for name, _ in state.spec.supplied)
        given = dict(zip(names, supplied_of(state.spec, call), strict=True))
    size = max(1, _BLOCK * tokens // max(1, call.key.numel()))
    for part in (slice(start, start + size) for start in range(0, tokens, size)):
        here = {name: column[..., part] for name, column in named.items()}
        now = {name: values[..., part] for name, values in given.items()}
        state.spec.torch_kernels.place(NewTokens(call.key[:, :, part], call.value[:, :, part], here, constants, now))


@dataclass
class NewTokens:
    """Some tokens on their way into the cache, as a generated `place` sees them: float64, [dims or 1, batch, kv_heads, tokens].

    To the bit what every other backend computes: the product of two inputs is exact, and sums have an order. Dims come first, so
    that adding two of them adds two long vectors.

    Attributes:
        key, value: [batch, kv_heads, tokens, dim], of the model's dtype.
        columns: float32 [batch, kv_heads, tokens], by name.
        constants: what the policy's tensors have.
        supplied: what the caller gave, float32 [batch, kv_heads, tokens], by name.
    """

    key: Tensor
    value: Tensor
    columns: dict[str, Tensor]
    constants: Constants = NO_CONSTANTS
    supplied: dict[str, Tensor] = field(default_factory=dict)

    @once
    def k(self) -> Tensor:
        """Keys."""
        return _dims_first(self.key)

    @once
    def v(self) -> Tensor:
        """Values."""
        return _dims_first(self.value)

    def number(self, value: float) -> Tensor:
        """A literal where no tensor stands beside it."""
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=self.key.device)

    def tensor(self, name: str, *, dims: bool) -> Tensor:
        """What one of the policy's tensors has for each head."""
        values = self.constants.values[name]
        row = values.double() if dims else values[:, :1].double()
        return row.T[:, None, :, None]

    def given(self, name: str) -> Tensor:
        """What the caller gave of the tokens."""
        return self.supplied[name].double()[None]

    def over_dims(self, op: str, x: Tensor, *, alike: bool = False) -> Tensor:
        """Reduce the dims to one: `sum`, `mean`, `var`, `std`, `max` or `min`.

        Args:
            alike: x is the same for every dim of a key.
        """
        return _REDUCTIONS[op](x.double().expand(self.key.shape[-1], *x.shape[1:]) if alike else x.double())

    def sqrt(self, x: Tensor) -> Tensor:
        """The root, rounded correctly."""
        return sqrt(x)

    def put(self, name: str, x: Tensor) -> None:
        """Fill a column, rounding once."""
        self.columns[name].copy_(x.squeeze(0))


def _dims_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).to(torch.float64, memory_format=torch.contiguous_format)


def _sum(x: Tensor) -> Tensor:
    """The second half is added to the first, dim by dim, until one number is left; zeros make the dims a power of two."""
    dims = x.shape[0]
    size = 1 << (dims - 1).bit_length()
    x = x + 0.0  # -0 becomes +0, so that zeros change nothing
    while size > 1:
        size //= 2
        more = x[size:]
        x = torch.cat([x[: len(more)] + more, x[len(more) : size]]) if len(more) < size else x[:size] + more
    return x


def _mean(x: Tensor) -> Tensor:
    return _sum(x) / x.shape[0]


def _var(x: Tensor) -> Tensor:
    return _mean((x - _mean(x)).square())


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda x: sqrt(_var(x)),
    "max": lambda x: x.amax(0, keepdim=True) + 0.0,
    "min": lambda x: x.amin(0, keepdim=True) + 0.0,
}


NOT_LIVE = "a slot that is to be replaced does not exist, is free, or is named twice"


def check_text(state: SlotState) -> None:
    """Raise KvdslError for a policy with pages: they are stretches of the text, of which no token leaves."""
    if "page" in state.spec.numbers:
        raise KvdslError(f"{state.spec.name} attends by pages of the text: none of its tokens can be replaced")


def check_count(slots: Tensor, call: AttentionCall) -> None:
    """Raise KvdslError unless there are as many slots, [batch, kv_heads, tokens], as new tokens."""
    wanted = list(call.key.shape[:3])
    if list(slots.shape) != wanted:
        raise KvdslError(
            f"{list(slots.shape)} slots are to be replaced by {wanted} tokens: name as many as there are tokens"
        )


def check_live(state: SlotState, slots: Tensor) -> None:
    """Raise KvdslError unless these are different slots that hold a token."""
    inside = (slots >= 0) & (slots < state.slots)
    index = slots.long().masked_fill(~inside, 0)
    named = torch.zeros_like(state.position).scatter_add_(2, index, inside.int())
    if not bool(inside.all()) or bool((named > 1).any()) or bool(((named > 0) & (state.position == FREE)).any()):
        raise KvdslError(NOT_LIVE)
