"""Decode steps of a serving engine: one token for some of a layer's caches. The caches are the rows of one state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.backend import TritonBackend, Workspace, fits, sizes_of, workspace_of
from kvdsl.runtime.gpu.launch import on
from kvdsl.runtime.gpu.sizes import Sizes
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.layers import places_of, put
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState

Shared = dict[tuple[int, tuple[Any, ...]], dict[str, Tensor]]
"""Workspace tensors, by rows of a step and by `fits`."""


class Works:
    """One layer's workspaces.

    Args:
        shared: workspace tensors, one dict for all layers of a model: layers run one at a time, so they share these. None: the layer has
            its own.
    """

    def __init__(self, backend: TritonBackend, state: SlotState, shared: Shared | None) -> None:
        self._backend, self._state = backend, state
        self._made: dict[tuple[int, Sizes], Workspace] = {}
        """By rows of a step, rounded up to a power of two to keep them few, and by the sizes of its vectors."""
        self._shared: Shared = {} if shared is None else shared

    def of(self, call: AttentionCall) -> Workspace:
        """Return the workspace of a step of the state's rows."""
        kind = rows, sizes = 1 << (len(call.query) - 1).bit_length(), sizes_of(call)
        if kind not in self._made:
            tensors = self._shared.get((rows, fits(self._state, self._backend.kernels, sizes)))
            made = workspace_of(self._state, self._backend.kernels, sizes, rows, tensors)
            self._shared[rows, made.fits] = made.tensors
            self._made[kind] = made
        return self._made[kind]


def of_nobody(most: int, call: AttentionCall) -> Iterator[AttentionCall]:
    """Yield calls for every number of rows that kernels are compiled for, up to `most`, in which no row is real.

    Args:
        call: one token of one row.
    """
    rows = 1
    while rows < 2 * most:
        query, key, value = (torch.zeros_like(x[:1, :, :1]).repeat(rows, 1, 1, 1) for x in call[:3])
        real = torch.zeros(rows, 1, dtype=torch.bool, device=call.query.device)
        yield call._replace(query=query, key=key, value=value, real=real)
        rows *= 2


class Rows:
    """The numbered caches of one layer. Only `put` waits for the device.

    Args:
        backend: the backend of all caches.
        state: their allocated tensors, with the most slots that a cache may need.
        shared: see `Works`.

    Raises:
        KvdslError: if slots are not contiguous, or may grow.
    """

    def __init__(self, backend: TritonBackend, state: SlotState, shared: Shared | None = None) -> None:
        if type(state.layout) is not SlotAfterSlot or state.room.grows:
            raise KvdslError(f"the slots of {state.spec.name} have no places that are known before a request is")
        self._backend, self._state = backend, state
        copies.keep(state, 1)
        copies.forget_halves(state)
        if state.spec.compact:
            copies.keep_length(state)
        self._places = places_of(state)
        self._works = Works(backend, state, shared)

    def make_ready(self, most: int, call: AttentionCall) -> None:
        """Compile the kernels and allocate the workspaces for steps of up to `most` caches. No cache changes.

        Args:
            call: one token of one row, of the same kind as later steps.
        """
        for nobody in of_nobody(most, call):
            self.decode(torch.zeros(len(nobody.query), dtype=torch.int32, device=call.query.device), nobody)

    def put(self, numbers: Tensor, left: SlotState) -> None:
        """Copy the rows of `left`, a state after its prompts, to the caches `numbers`, int64 [batch of `left`].

        Raises:
            KvdslError: if a row of `left` holds more tokens than a cache has slots.
        """
        state = self._state
        put(left, numbers, self._places, state.slots)
        if "copied" in state.declared:
            state.copied[numbers] = 0
        if state.spec.compact:
            state.length[numbers] = (state.position[numbers] >= 0).sum(-1, keepdim=True, dtype=torch.int32)

    @plain_tensors()
    def decode(self, numbers: Tensor, call: AttentionCall) -> Tensor:
        """Decode one token of each of these caches. Return [batch, 1, query_heads, value_dim].

        Args:
            numbers: int32 [batch], on the device; without duplicates, except for rows that the call marks as not `real`.
            call: [batch, heads, 1, dim].

        Raises:
            KvdslError: if the new tokens differ from the caches in dtype or sizes: kernels receive bare pointers.
        """
        self._state.check_fits(call.key, call.value, len(call.query), self._state.position.shape[1])
        with on(call.query.device):
            return self._backend.decode_token(self._state, call, 0, self._works.of(call), numbers)
