"""The protocol of a backend (torch, C++ or Triton), and its argument. `backends` chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvdsl.runtime.forward import Forward, T
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState


class AttentionCall(NamedTuple):
    """One forward of one attention module.

    Attributes:
        query: [batch, query_heads, tokens, key_dim], rotated.
        key, value: the new tokens', [batch, kv_heads, tokens, key_dim or value_dim].
        real: [batch, tokens] bool, False for padding; None if no token is padding.
        scaling: the softmax scale.
        softcap: logits become softcap * tanh(logit / softcap); None for no cap.
        window: the number of tokens that a query sees, itself included; None for all.
        sinks: [query_heads] learned logits added to the softmax's denominator (gpt-oss), or None.
        rope: how queries and keys were rotated; None without rotary positions. Compact positions and policies that rotate need it.
        supplied: per-token values from the caller, float32 [values, batch, kv_heads, tokens]; None for their defaults.
        goes_on: whether another call continues the same prompt. Until the last one nothing is evicted, except under
            `every N`: a prompt in parts keeps the same tokens as a whole one.
        slopes: [query_heads] ALiBi slopes, subtracted from a logit per place between token and query, or None. Places are positions in
            the text; under compact positions, ranks among the live tokens.
        forward: what it shares with the calls of other layers, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    real: Tensor | None
    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    rope: Rope | None = None
    supplied: Tensor | None = None
    goes_on: bool = False
    slopes: Tensor | None = None
    forward: Forward | None = None

    def once(self, what: Hashable, of: Tensor | None, make: Callable[[], T]) -> T:
        """Return what is the same in all layers; see `Forward.once`."""
        return make() if self.forward is None else self.forward.once(what, of, make)

    def part(self, tokens: slice) -> AttentionCall:
        """Return the call for some of its tokens."""
        query, key, value = (x[:, :, tokens] for x in (self.query, self.key, self.value))
        real = None if self.real is None else self.real[:, tokens]
        supplied = None if self.supplied is None else self.supplied[..., tokens]
        return self._replace(query=query, key=key, value=value, real=real, supplied=supplied, forward=None)

    def cast(self, dtype: torch.dtype) -> AttentionCall:
        """Return the call with query, key and value in this dtype."""
        if self.query.dtype == self.key.dtype == self.value.dtype == dtype:
            return self
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))


class Backend(Protocol):
    """Serves one policy's layers."""

    name: str
    served: str
    """The name under which `kvdsl.runtime.graph.enlist` registers it; empty if `torch.compile` can trace its steps."""

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Attend, observe and settle a prompt or a part of it. Returns [batch, tokens, query_heads, value_dim]."""

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Place, attend, observe and settle token by token. Returns [batch, tokens, query_heads, value_dim]."""


class Working(Backend, Protocol):
    """A backend whose states have a workspace."""

    def work_in(self, state: SlotState, call: AttentionCall, tensors: dict[str, Tensor]) -> None:
        """Use another state's workspace for this one; both have the same number of slots."""
