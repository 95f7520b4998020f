"""A decode step of many caches of one layer in one call, for serving engines."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend, check
from kvdsl.runtime.cpu.prepared import Prepared, address
from kvdsl.runtime.state.slots import SlotState

_SOURCE = Path(__file__).parent / "rows.cpp"


class Rows:
    """The caches of one layer, by number. Each has one row and fixed tensors.

    Args:
        backend: serves all of them.
    """

    def __init__(self, backend: CpuBackend) -> None:
        self._kernel = backend.kernel
        self._function = _library().kvdsl_decode_rows
        self._known: dict[int, tuple[SlotState, Prepared]] = {}
        """Keeps the states' tensors alive."""
        self._addresses = torch.zeros(0, dtype=torch.int64, device="cpu")
        """Addresses of the arguments, by number."""

    def know(self, number: int, state: SlotState, call: AttentionCall, longest: int) -> None:
        """Register a state under a number.

        Args:
            call: sizes, dtype, scaling, window etc. of its tokens; values are ignored.
            longest: longest possible text, in tokens.
        """
        step = Prepared(state, call)
        step.reach(longest)
        self._known[number] = state, step
        if number >= len(self._addresses):
            more = self._addresses.new_zeros(1 + 2 * number - len(self._addresses))
            self._addresses = torch.cat([self._addresses, more])
        self._addresses[number] = step.for_one_thread()

    def decode(
        self,
        numbers: Tensor,
        tokens: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        supplied: Tensor | None = None,
    ) -> None:
        """Decode one token of each of these caches.

        Args:
            numbers: int64 [requests], contiguous, registered numbers.
            tokens: int64 [requests], contiguous, each token's row in the vectors.
            query, key, value: [tokens, heads, dim], contiguous per token.
            out: receives the attention, [tokens, query_heads, value_dim].
            sinks: [query_heads], see `AttentionCall`.
            supplied: float32 [requests, values, kv_heads], contiguous, see `AttentionCall`; None for a policy that reads none.
        """
        vectors = (query, key, value, out)
        if any(x.stride(2) != 1 or x.stride(1) != x.shape[2] for x in vectors):
            raise ValueError("a token's heads must be contiguous")
        sinks = None if sinks is None else sinks.float().contiguous()
        caches, which, where, *tokens_of = (
            ctypes.c_void_p(x.data_ptr()) for x in (self._addresses, numbers, tokens, *vectors)
        )
        check(self._function(
            self._kernel, caches, which, where, len(numbers), *tokens_of, ctypes.c_void_p(address(sinks)),
            ctypes.c_void_p(address(supplied)), ctypes.c_int64(0 if supplied is None else supplied.stride(0)),
            *(ctypes.c_int64(x.stride(0) * x.element_size()) for x in vectors), torch.get_num_threads(),
        ))  # fmt: skip


@lru_cache
def _library() -> ctypes.CDLL:
    from kvdsl.build.cxx import open_library, shared_library

    return open_library(partial(shared_library, _SOURCE, "rows"), "rows")
