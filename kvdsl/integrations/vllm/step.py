"""The requests of a step of vLLM: prompts, or parts of them, and tokens behind prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.integrations.vllm.evictions import Evictions, Left
from kvdsl.integrations.vllm.token_values import DecodedValues, TokenValues

SHORT = 1024
"""The longest prompt that is read with others: for a longer one padding costs more than a call of its own."""

_LEAST = 64
"""Prompts up to this are read together, whatever their lengths."""


@dataclass(frozen=True)
class Prompt:
    """A request's prompt in a step, or a part of it.

    Attributes:
        first, last: its rows in the step's tokens, from `first` to before `last`.
        page: the block that will hold what the policy keeps.
        begins, ends: whether the part is the first, and the last.
        token_values: values of these tokens; None if the policy reads none.
    """

    first: int
    last: int
    page: int
    begins: bool
    ends: bool
    token_values: TokenValues | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return self.last - self.first


@dataclass(frozen=True)
class Batch:
    """Prompts that are read in one call: several short ones that come whole, or one.

    Attributes:
        prompts: the batch's rows.
        pages: theirs, int64 [prompts].
        tokens: where in the step's tokens theirs are, and for padding the first's: int64 [prompts, tokens of the longest]; or a slice of
            these, where prompts of one length lie one after the other.
        real: bool like `tokens`, False for padding; None where no token is.
    """

    prompts: list[Prompt]
    pages: Tensor
    tokens: Tensor | slice
    real: Tensor | None

    @classmethod
    def of(cls, prompts: list[Prompt]) -> Batch:
        """Of these prompts."""
        pages = torch.tensor([prompt.page for prompt in prompts])
        begin, length = prompts[0].first, prompts[0].tokens
        if all(prompt.first == begin + n * length and prompt.tokens == length for n, prompt in enumerate(prompts)):
            return cls(prompts, pages, slice(begin, prompts[-1].last), None)
        first, count = torch.tensor([(prompt.first, prompt.tokens) for prompt in prompts]).T[..., None]
        place = torch.arange(int(count.max()))
        real = place < count
        return cls(prompts, pages, first + place * real, None if bool(real.all()) else real)

    def of_step(self, x: Tensor) -> Tensor:
        """The prompts' tokens, [prompts, tokens, ...], of a step's, [tokens, ...]; as they lie there, if they can."""
        found = x[self.tokens]
        return found.unflatten(0, (len(self.prompts), -1)) if isinstance(self.tokens, slice) else found

    def into_step(self, x: Tensor, step: Tensor) -> None:
        """Write the prompts' tokens to where they are among a step's."""
        if isinstance(self.tokens, slice):
            step[self.tokens] = x.flatten(0, 1)
        elif self.real is None:
            step[self.tokens] = x
        else:
            step[self.tokens[self.real]] = x[self.real]


def batches(prompts: list[Prompt]) -> list[Batch]:
    """Group prompts for reading: short ones that come whole together, if padding makes none of them 2× longer."""
    found: dict[tuple[int, int], list[Prompt]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        together = prompt.begins and prompt.ends and prompt.tokens <= SHORT and prompt.token_values is None
        found[(0, (max(_LEAST, prompt.tokens) - 1).bit_length()) if together else (1, number)].append(prompt)
    return list(map(Batch.of, found.values()))


@dataclass(frozen=True)
class Decoded:
    """A token each of some requests, behind their prompts.

    Attributes:
        pages: theirs, no two the same; int64 [requests].
        rows: where in the step's tokens these are; int64 [requests].
        token_values: values of these tokens; None if the policy reads none.
    """

    pages: Tensor
    rows: Tensor
    token_values: DecodedValues | None = None

    @classmethod
    def of(cls, found: list[tuple[int, int, TokenValues | None]]) -> Decoded:
        """From a page, a row, and what the request says of the token."""
        table = torch.tensor([one[:2] for one in found], dtype=torch.int64).view(-1, 2)
        token_values = {page: one for page, _, one in found if one is not None}
        return cls(
            table[:, 0].contiguous(), table[:, 1].contiguous(), DecodedValues.of(token_values) if token_values else None
        )


@dataclass(frozen=True)
class EveryOne:
    """A step in which every request has one token, behind its prompt: everything is on the device.

    Attributes:
        pages: the requests', in the order of the tokens; int32 [requests]. vLLM may have put padding behind them.
        real: False for padding, bool [requests, 1].
    """

    pages: Tensor
    real: Tensor


@dataclass(frozen=True)
class Step:
    """A step's requests, where the host knows them.

    Attributes:
        batches: those whose prompts are being read.
        decoded: first tokens behind prompts, then the second ones, and so on. A request has several where vLLM guesses, or where it reads
            its answer again after it lost its page.
        rejected: pages, and how many of the last tokens that they have read were wrong guesses.
        evictions: counts evicted tokens, once all layers have attended.
        pages: of all requests of vLLM's batch, in its order.
    """

    batches: list[Batch]
    decoded: list[Decoded]
    rejected: list[tuple[int, int]]
    evictions: Evictions
    pages: list[int]

    def prompts(self) -> Iterator[Prompt]:
        """The prompts of all batches."""
        return (prompt for batch in self.batches for prompt in batch.prompts)

    def left(self) -> Left:
        begun = [prompt.page for prompt in self.prompts() if prompt.begins]
        ended = {prompt.page for prompt in self.prompts() if prompt.ends}
        pages = torch.tensor(list(ended.union(*(decoded.pages.tolist() for decoded in self.decoded))), dtype=torch.int64)
        return Left(begun, pages, torch.zeros_like(pages))
