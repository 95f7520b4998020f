"""New tokens: their positions, and the columns that depend on the token alone."""

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
from kvdsl.runtime.tensors import NO_CONSTANTS, Constants, constants_of
from kvdsl.runtime.torch.numerics import sqrt

_BLOCK = 1 << 19
"""Numbers in a block of new keys. As doubles they should fit a CPU's cache."""


def seen_before(state: SlotState, call: AttentionCall) -> Tensor:
    """Return each row's tokens before the call, int32 [batch]."""
    return state.seen if state.allocated else call.key.new_zeros(call.key.shape[0]).int()


def text_of(state: SlotState, call: AttentionCall) -> NewText:
    """Return where a prompt's new tokens lie in the rows' texts; the layers of a forward share it."""
    return call.once(("text", call.key.device), call.real, lambda: NewText(state, call))


class NewText:
    """Where the new tokens of a prompt lie in the rows' texts.

    Attributes:
        real: bool [batch, tokens], or None without padding.
        before: each row's tokens before, int32 [batch].
        position: int32 [batch, tokens], FREE for padding.
        seen: each row's tokens including the new ones, int32 [batch].
        newest: the position of the row's newest token, int32 [batch].
        come: bool [batch], the rows with new tokens.
        is_first: whether nothing is cached.
    """

    def __init__(self, state: SlotState, call: AttentionCall) -> None:
        self.real, self.is_first = call.real, not state.allocated
        self.before = seen_before(state, call).clone()  # the first layer's, which changes
        self.position = new_positions(state, call)
        self.seen = self.before + (self.position >= 0).sum(1, dtype=torch.int32)
        self.newest = self.seen - 1
        self.come = self.seen > self.before

    @property
    def all_come(self) -> bool:
        """Whether every row has new tokens."""
        return self.real is None or bool(self.real_here.any(1).all())

    @once
    def real_here(self) -> Tensor:
        """`real` on the CPU."""
        batch, tokens = self.position.shape
        return torch.ones(batch, tokens, dtype=torch.bool) if self.real is None else self.real.cpu()

    @once
    def lengths(self) -> Tensor:
        """`seen` on the CPU."""
        count = self.real_here.sum(1, dtype=torch.int32)
        return count if self.is_first else count + self.before.cpu()

    @once
    def spans(self) -> list[slice | None]:
        """Where each row's tokens lie among the new ones; None if padding interrupts them."""
        real = self.real_here
        first, behind = real.int().argmax(1), real.shape[1] - real.flip(1).int().argmax(1)
        found = zip(first.tolist(), behind.tolist(), real.sum(1).tolist(), strict=True)
        return [None if n not in (0, end - begin) else slice(begin, begin + n) for begin, end, n in found]


def new_positions(state: SlotState, call: AttentionCall) -> Tensor:
    """Return the new tokens' positions, int32 [batch, tokens], FREE for padding."""
    tokens, before = call.key.shape[2], seen_before(state, call)
    if call.real is None:
        return before[:, None] + torch.arange(tokens, dtype=torch.int32, device=before.device)
    position = before[:, None] + call.real.cumsum(1).int() - 1
    return position.masked_fill(~call.real, FREE).int()


def place(state: SlotState, call: AttentionCall, columns: Tensor) -> None:
    """Compute the columns that depend on the token alone, [at least len(spec.columns), batch, kv_heads, tokens], in place."""
    if "token" not in state.spec.column_rules:
        return
    named, tokens = state.column_index.single(columns), call.key.shape[2]
    constants = constants_of(state.spec.tensors, state.constants)
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
    """New tokens as a generated `place` reads them: float64, [dims or 1, batch, kv_heads, tokens].

    All backends compute the same bits: a product of two inputs is exact in float64, and sums have a fixed order. Dims come first, so that
    a sum over dims adds long vectors.

    Attributes:
        key, value: [batch, kv_heads, tokens, dim], in the model's dtype.
        columns: float32 [batch, kv_heads, tokens], by name.
        constants: the policy's tensors.
        supplied: values from the caller, float32 [batch, kv_heads, tokens], by name.
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
        """Return a literal as a tensor."""
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=self.key.device)

    def tensor(self, name: str, *, dims: bool) -> Tensor:
        """Return one of the policy's tensors per head."""
        values = self.constants.values[name]
        row = values.double() if dims else values[:, :1].double()
        return row.T[:, None, :, None]

    def given(self, name: str) -> Tensor:
        """Return a value from the caller."""
        return self.supplied[name].double()[None]

    def over_dims(self, op: str, x: Tensor, *, alike: bool = False) -> Tensor:
        """Reduce the dims to one: `sum`, `mean`, `var`, `std`, `max` or `min`.

        Args:
            alike: x is the same for every dim of a key.
        """
        return _REDUCTIONS[op](x.double().expand(self.key.shape[-1], *x.shape[1:]) if alike else x.double())

    def sqrt(self, x: Tensor) -> Tensor:
        """Return the correctly rounded root."""
        return sqrt(x)

    def put(self, name: str, x: Tensor) -> None:
        """Fill a column, rounding once."""
        self.columns[name].copy_(x.squeeze(0))


def _dims_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).to(torch.float64, memory_format=torch.contiguous_format)


def _sum(x: Tensor) -> Tensor:
    """Add the second half of the dims to the first until one is left. Zeros pad the dims to a power of two."""
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


NOT_LIVE = "a slot to replace does not exist, is free, or is named twice"


def check_text(state: SlotState) -> None:
    """Raise KvdslError for a policy with pages, whose tokens cannot be replaced."""
    if "page" in state.spec.numbers:
        raise KvdslError(f"{state.spec.name} attends by pages of the text: none of its tokens can be replaced")


def check_count(slots: Tensor, call: AttentionCall) -> None:
    """Raise KvdslError unless `slots`, [batch, kv_heads, tokens], has one slot per new token."""
    wanted = list(call.key.shape[:3])
    if list(slots.shape) != wanted:
        raise KvdslError(f"slots have shape {list(slots.shape)} and new tokens {wanted}: name as many as there are tokens")


def check_live(state: SlotState, slots: Tensor) -> None:
    """Raise KvdslError unless these are distinct slots that hold a token."""
    inside = (slots >= 0) & (slots < state.slots)
    index = slots.long().masked_fill(~inside, 0)
    named = torch.zeros_like(state.position).scatter_add_(2, index, inside.int())
    if not bool(inside.all()) or bool((named > 1).any()) or bool(((named > 0) & (state.position == FREE)).any()):
        raise KvdslError(NOT_LIVE)
