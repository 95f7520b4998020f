"""A row's text as it comes in, forward by forward: what a prompt is, and what a policy's numbers are after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from kvdsl.interp.evaluate import at_least_one
from kvdsl.interp.head import Head
from kvdsl.interp.inputs import NOTHING, Supplied
from kvdsl.interp.layer import Layer
from kvdsl.interp.numbers import Numbers, resolve_heads
from kvdsl.interp.operations import floats
from kvdsl.interp.step import Step
from kvdsl.ir.nodes import Policy


class Text:
    """One row's heads of one layer, through prompts and the tokens that are decoded after each.

    A forward of several tokens is a prompt, and so is the very first; a single token after it is decoded. At every prompt the policy's
    numbers are found anew, with `prompt` the row's tokens so far: earlier prompts, what was decoded after them, and the new tokens.
    Where it is known that more will come, so many are `expected`.

    Args:
        given: the policy's params by name.
        expected: what `prompt` is at least.
        more: of `Layer`: `call`, `heads`, `head_offset`, `seed`, `tensors`, `kv_dtype`.

    Attributes:
        heads: what each KV head has cached.
        numbers: since the last prompt; None before the first.
        turns: how many turns have ended.
    """

    def __init__(
        self,
        policy: Policy,
        given: Mapping[str, float | None] | None = None,
        layer: int = 0,
        layers: int = 1,
        *,
        key_dim: int = 0,
        value_dim: int = 0,
        expected: float = 0,
        **more: Any,
    ) -> None:
        self.policy, self._given, self._where, self._more = policy, given, (layer, layers), more
        self._expected = expected
        self.numbers: Numbers | None = None
        self.turns = 0
        self._layer = self._with_prompt(0)
        self.heads: list[Head] = self._layer.empty(key_dim, value_dim)

    def forward(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Supplied = NOTHING) -> list[Step]:
        """Some tokens, q [H, L, G, D], k [H, L, D], v [H, L, Dv], and what the caller gives of them, [H, L] each: each head's step."""
        query, key, value = floats(q), floats(k), floats(v)
        tokens = key.shape[1]
        if self.is_prompt(tokens):
            return self.prompt(tokens).prefill(self.heads, query, key, value, supplied)
        return self.decoding.decode(self.heads, query[:, 0], key[:, 0], value[:, 0], supplied)

    def end_turn(self) -> list[Step]:
        """A turn has ended: each head's step."""
        self.turns += 1
        return self._layer.end_turn(self.heads)

    def is_prompt(self, tokens: int) -> bool:
        """Whether so many tokens that come in together are a prompt."""
        return tokens > 1 or self.numbers is None

    def prompt(self, tokens: int) -> Layer:
        """The layer as it takes in a prompt of so many tokens.

        Raises:
            ValueError: if a reduction over the last queries would go over another number of them than before.
        """
        before = self.numbers
        self._layer = self._with_prompt(self.heads[0].seen + tokens)
        self.numbers = self._layer.machines[0].numbers
        if before is not None and self._histories(before) != self._histories(self.numbers):
            raise ValueError(
                f"{self.policy.name} remembers a number of queries that depends on the prompt, and more of a prompt came"
            )
        return self._layer

    @property
    def decoding(self) -> Layer:
        """The layer as it takes in a token after the last prompt."""
        return self._layer

    def _with_prompt(self, prompt: int) -> Layer:
        shape = {name: self._more[name] for name in ("head_offset", "tensors") if name in self._more}
        heads = self._more.get("heads", 1)
        numbers = resolve_heads(
            self.policy, self._given, prompt, *self._where, expected=self._expected, turns=self.turns, heads=heads, **shape
        )
        return Layer(self.policy, [numbers], **self._more)

    def _histories(self, numbers: Numbers) -> list[float]:
        """Of how many queries each ring tells."""
        return [at_least_one(numbers.value(column.size)) for column in self.policy.columns if column.size is not None]
