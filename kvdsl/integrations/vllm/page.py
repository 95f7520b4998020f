"""The layout of a request's state of one layer in one block of vLLM's cache: its tensors, one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.evictions import Lies
from kvdsl.integrations.vllm.refusals import refuse_layers
from kvdsl.integrations.vllm.settings import Plan, Settings
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import computed_in
from kvdsl.runtime.cpu.backend import TILE
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.layers import put
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend

_LENT = frozenset({"key_pool", "value_pool", "position", "columns", "seen", "numbers", "rank"})
"""The tensors whose earlier contents a prompt never reads."""

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector instruction's alignment."""


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

    def lies(self) -> Lies:
        """Where a block says what a request holds."""
        (seen, _, _), (position, (_, heads, slots), _) = self.parts["seen"], self.parts["position"]
        return Lies(seen, position, heads, slots, blocks=1)

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """The tensors in blocks, uint8 [..., at least `bytes`], by name: [..., a tensor's shape]."""
        return {
            name: blocks[..., at : at + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(-1, shape)
            for name, (at, shape, dtype) in self.parts.items()
        }

    def spread(self, blocks: Tensor, state: SlotState) -> dict[str, Tensor]:
        """The tensors of one state whose rows are the pages, by name. Each lies in one piece, whatever the blocks.

        Args:
            blocks: uint8 [blocks, at least `bytes`], in one piece.
            state: of the policy, for the shapes that it declares.
        """
        flat, count, found = blocks.view(-1), len(blocks), {}  # a copy would be no block's
        for name, (at, shape, dtype) in self.parts.items():
            batch = state.declared[name].batch
            assert batch is not None and shape[batch] == 1, name
            of_all = (*shape[:batch], count, *shape[batch + 1 :])
            found[name] = flat[count * at : count * (at + math.prod(shape) * dtype.itemsize)].view(dtype).view(of_all)
        return found

    def adopt(self, state: SlotState, tensors: Mapping[str, Tensor]) -> None:
        """Make these the state's tensors, which prompts will fill: a block's, or those of all blocks."""
        state.adopt(
            tensors,
            window=state.window,
            ring_sizes=self.ring_sizes,
            evicts=True,
            selects=state.spec.selects,
            even=True,
        )

    def lend(self, state: SlotState, block: Tensor) -> None:
        """Have a prompt write what it keeps into the block at once, where the shapes are equal."""
        if self.parts.keys() <= _LENT:
            state.reserve()
            state.lay_into(self.views(block))

    def fill(self, blocks: Tensor, numbers: Tensor, states: list[SlotState], left: SlotState) -> None:
        """Copy what prompts left, the rows of a state, each into its block.

        Write every byte that a kernel reads, and forget copies beside the blocks: a request never sees those that had its block before.
        Copy nothing if the prompt has written into the block itself.

        Args:
            blocks: uint8 [blocks, at least `bytes`], a layer's.
            numbers: int64 [rows], the blocks that the rows go to.
            states: those whose tensors lie in these blocks.

        Raises:
            KvdslError: if a prompt has left more than a page holds.
        """
        views, found = self.views(blocks), left.tensors()
        lent = len(numbers) == 1 and all(found[name].data_ptr() == views[name][numbers[0]].data_ptr() for name in self.parts)
        if not lent:
            put(left, numbers, views, self.slots)
        for state in states:
            state.evicts, state.selects = left.evicts, left.selects
            state.forget_copies()


@dataclass(frozen=True)
class State:
    """The layout of an answer's state without its keys and values in one block, where prompts are shared.

    Attributes:
        slots: per KV head. ring_sizes: as `Page` has them.
        places: by name where a tensor begins, in bytes.
        bytes: of the whole.
    """

    slots: int
    ring_sizes: tuple[int, ...]
    places: Mapping[str, int]
    bytes: int

    @classmethod
    def beside(cls, found: Page) -> State:
        """The layout of a page, without keys, values and numbers."""
        places, at = {}, 0
        for name in ("position", "columns", "seen"):
            if name in found.parts:
                _, shape, dtype = found.parts[name]
                places[name] = at
                at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(found.slots, found.ring_sizes, places, at)

    def check_fits(self, block_size: int, token_bytes: int) -> None:
        """Raise KvdslError unless a block has room.

        Args:
            block_size: tokens of a block.
            token_bytes: of a token's keys and values in a layer.
        """
        if self.bytes > block_size * token_bytes:
            raise KvdslError(
                f"what the policy remembers of an answer takes {self.bytes} bytes in a layer, and a block of {block_size} tokens has "
                f"{block_size * token_bytes}: say --block-size {self.least_block(16, token_bytes)}, or keep fewer tokens"
            )

    def least_block(self, step: int, token_bytes: int) -> int:
        """Return the tokens of the smallest block that has room, a multiple of `step`. See `check_fits`."""
        return -(-self.bytes // (step * token_bytes)) * step


@lru_cache
def page(
    settings: Settings, kv_heads: int, dim: int, dtype: torch.dtype, *, layers: int, longest: int, aligned: bool = False
) -> Page:
    """The page of every layer with so many KV heads, found by serving one token in the layer that holds most.

    vLLM does not pass the layer whose size it reads, so all pages have one size.

    Args:
        layers: of the model.
        longest: tokens of the longest text, for which a layer that keeps everything has slots.
        aligned: whether its slots are aligned as an accelerator needs.

    Raises:
        KvdslError: if the size of the policy's state is not known before a request is.
    """
    with torch.device("cpu"):  # vLLM makes layers with a GPU as the default device
        state = _one_token_read(settings, kv_heads, dim, dtype, layers, longest, aligned)
    parts, at = {}, 0
    for name, tensor in state.tensors().items():
        if tensor.numel():
            parts[name] = at, tuple(tensor.shape), tensor.dtype
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Page(parts, state.slots, state.column_index.ring_sizes, at)


def state_of(plan: Plan, kv_heads: int, dim: int, dtype: torch.dtype, *, aligned: bool = False) -> State:
    """Return the layout of an answer's state in its block. `aligned`: see `page`."""
    return State.beside(page(plan.settings, kv_heads, dim, dtype, layers=plan.layers, longest=plan.longest, aligned=aligned))


def _one_token_read(
    settings: Settings, kv_heads: int, dim: int, dtype: torch.dtype, layers: int, longest: int, aligned: bool
) -> SlotState:
    """The state of the layer that holds most, behind one token; see `page`."""
    states = [settings.state(layer, layers) for layer in range(layers)]
    refuse_layers(states)
    state = max(states, key=_most)
    state.room.longest = longest
    state.reserve()
    one = torch.zeros(1, kv_heads, 1, dim, dtype=computed_in(state.spec, dtype))
    TorchBackend().prefill(state, AttentionCall(one, one, one, None, 1.0))
    if state.evicts and "prefill_block" in state.spec.numbers:
        # A prompt that ends inside a block keeps that part until more comes.
        state.room.widen(int(state.settings.named(state.numbers)["prefill_block"].max()) - 1)
        state.extend()
    if aligned:
        state.room.align()
        state.extend()
    state.selects = state.spec.selects  # in some layers; all pages have one size
    copies.keep(state, 1 if aligned else TILE)  # as `runtime.gpu.rows` wants it, and as C++ does
    return state


def _most(state: SlotState) -> float:
    """Tokens that a KV head of the layer holds at most."""
    bound = state.settings.bounded_by()
    return math.inf if bound is None else float(bound.max())
