"""Answers whose slots and state lie in blocks of a serving engine, behind prompts that requests share.

A request's row of the engine's table lists its prompt's blocks, the block of its answer's state, and the blocks of its answer's slots.
Keys and values are read and written in place. `move` copies the state to where a step's other kernels expect it, and back. It finds
everything on the device, so no step waits for the host.

The prompt is one more split of `attend`: the part that an engine's own kernel has found. So the policy observes the probabilities among
all tokens, and `settle` merges the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvdsl.runtime.gpu.prepared import Launch
from kvdsl.runtime.state.layout import Layout
from kvdsl.runtime.state.tensors import Declared

MOVE_OPTIONS = {"num_warps": 4}

_MOVED_AT_ONCE = 1024


class Behind(NamedTuple):
    """A step's prompts and places, one row each; the fields are arguments of kernels.

    Attributes:
        beside: [rows, query_heads, value_dim], the new token's attention to the prompt alone.
        beside_lse: [rows, query_heads] float32, the log-sum-exp of its logits there.
        tables: int32 [requests, blocks], contiguous, the engine's. asked: int32 [rows], the rows' requests in it.
        places: int32 [rows], the new tokens' positions. ends: int32 [rows], tokens of the prompts.
    """

    beside: Tensor
    beside_lse: Tensor
    tables: Tensor
    asked: Tensor
    places: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Lies:
    """Where a state lies in its block, in words of 4 bytes: positions and columns one after the other, and `seen`."""

    columns: int
    first: int
    seen: int


class Lent(Layout):
    """Slots in blocks [kv_heads, 2, size, dim] of keys and values. Steps of a layer's answers use one set of other tensors.

    Tensors:
        key_pool [rows, dim]: all blocks. value_pool: the same from the first value on.
        table [batch, blocks per row]: where each block of a row begins, in units of `size` rows. `move` writes it.

    Args:
        blocks: [blocks, kv_heads, 2, size, dim], contiguous.
        moved: [1 + columns, batch, kv_heads, slots] int32: `position` and `columns` of the state.
        real: [batch] bool: `move` notes which rows are of requests. Block 0 belongs to none.
    """

    DECLARED = (*Layout.DECLARED, Declared("table"))

    table: Tensor

    def __init__(self, blocks: Tensor, lies: Lies, moved: Tensor, real: Tensor) -> None:
        super().__init__()
        _, self._heads, _, self.size, dim = blocks.shape
        self.key_pool = blocks.view(-1, dim)
        self.value_pool = self.key_pool[self.size :]
        self._words = blocks.view(len(blocks), -1).view(torch.int32)
        self._lies, self._moved, self._real = lies, moved, real

    @property
    def head_rows(self) -> int:
        """Rows of the pools from a KV head's first to the next one's."""
        return 2 * self.size

    def launch(self, arguments: Mapping[str, Any], *, back: bool) -> Launch:
        """Move the rows' states out of their blocks, or back."""
        behind = -(-arguments["slots"] // self.size)
        own = {
            "words": self._words, "moved": self._moved, "real": self._real, "block_words": self._words.shape[1],
            "width": arguments["tables"].shape[1], "behind": behind, "first_word": self._lies.first, "seen_word": self._lies.seen,
            "BEHIND_PAD": triton.next_power_of_2(behind), "BACK": back, "BLOCK": _MOVED_AT_ONCE,
        }  # fmt: skip
        grid = (1 + self._lies.columns, arguments["heads"], arguments["batch"])
        return Launch(move, grid, {**arguments, **own}, MOVE_OPTIONS)


@triton.jit
def move(
    words,  # [blocks, block_words] int32: the layer's blocks
    tables,  # [requests, width] int32: the requests' blocks
    asked,  # [B] int32: the rows' requests
    places,  # [B] int32: positions of the new tokens
    ends,  # [B] int32: tokens of the prompts
    moved,  # [1 + columns, R, H, N] int32: positions and columns
    seen,  # [R] int32
    real,  # [R] bool, output: whether the row has a request
    table,  # [R, behind], output: where the blocks of the row's slots begin, in units of SIZE rows
    heads,
    slots,
    cache_rows,  # R
    block_words,
    width,
    behind,  # blocks of an answer's slots
    first_word,  # of positions in a state's block; columns follow
    seen_word,
    SIZE: tl.constexpr,  # slots of a block
    BEHIND_PAD: tl.constexpr,
    BACK: tl.constexpr,  # into the block
    BLOCK: tl.constexpr,
):
    """Copy a row's state out of its block, empty if its answer begins, or back. The grid is (1 + columns, H, B)."""
    plane, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end, now = tl.load(ends + row), tl.load(places + row)
    own = tables + tl.load(asked + row).to(tl.int64) * width + tl.cdiv(end, SIZE)
    state = tl.where(now < end, 0, tl.load(own).to(tl.int64))  # a token of a prompt has no answer yet
    there = tl.where(state != 0, slots, 0)  # slots of a request
    held = tl.where(now == end, 0, there)  # and those with a state: an answer that begins has none yet
    words += state * block_words
    moved += ((plane * cache_rows + row).to(tl.int64) * heads + head) * slots
    inside = words + first_word + (plane * heads + head) * slots
    lane = tl.arange(0, BLOCK)
    for start in range(0, slots, BLOCK):
        i = start + lane
        if BACK:
            tl.store(inside + i, tl.load(moved + i, mask=i < there, other=0), mask=i < there)
        else:
            found = tl.load(inside + i, mask=i < held, other=0)
            tl.store(moved + i, tl.where(i < held, found, tl.where(plane == 0, -1, 0)), mask=i < slots)
    if (plane == 0) & (head == 0):
        if BACK:
            if state != 0:
                tl.store(words + seen_word, tl.load(seen + row))
        else:
            tl.store(seen + row, tl.where(held > 0, tl.load(words + seen_word), now))
            tl.store(real + row, state != 0)
            j = tl.arange(0, BEHIND_PAD)
            block = tl.load(own + 1 + j, mask=j < tl.where(state != 0, behind, 0), other=0)
            tl.store(table + row * behind + j, (block * (2 * heads)).to(table.dtype.element_ty), mask=j < behind)
