"""A layer's caches of its requests, by page. On CPUs every block of vLLM's cache is a state of its own, which C++ reads. On GPUs all
blocks together are one state, and a request has a row of it (`kvdsl.runtime.gpu.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvdsl.integrations.vllm.page import Page
from kvdsl.integrations.vllm.token_values import mark_late_in
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.rows import Rows
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog

if TYPE_CHECKING:
    from kvdsl.integrations.vllm.step import Decoded, EveryOne, Prompt
    from kvdsl.runtime.gpu.backend import TritonBackend

Vectors = tuple[Tensor, Tensor, Tensor]
"""Query, key and value of a step's tokens, [tokens, heads, dim] each."""

Calls = Callable[[Tensor, Tensor, Tensor], AttentionCall]
"""A layer's call for query, key and value of [requests, tokens, heads, dim]."""


class Caches(Protocol):
    """A layer's. `blocks`: uint8 [blocks, at least a page's bytes], vLLM's cache of the layer, always the same."""

    def meet(self, prompt: Prompt, blocks: Tensor, vectors: Vectors) -> None:
        """A prompt of a step begins or goes on."""

    def lend(self, state: SlotState, prompt: Prompt, blocks: Tensor) -> None:
        """Lay what the prompt will leave into its block at once, if possible."""

    def put(self, pages: Tensor, blocks: Tensor, left: SlotState) -> None:
        """Store what prompts left, the rows of a state, into their pages, int64 [rows]."""

    def decode(self, decoded: Decoded, place: int, vectors: Vectors, output: Tensor) -> None:
        """A token of each of some requests, the `place`-th of theirs in this step; `output` gets their attention."""

    def take_back(self, page: int, tokens: int) -> None:
        """Take back the last tokens of a request, which were wrong guesses."""

    def held(self, page: int) -> tuple[int, Tensor]:
        """Return how many tokens a request has read, and the positions that it holds, int32 [kv_heads, slots]."""


class InBlocks:
    """See `Caches`: on CPUs."""

    def __init__(
        self, backend: Backend, page: Page, new: Callable[[], SlotState], call: Calls, sinks: Tensor | None, longest: int, guesses: int
    ) -> None:  # fmt: skip
        self._backend, self._page, self._new, self._call = backend, page, new, call
        self._sinks, self._longest = sinks, longest
        self._together = Rows(backend) if isinstance(backend, CpuBackend) and not backend.torch_evicts else None
        self.states: dict[int, SlotState] = {}
        self._guesses = guesses
        self._logs: dict[int, UndoLog] = {}
        """By page, where vLLM guesses: what the tokens behind the first of a step have changed."""

    def meet(self, prompt: Prompt, blocks: Tensor, vectors: Vectors) -> None:
        """Make the state of a page at its first use: its tensors are those in the block, for every request that gets it."""
        if prompt.page in self.states:
            return
        call = self._call(*(x[None, :1] for x in vectors))
        state = self.states[prompt.page] = self._new()
        state.window = call.window
        self._page.adopt(state, self._page.views(blocks[prompt.page]))
        if self._together is not None:
            self._together.know(prompt.page, state, call, self._longest)

    def lend(self, state: SlotState, prompt: Prompt, blocks: Tensor) -> None:
        self._page.lend(state, blocks[prompt.page])

    def put(self, pages: Tensor, blocks: Tensor, left: SlotState) -> None:
        self._page.fill(blocks, pages, [self.states[page] for page in pages.tolist()], left)

    def decode(self, decoded: Decoded, place: int, vectors: Vectors, output: Tensor) -> None:
        """See `Caches`; in one call of C++."""
        if self._guesses:
            self._note(decoded, first=place == 0)
        supplied = None
        if decoded.token_values is not None and self.states[int(decoded.pages[0])].spec.supplied:
            supplied = decoded.token_values.of_call(vectors[1].shape[1])
            for page, late in decoded.token_values.late.items():
                mark_late_in(self.states[page], late)
        if self._together is not None:
            self._together.decode(decoded.pages, decoded.rows, *vectors, output, self._sinks, supplied)
            return
        for at, (number, row) in enumerate(zip(decoded.pages.tolist(), decoded.rows.tolist(), strict=True)):
            token = self._call(*(x[None, row : row + 1] for x in vectors))
            if supplied is not None:
                token = token._replace(supplied=supplied[at, :, None, :, None])
            output[row] = self._backend.decode(self.states[number], token)[0, 0]

    def _note(self, decoded: Decoded, first: bool) -> None:
        """Note what guessed tokens may change, to take them back. The first token of a step is no guess."""
        for number in decoded.pages.tolist():
            if first:
                self._logs[number] = UndoLog(self._guesses)
            else:
                self._logs[number].note(self.states[number])

    def take_back(self, page: int, tokens: int) -> None:
        self._logs[page].take_back(self.states[page], tokens)

    def held(self, page: int) -> tuple[int, Tensor]:
        state = self.states[page]
        return int(state.seen[0]), state.position[0]


