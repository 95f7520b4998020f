"""A row's text, forward by forward: what counts as a prompt, and the policy's numbers after it."""

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
    """One row's heads of one layer, through prompts and the tokens decoded after each.

    A forward of several tokens is a prompt, and so is the first one; any other single token is decoded. Every prompt evaluates the
    policy's numbers again, with `prompt` as the row's tokens so far: earlier prompts, decoded tokens and the new ones.

    Args:
        given: the policy's params by name.
        more: arguments of `Layer`: `call`, `heads`, `head_offset`, `seed`, `tensors`, `kv_dtype`.

    Attributes:
        heads: the cache of each KV head.
        numbers: the numbers since the last prompt; None before the first.
        turns: the number of ended turns.
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
        **more: Any,
    ) -> None:
        self.policy, self._given, self._where, self._more = policy, given, (layer, layers), more
        self.numbers: Numbers | None = None
        self.turns = 0
        self._layer = self._with_prompt(0)
        self.heads: list[Head] = self._layer.empty(key_dim, value_dim)

    def forward(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Supplied = NOTHING) -> list[Step]:
        """Run tokens, q [H, L, G, D], k [H, L, D], v [H, L, Dv], with the caller's values, [H, L] each; return each head's step."""
        query, key, value = floats(q), floats(k), floats(v)
        tokens = key.shape[1]
        if self.is_prompt(tokens):
            return self.prompt(tokens).prefill(self.heads, query, key, value, supplied)
        return self.decoding.decode(self.heads, query[:, 0], key[:, 0], value[:, 0], supplied)

    def end_turn(self) -> list[Step]:
        """End a turn; return each head's step."""
        self.turns += 1
        return self._layer.end_turn(self.heads)

    def is_prompt(self, tokens: int) -> bool:
        """Return whether tokens that arrive together are a prompt."""
        return tokens > 1 or self.numbers is None

    def prompt(self, tokens: int) -> Layer:
        """Return the layer for a prompt of so many tokens.

        Raises:
            ValueError: if the prompt changes the number of queries that a reduction over the last queries covers.
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
        """The layer for a token after the last prompt."""
        return self._layer

    def _with_prompt(self, prompt: int) -> Layer:
        shape = {name: self._more[name] for name in ("head_offset", "tensors") if name in self._more}
        heads = self._more.get("heads", 1)
        numbers = resolve_heads(self.policy, self._given, prompt, *self._where, turns=self.turns, heads=heads, **shape)
        return Layer(self.policy, [numbers], **self._more)

    def _histories(self, numbers: Numbers) -> list[float]:
        """Return the number of queries of each ring."""
        return [at_least_one(numbers.value(column.size)) for column in self.policy.columns if column.size is not None]
