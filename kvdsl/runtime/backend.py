"""What a backend is, the protocol that torch, C++ and Triton keep, and what it is asked to attend to. `backends` chooses among them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState


class AttentionCall(NamedTuple):
    """One forward of one attention module.

    Attributes:
        query: [batch, query_heads, tokens, key_dim], rotated.
        key, value: [batch, kv_heads, tokens, key_dim or value_dim], the new tokens'.
        real: [batch, tokens] bool, False for padding; None when no token is.
        scaling: factor of the dot products.
        softcap: logits become softcap * tanh(logit / softcap), or None.
        window: a query sees the last `window` tokens only, itself included, or None.
        sinks: [query_heads] learned logits that join the softmax's denominator (gpt-oss), or None.
        rope: how queries and keys were rotated; None without rotary positions. Compact positions ask, and who turns keys.
        supplied: what the caller gives of the tokens, float32 [values, batch, kv_heads, tokens]; None: the defaults.
        goes_on: whether more of the same prompt follows in another call. Until then nothing leaves, except by blocks: a prompt in parts
            leaves what it leaves as a whole.
        slopes: [query_heads] what each place that a token stands behind the query takes from its logit (ALiBi), or None: places in the
            text, or under compact positions among the live tokens.
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

    def part(self, tokens: slice) -> AttentionCall:
        """The same of some of the tokens."""
        query, key, value = (x[:, :, tokens] for x in (self.query, self.key, self.value))
        real = None if self.real is None else self.real[:, tokens]
        supplied = None if self.supplied is None else self.supplied[..., tokens]
        return self._replace(query=query, key=key, value=value, real=real, supplied=supplied)

    def cast(self, dtype: torch.dtype) -> AttentionCall:
        """The same with vectors of this dtype."""
        if self.query.dtype == self.key.dtype == self.value.dtype == dtype:
            return self
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))


class Backend(Protocol):
    """Serves one policy's layers."""

    name: str
    served: str
    """What `kvdsl.runtime.graph.enlist` calls it; nothing for one whose steps can be traced."""

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Attend, observe and settle a prompt (or a part of it); [batch, tokens, query_heads, value_dim]."""

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Place, attend, observe and settle token by token; [batch, tokens, query_heads, value_dim]."""


class Working(Backend, Protocol):
    """A backend whose states have a workspace."""

    def work_in(self, state: SlotState, call: AttentionCall, tensors: dict[str, Tensor]) -> None:
        """Have the state work in the tensors of another one's workspace, whose slots are alike."""
