"""What a backend is: the protocol that torch, C++ and Triton keep; `backends` chooses among them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.state.slots import SlotState


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