class InRows:
    """See `Caches`: on GPUs, without guesses, and with pages of one kind in all layers. `PolicyAttention` refuses the rest.

    Attributes:
        works: the steps' work space, which the model's layers share.
    """

    def __init__(
        self, backend: TritonBackend, page: Page, new: Callable[[], SlotState], call: Calls, requests: int, works: dict[Any, Any]
    ) -> None:  # fmt: skip
        self._backend, self._page, self._new, self._call = backend, page, new, call
        self._requests, self.works = requests, works
        self.let_go()

    def let_go(self) -> None:
        """Free what belongs to vLLM's cache: it makes a small one to measure graphs, then the real one."""
        self._address = 0
        self._state: SlotState | None = None
        self._rows: Any = None
        """The state's, a `kvdsl.runtime.gpu.rows.Rows`: importing it needs Triton."""
        self.works.clear()

    def meet(self, prompt: Prompt | None, blocks: Tensor, vectors: Vectors) -> None:
        """Make the state at the first step of all: its tensors are those in the blocks. vLLM may make other blocks later."""
        if blocks.data_ptr() == self._address:
            return
        from kvdsl.runtime.gpu import rows

        self._address = blocks.data_ptr()
        call = self._call(*(x[None, :1] for x in vectors))
        self._state = self._new()
        self._state.window = call.window
        self._page.adopt(self._state, self._page.spread(blocks, self._state))
        self._state.position.fill_(FREE)
        self._rows = rows.Rows(self._backend, self._state, self.works)
        # Now: vLLM's first prompt is its own, to warm up. Later the first request would wait for the compiler.
        self._rows.make_ready(self._requests, call)

    def lend(self, state: SlotState, prompt: Prompt, blocks: Tensor) -> None:
        """Not possible: a row has no tensors of its own."""

    def put(self, pages: Tensor, blocks: Tensor, left: SlotState) -> None:
        self._rows.put(pages.to(blocks.device), left)

    def decode(self, decoded: Decoded, place: int, vectors: Vectors, output: Tensor) -> None:
        rows = decoded.rows.to(output.device)
        call = self._call(*(x[rows].unsqueeze(1) for x in vectors))
        output[rows] = self._rows.decode(decoded.pages.to(output.device, torch.int32), call)[:, 0]

    def decode_every_one(self, step: EveryOne, vectors: Vectors, output: Tensor) -> None:
        """Decode one token behind every prompt, in order, without waiting for the device."""
        count = len(step.pages)
        call = self._call(*(x[:count].unsqueeze(1) for x in vectors))._replace(real=step.real)
        output[:count] = self._rows.decode(step.pages, call)[:, 0]

    def take_back(self, page: int, tokens: int) -> None:
        """There are no guesses."""
        raise NotImplementedError

    def held(self, page: int) -> tuple[int, Tensor]:
        assert self._state is not None
        return int(self._state.seen[page]), self._state.position[page]
