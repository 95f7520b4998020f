"""How what one layer remembers of a request lies in one block of vLLM's cache: the tensors of its state, one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.refusals import refuse_policy
from kvdsl.integrations.vllm.settings import Settings
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.cpu.backend import TILE
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend

ALIGNMENT = 64
"""Bytes: a cache line, and as much as any vector instruction wants."""


@dataclass(frozen=True)
class Page:
    """The places of tensors in a block.

    Attributes:
        parts: by name where a tensor begins, in bytes, its shape for one request, and its dtype.
        slots: per KV head.
        ring_sizes: rows of every ring, as in `SlotState`.
        bytes: of the whole.
    """

    parts: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]
    slots: int
    ring_sizes: tuple[int, ...]
    bytes: int

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors in a block, uint8 [bytes], by name."""
        return {
            name: block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (at, shape, dtype) in self.parts.items()
        }

    def adopt(self, state: SlotState, block: Tensor) -> None:
        """Have the state's tensors be those in the block, which a prompt will fill."""
        state.adopt(
            self.views(block),
            window=state.window,
            ring_sizes=self.ring_sizes,
            evicts=True,
            selects=state.spec.selects,
            even=True,
        )

    def fill(self, own: SlotState, state: SlotState, row: int = 0) -> None:
        """Copy what a prompt has left in a row of a state.

        Every byte that a kernel reads is written, and what was kept beside the block is forgotten: nothing of the request that had the
        block before can be seen.

        Args:
            own: whose tensors are those in the block.

        Raises:
            KvdslError: if a prompt has left more than the page holds.
        """
        if state.filled > self.slots:
            raise KvdslError(f"{state.spec.name} has kept {state.filled} tokens of a prompt, and a page holds {self.slots}")
        views, left = own.tensors(), state.tensors()
        for name in self.parts.keys() - copies.NAMES:
            view, tensor, declared = views[name], left[name], state.declared[name]
            slots = declared.slots
            if declared.batch is not None:
                tensor = tensor.narrow(declared.batch, row, 1)
            if slots is None:
                view.copy_(tensor)
                continue
            held = min(state.slots, self.slots)  # those who stayed lie in front
            view.narrow(slots, 0, held).copy_(tensor.narrow(slots, 0, held))
            view.narrow(slots, held, self.slots - held).fill_(FREE if name in ("position", "rank") else 0)
        own.evicts, own.selects = state.evicts, state.selects
        copies.forget(own)
        copies.forget_halves(own)


@lru_cache
def page(settings: Settings, kv_heads: int, dim: int, dtype: torch.dtype, *, layers: int, longest: int) -> Page:
    """The page of every layer with so many KV heads, found by serving one token in the one that holds most.

    vLLM does not say of which layer it wants to know the size, so all pages have one.

    Args:
        layers: of the model.
        longest: tokens of the longest text, for which a layer that keeps everything has slots.

    Raises:
        KvdslError: if the policy's state has no size that is known before a request is.
    """
    states = [settings.state(layer, layers) for layer in range(layers)]
    for state in states:
        refuse_policy(state)
    state = max(states, key=_most)
    state.longest = longest
    state.reserve()
    one = torch.zeros(1, kv_heads, 1, dim, dtype=dtype)
    TorchBackend().prefill(state, AttentionCall(one, one, one, None, 1.0))
    state.selects = state.spec.selects  # in some layers; all pages have one size
    copies.keep(state, TILE)
    parts, at = {}, 0
    for name, tensor in state.tensors().items():
        if tensor.numel():
            parts[name] = at, tuple(tensor.shape), tensor.dtype
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Page(parts, state.slots, state.ring_sizes, at)


def _most(state: SlotState) -> float:
    """Tokens that a KV head of the layer holds at most."""
    bound = state.settings.bounded_by()
    return math.inf if bound is None else float(bound.max())
