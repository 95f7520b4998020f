"""The values that policies read per token: its spans, its turn, its id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvdsl.generation.spans import Thinking
from kvdsl.integrations.vllm.request_marks import RequestMarks
from kvdsl.runtime.marks import Marks
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState

THOUGHT = "think"
"""The span that is found in generated text."""


class TokenValues(NamedTuple):
    """Values of some tokens of a request.

    Attributes:
        values: float32 [values, tokens], in the order of `PolicySpec.supplied`.
        turns: number of ended turns.
        late: positions of cached tokens that turn out to be thinking; empty in most steps.
    """

    values: Tensor
    turns: int
    late: range = range(0)

    def of_call(self, kv_heads: int) -> Tensor:
        """Return them as `AttentionCall.supplied`: [values, 1, kv_heads, tokens]."""
        return self.values[:, None, None].expand(-1, 1, kv_heads, -1)


class DecodedValues(NamedTuple):
    """Values of one token of each of several requests.

    Attributes:
        values: float32 [requests, values].
        late: by page, as in `TokenValues`.
    """

    values: Tensor
    late: dict[int, range]

    @classmethod
    def of(cls, token_values: Mapping[int, TokenValues]) -> DecodedValues:
        """Collect the requests' values, by page."""
        values = torch.stack([one.values[:, 0] for one in token_values.values()])
        return cls(values, {page: one.late for page, one in token_values.items() if one.late})

    def of_call(self, kv_heads: int) -> Tensor:
        """Return them as `AttentionCall.supplied` of each request: contiguous [requests, values, kv_heads]."""
        return self.values[..., None].expand(-1, -1, kv_heads).contiguous()


class ValueReader:
    """Computes the values of a request's tokens.

    Args:
        marks: the prompt's spans and turns.
        prompt, answer: token ids; vLLM appends to `answer`.
        decode: returns a token's text; None unless the policy reads the span `think`.
        thinks: the markers around thinking.
    """

    def __init__(
        self, spec: PolicySpec, marks: RequestMarks, prompt: list[int], answer: list[int], decode: Callable[[int], str] | None,
        thinks: tuple[str, str],
    ) -> None:  # fmt: skip
        self._spec, self._ends, self._prompt, self._answer = spec, marks.turns, prompt, answer
        self._marks = Marks()
        for name, stretches in marks.spans.items():
            for start, end in stretches:
                self._marks.add(spec, name, start, end, None, 1)
        begun = next((start for start, end in marks.spans.get(THOUGHT, []) if end is None), None)
        self._thinking = None if decode is None else Thinking(decode, thinks, self._mark, begun)
        self._read = 0
        self._noticed: list[int] = []

    def _mark(self, start: int, end: int | None) -> None:
        self._marks.add(self._spec, THOUGHT, start, end, None, 1)
        if end is None:
            self._noticed.append(start)

    def of_prompt(self, first: int, last: int) -> TokenValues:
        """Return the values of prompt tokens first to last - 1."""
        places = torch.arange(first, last, dtype=torch.int32)
        rows = [self._of_places(name, default, places) for name, default in self._spec.supplied]
        return TokenValues(torch.stack(rows), len(self._ends))

    def _of_places(self, name: str, default: float | None, places: Tensor) -> Tensor:
        if name in dict(self._spec.spans):
            return self._marks.of_tokens(name, places[None, None])[0, 0]
        if name == "token":
            return torch.tensor(self._prompt[int(places[0]) : int(places[-1]) + 1], dtype=torch.float32)
        assert name == "turn", name
        return torch.bucketize(places, torch.tensor(self._ends, dtype=torch.int32), right=True).float()

    def of_answer(self, place: int) -> TokenValues:
        """Return the values of the answer's token at a position of the text. Call in the order of the text."""
        behind = place - len(self._prompt)
        one_more = self._read == behind  # false after a preemption, when nothing is cached
        self._noticed.clear()
        if self._thinking is not None:
            for at in range(self._read, behind + 1):
                self._thinking.read(self._answer[at], len(self._prompt) + at)
        self._read = max(self._read, behind + 1)
        values = [self._of_place(name, place) for name, _ in self._spec.supplied]
        late = range(self._noticed[0], place) if one_more and self._noticed else range(0)
        return TokenValues(torch.tensor(values, dtype=torch.float32)[:, None], len(self._ends), late)

    def _of_place(self, name: str, place: int) -> float:
        if name in dict(self._spec.spans):
            return float(self._marks.holds(name, place))
        return float(self._answer[place - len(self._prompt)] if name == "token" else bisect_right(self._ends, place))


class Text(NamedTuple):
    """A request's token ids, in vLLM's own lists; vLLM appends to `answer`.

    Attributes:
        reader: computes their values; None if the policy reads none.
    """

    prompt: list[int]
    answer: list[int]
    reader: ValueReader | None


def mark_late(spec: PolicySpec, columns: Mapping[str, Tensor], position: Tensor, late: range) -> None:
    """Mark cached tokens as thinking.

    Args:
        columns: by name, [..., kv_heads, slots]. position: same shape. late: positions in the text.
    """
    inside = (position >= late.start) & (position < late.stop)
    columns[dict(spec.spans)[THOUGHT]].masked_fill_(inside, 1.0)


def mark_late_in(state: SlotState, late: range) -> None:
    """`mark_late` in a state."""
    mark_late(state.spec, state.column_index.single(state.columns), state.position, late)
