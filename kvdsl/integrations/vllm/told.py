"""What policies read of a request's tokens: which spans and turn they lie in, and their ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvdsl.generation.spans import Thinking
from kvdsl.integrations.vllm.said import Said
from kvdsl.runtime.marks import Marks
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState

THOUGHT = "think"
"""The span that is found in what a model generates."""


class Told(NamedTuple):
    """What a request says of some of its tokens.

    Attributes:
        values: float32 [values, tokens], in the order of `PolicySpec.supplied`.
        turns: how many turns have ended.
        late: places from which to which thinking was noticed after its first tokens were cached; empty if there is no such place.
    """

    values: Tensor
    turns: int
    late: range = range(0)

    def of_call(self, kv_heads: int) -> Tensor:
        """As `AttentionCall.supplied` has it: [values, 1, kv_heads, tokens]."""
        return self.values[:, None, None].expand(-1, 1, kv_heads, -1)


class DecodedTold(NamedTuple):
    """What requests say of one token each.

    Attributes:
        values: float32 [requests, values].
        late: by page, see `Told`.
    """

    values: Tensor
    late: dict[int, range]

    @classmethod
    def of(cls, told: Mapping[int, Told]) -> DecodedTold:
        """From what each says, by page."""
        values = torch.stack([one.values[:, 0] for one in told.values()])
        return cls(values, {page: one.late for page, one in told.items() if one.late})

    def of_call(self, kv_heads: int) -> Tensor:
        """For each request what `AttentionCall.supplied` has: contiguous [requests, values, kv_heads]."""
        return self.values[..., None].expand(-1, -1, kv_heads).contiguous()


class Teller:
    """Says it of one request.

    Args:
        said: of the prompt.
        prompt, answer: token ids; the answer grows.
        decode: the text of a token, where the policy reads the span `think`; else None.
        thinks: what stands around thinking.
    """

    def __init__(
        self, spec: PolicySpec, said: Said, prompt: list[int], answer: list[int], decode: Callable[[int], str] | None,
        thinks: tuple[str, str],
    ) -> None:  # fmt: skip
        self._spec, self._ends, self._prompt, self._answer = spec, said.turns, prompt, answer
        self._marks = Marks()
        for name, stretches in said.spans.items():
            for start, end in stretches:
                self._marks.add(spec, name, start, end, None, 1)
        begun = next((start for start, end in said.spans.get(THOUGHT, []) if end is None), None)
        self._thinking = None if decode is None else Thinking(decode, thinks, self._mark, begun)
        self._read = 0
        self._noticed: list[int] = []

    def _mark(self, start: int, end: int | None) -> None:
        self._marks.add(self._spec, THOUGHT, start, end, None, 1)
        if end is None:
            self._noticed.append(start)

    def of_prompt(self, first: int, last: int) -> Told:
        """Of a part of the prompt."""
        places = torch.arange(first, last, dtype=torch.int32)
        rows = [self._of_places(name, default, places) for name, default in self._spec.supplied]
        return Told(torch.stack(rows), len(self._ends))

    def _of_places(self, name: str, default: float | None, places: Tensor) -> Tensor:
        if name in dict(self._spec.spans):
            return self._marks.of_tokens(name, places[None, None])[0, 0]
        if name == "token":
            return torch.tensor(self._prompt[int(places[0]) : int(places[-1]) + 1], dtype=torch.float32)
        assert name == "turn", name
        return torch.bucketize(places, torch.tensor(self._ends, dtype=torch.int32), right=True).float()

    def of_answer(self, place: int) -> Told:
        """Of one token behind the prompt; ask in the order of the text."""
        behind = place - len(self._prompt)
        one_more = self._read == behind  # else the engine has set the request aside meanwhile, with all that is cached
        self._noticed.clear()
        if self._thinking is not None:
            for at in range(self._read, behind + 1):
                self._thinking.read(self._answer[at], len(self._prompt) + at)
        self._read = max(self._read, behind + 1)
        values = [self._of_place(name, place) for name, _ in self._spec.supplied]
        late = range(self._noticed[0], place) if one_more and self._noticed else range(0)
        return Told(torch.tensor(values, dtype=torch.float32)[:, None], len(self._ends), late)

    def _of_place(self, name: str, place: int) -> float:
        if name in dict(self._spec.spans):
            return float(self._marks.holds(name, place))
        return float(self._answer[place - len(self._prompt)] if name == "token" else bisect_right(self._ends, place))


class Text(NamedTuple):
    """A request's tokens, in lists of vLLM's: the answer grows.

    Attributes:
        teller: says what the policy reads of them; None where it reads nothing.
    """

    prompt: list[int]
    answer: list[int]
    teller: Teller | None


def mark_late(spec: PolicySpec, columns: Mapping[str, Tensor], position: Tensor, late: range) -> None:
    """Have cached tokens lie in thinking that was noticed late.

    Args:
        columns: by name, [..., kv_heads, slots]. position: of the same shape.
    """
    inside = (position >= late.start) & (position < late.stop)
    columns[dict(spec.spans)[THOUGHT]].masked_fill_(inside, 1.0)


def mark_late_in(state: SlotState, late: range) -> None:
    """`mark_late` in a state."""
    mark_late(state.spec, state.column_index.single(state.columns), state.position, late)
