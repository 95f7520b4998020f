"""Sort a step's tokens where requests share prompts: parts of prompts, and tokens behind them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvdsl.integrations.vllm.evictions import Evictions, Left
from kvdsl.integrations.vllm.texts import Texts
from kvdsl.integrations.vllm.token_values import DecodedValues, TokenValues


@dataclass(frozen=True)
class Part:
    """The part of a request's prompt that this step reads.

    Attributes:
        first, last: its rows among the step's tokens, from `first` to before `last`.
        before: tokens of the prompt that have been read before, by this request or by another one.
        request: its row of the table.
    """

    first: int
    last: int
    before: int
    request: int


@dataclass(frozen=True)
class Generated:
    """One token of each of several requests, behind their prompts; int64 [tokens] each.

    Attributes:
        row: where they are among the step's tokens. request: their rows of the table. place: their places in the texts.
        prompt: how many tokens the prompts have. state: the blocks that have their answers' states.
        token_values: values of these tokens; None if the policy reads none.
    """

    row: Tensor
    request: Tensor
    place: Tensor
    prompt: Tensor
    state: Tensor
    token_values: DecodedValues | None = None

    @classmethod
    def of(cls, found: list[tuple[tuple[int, int, int, int, int], TokenValues | None]]) -> Generated:
        """From tuples of these numbers, and what the request says of the token."""
        token_values = {numbers[4]: one for numbers, one in found if one is not None}
        row, request, place, prompt, state = torch.tensor(
            [numbers for numbers, _ in found], dtype=torch.int64
        ).T.contiguous()
        return cls(row, request, place, prompt, state, DecodedValues.of(token_values) if token_values else None)


class Answer(NamedTuple):
    """A request of the batch.

    Attributes:
        state: the block of its answer's state, if it has one.
        prompt: tokens of its prompt. read: tokens that it has read, this step's included.
    """

    state: int
    prompt: int
    read: int


@dataclass(frozen=True)
class Step:
    """What a step's tokens are.

    Attributes:
        parts: of prompts.
        rows, block, offset: of all tokens in these: where they are among the step's, and where their keys and values go, int64 [tokens].
        generated: the first tokens behind prompts, then the second ones, and so on. A request has several where vLLM guesses, and where it
            reads its answer again after a preemption.
        rejected: blocks of states, and how many of the last tokens that they have read were wrong guesses.
        table: int32 [requests, blocks].
        pages: the batch's requests, in its order.
        evictions: counts evicted tokens, once all layers have attended.
    """

    parts: list[Part]
    rows: Tensor
    block: Tensor
    offset: Tensor
    generated: list[Generated]
    rejected: list[tuple[int, int]]
    table: Tensor
    pages: list[Answer]
    evictions: Evictions

    def left(self) -> Left:
        if not self.generated:
            return Left([], *torch.zeros(2, 0, dtype=torch.int64))
        first = self.generated[0]  # has every request with tokens behind its prompt
        begun = first.state[first.place == first.prompt]
        return Left(begun.tolist(), first.state, first.prompt)


class Sorter:
    """Sorts steps' tokens.

    Args:
        size: tokens of a block.
        texts: the requests', where something reads them.
    """

    def __init__(self, size: int, evictions: Evictions, texts: Texts | None) -> None:
        self._size, self._evictions, self._texts = size, evictions, texts
        self._read: dict[int, int] = {}
        """By the block of an answer's state: how many tokens its request has read, guesses included. On GPUs, where vLLM does not guess,
        not all steps are sorted.
        """

    def sort(self, known: Any) -> Step:
        """Sort by vLLM's `CommonAttentionMetadata`, which has the prompts' lengths."""
        table, ends = known.block_table_tensor.cpu(), known.rswa_prefix_lens.cpu()
        assert table.stride(1) == 1 and table.dtype == torch.int32
        starts, lengths = known.query_start_loc_cpu.tolist(), known.seq_lens.tolist()
        places = (-(-ends.long() // self._size)).clamp(max=table.shape[1] - 1)
        states = table[: len(places)].gather(1, places[:, None])[:, 0].tolist()
        pages = list(map(Answer, states, ends.tolist(), lengths))
        parts: list[Part] = []
        rejected: list[tuple[int, int]] = []
        generated: dict[int, list[tuple[tuple[int, int, int, int, int], TokenValues | None]]] = defaultdict(list)
        for request, (first, last, one) in enumerate(zip(starts, starts[1:], pages, strict=False)):
            if first == last:
                continue
            before = one.read - (last - first)
            behind = max(first, min(last, first + one.prompt - before))  # the first row behind the prompt
            if behind > first:
                parts.append(Part(first, behind, before, request))
            if before > one.prompt and self._read.get(one.state, 0) > before:
                rejected.append((one.state, self._read[one.state] - before))
            if last > behind:
                self._read[one.state] = one.read
            reader = None if self._texts is None else self._texts.rows[request].reader
            for number, row in enumerate(range(behind, last)):
                place = before + row - first
                token_values = None if reader is None else reader.of_answer(place)
                generated[number].append(((row, request, place, one.prompt, one.state), token_values))
        found = list(map(Generated.of, generated.values()))
        return Step(parts, *_places(parts, table, self._size), found, rejected, table, pages, self._evictions)


def _places(parts: list[Part], table: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, the blocks and the places in blocks of all tokens of these parts."""
    nothing = [torch.zeros(0, dtype=torch.int64)]
    rows = torch.cat(nothing + [torch.arange(part.first, part.last) for part in parts])
    places = torch.cat(nothing + [torch.arange(part.before, part.before + part.last - part.first) for part in parts])
    owners = torch.cat(nothing + [torch.full((part.last - part.first,), part.request) for part in parts])
    return rows, table[owners, places // size].long(), places % size
