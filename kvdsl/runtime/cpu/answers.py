"""A decode step of many requests in one call. Prompts stay whole in blocks that requests may share; the policy evicts from answers only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvdsl.runtime.cpu.backend import check
from kvdsl.runtime.cpu.prepared import DecodeArgs, address

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of answers.cpp."""

_SOURCE = Path(__file__).with_name("answers.cpp")


class _Call(ctypes.Structure):
    """The struct `Answers` of answers.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "decode", "plan", "blocks", "table", "row", "request", "place", "prompt", "sinks", "supplied", "query", "key", "value", "out",
        )),
        *((name, ctypes.c_int64) for name in (
            "query_stride", "key_stride", "value_stride", "out_stride", "table_stride", "block_bytes", "head_bytes", "supplied_stride",
            "position_at", "state_at", "seen_at",
        )),
        *((name, ctypes.c_int32) for name in ("count", "block_size", "dtype", "threads")),
    )  # fmt: skip


class Answers:
    """The answers of one layer.

    Args:
        kernel: address of the policy's decode function.
        args: its arguments for an answer's slots, without addresses.
        blocks: [blocks, kv_heads, 2, block size, dim] contiguous: keys and values. A request has the blocks of its prompt, one block for
            its answer's state, and the blocks of its answer's slots.
        places: byte offsets of `position`, `columns` (if any) and `seen` in the state's block.
        sinks: the layer's learned sinks, [query_heads].
    """

    def __init__(
        self, kernel: ctypes.c_void_p, args: DecodeArgs, blocks: Tensor, places: Mapping[str, int], sinks: Tensor | None = None
    ) -> None:  # fmt: skip
        count, heads, _, size, dim = blocks.shape
        head_bytes = 2 * size * dim * blocks.element_size()
        args.keys, args.values = blocks.data_ptr(), blocks.data_ptr() + head_bytes // 2
        args.blocks, args.block_size, args.block_stride, args.head_stride = count, size, heads * head_bytes, head_bytes
        for stride in (args.query_stride, args.key_stride, args.value_stride):
            stride[:] = (0, dim, 0)
        self._dim, self._args = dim, args
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self._call = _Call(
            decode=kernel.value, plan=ctypes.addressof(args), blocks=blocks.data_ptr(), block_bytes=heads * head_bytes,
            head_bytes=head_bytes, position_at=places["position"], state_at=places.get("columns", 0), seen_at=places["seen"],
            block_size=size, dtype=DTYPES.index(blocks.dtype), sinks=address(self._sinks),
        )  # fmt: skip

    def decode_rows(
        self, table: Tensor, which: tuple[Tensor, Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        supplied: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Decode one token of each of several requests.

        Args:
            table: int32 [requests, blocks], each request's blocks in order.
            which: int64 [tokens] each, contiguous: rows of the vectors, rows of the table, positions in the texts, and prompt lengths.
            query, key, value: [tokens, heads, dim], contiguous per token.
            out: receives the attention, [tokens, query_heads, dim].
            supplied: float32 [tokens of `which`, values, kv_heads], contiguous, see `AttentionCall`; None for a policy that reads none.

        Raises:
            KvdslError: if an answer's blocks do not hold its earlier tokens.
        """
        call = self._call
        for name, x in zip(("query", "key", "value", "out"), (query, key, value, out), strict=True):
            if x.stride(2) != 1 or x.stride(1) != self._dim:
                raise ValueError("a token's heads must be contiguous")
            setattr(call, name, x.data_ptr())
            setattr(call, f"{name}_stride", x.stride(0) * x.element_size())
        for name, numbers in zip(("row", "request", "place", "prompt"), which, strict=True):
            setattr(call, name, numbers.data_ptr())
        call.table, call.table_stride, call.count = table.data_ptr(), table.stride(0), len(which[0])
        call.supplied, call.supplied_stride = address(supplied), 0 if supplied is None else supplied.stride(0)
        call.threads = torch.get_num_threads()
        check(library()(ctypes.byref(call)))


@lru_cache
def library() -> Any:
    """Return the driver's function, built at the first call."""
    from kvdsl.build.cxx import kernel_library, open_library

    return open_library(partial(kernel_library, _SOURCE, "answers"), "answers").kvdsl_answer
