"""Take wrong guesses of vLLM's back from an answer: note what a token may overwrite before it comes, and restore it."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.integrations.vllm.answer_step import Generated


@dataclass(frozen=True)
class _Before:
    """An answer before a token came.

    Attributes:
        state: its state's block.
        block, offset: where the token goes, the first free slot of each KV head; int64 [kv_heads].
        rows: the keys and values that are there, [kv_heads, 2, dim].
    """

    state: Tensor
    block: Tensor
    offset: Tensor
    rows: Tensor


class Guesses:
    """Those of one layer.

    Args:
        blocks: [blocks, kv_heads, 2, tokens of a block, dim], the layer's.
        position: where in a state's block positions begin, in bytes.
        slots: of a KV head.
        most: tokens that may be taken back.
    """

    def __init__(self, blocks: Tensor, position: int, slots: int, most: int) -> None:
        self._blocks, self._at, self._slots = blocks, position, slots
        self._noted: dict[int, deque[_Before]] = defaultdict(lambda: deque(maxlen=most))
        """By the block of an answer's state."""
        self._heads = torch.arange(blocks.shape[1])

    def note(self, generated: Generated, table: Tensor, *, first: bool) -> None:
        """Note what tokens may overwrite. The first token of a step is no guess; forget the notes before it."""
        states = generated.state.tolist()
        if first:
            for state in states:
                self._noted[state].clear()
            return
        size = self._blocks.shape[3]
        found = self._blocks[generated.state]
        numbers = (
            found.flatten(1).view(torch.uint8)[:, self._at : self._at + 4 * len(self._heads) * self._slots].view(torch.int32)
        )
        slot = (numbers.unflatten(1, (len(self._heads), -1)) < 0).int().argmax(-1)
        behind = -(-generated.prompt // size) + 1
        block = table[generated.request[:, None], behind[:, None] + slot // size].long()
        rows = self._blocks[block, self._heads, :, slot % size]
        for number, state in enumerate(states):
            self._noted[state].append(_Before(found[number], block[number], slot[number] % size, rows[number]))

    def take_back(self, state: int, tokens: int) -> None:
        """Take back the last tokens of an answer."""
        for _ in range(tokens):
            before = self._noted[state].pop()
            self._blocks[before.block, self._heads, :, before.offset] = before.rows
            self._blocks[state] = before.state
