"""The interpreter of one KV head that decides by itself: place, attend, observe, settle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from numpy.typing import ArrayLike

from kvdsl.interp.head import Head
from kvdsl.interp.inputs import NOTHING, Supplied
from kvdsl.interp.layer import Layer
from kvdsl.interp.operations import Operations, floats
from kvdsl.interp.step import Step

__all__ = ["Interpreter", "Step"]


@dataclass(frozen=True)
class Interpreter(Operations):
    """Runs one policy on KV head `head_index` of layer `numbers.layer`: a layer of one head.

    A policy that `kvdsl.passes.columns.add_columns` has rewritten is run on state columns, any other on its
    full history.
    """

    @cached_property
    def layer(self) -> Layer:
        """The head alone."""
        return Layer(
            self.policy, self.numbers, self.call, heads=1, head_offset=self.head_index, seed=self.seed, tensors=self.tensors,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def prefill(
        self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Mapping[str, ArrayLike] = NOTHING
    ) -> Step:
        """Tokens of a prompt, q [L, G, D], k [L, D], v [L, Dv]; each sees what was there and those before it.

        One settle, after the last token, or after those that end a block.

        Args:
            supplied: what the caller gives of them, [L] by name.
        """
        return self.layer.prefill([head], floats(q)[None], floats(k)[None], floats(v)[None], _of_layer(supplied))[0]

    def decode(
        self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Mapping[str, ArrayLike] = NOTHING
    ) -> Step:
        """One token after the prompt: q [G, D], k [D], v [Dv]; `supplied` [1] by name."""
        return self.layer.decode([head], floats(q)[None], floats(k)[None], floats(v)[None], _of_layer(supplied))[0]

    def observe_row(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """One decoded token whose attention is given: attn [n + 1] over the slots and, last, the token itself."""
        key, value = (None if x is None else floats(x)[None] for x in (k, v))
        return self.layer.observe_row([head], [attn], key, value)[0]

    def observe_rows(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """L tokens of a prompt whose attention is given, attn [L, n + L], of which each row counts up to its own token.

        Keys and values, [L, D] and [L, Dv], are zero unless given. Logits are NaN.
        """
        key, value = (None if x is None else floats(x)[None] for x in (k, v))
        return self.layer.observe_rows([head], [attn], key, value)[0]

    def settle(self, head: Head) -> Step:
        """Evaluate score and keeps on the live slots, and evict if the trigger holds."""
        return self.layer.settle([head])[0]


def _of_layer(supplied: Mapping[str, ArrayLike]) -> Supplied:
    """What is given of a head's tokens, as of a layer of one head."""
    return {name: floats(values)[None] for name, values in supplied.items()}
