"""The reference interpreter defines what a policy means, in NumPy and float64, slow and obvious.

An `Interpreter` runs one KV head of one layer of one row, a `Layer` heads that decide together, and a `Text` a row's prompts and the
tokens decoded after each. Every backend is tested against it, so it uses no code of a backend.

    numbers = resolve(policy, {"budget": 64}, prompt=100)
    interpreter = Interpreter(policy, numbers, Call(scaling=0.125))
    head = interpreter.empty(key_dim=64, value_dim=64)
    interpreter.prefill(head, q, k, v)                 # q [L, G, D], k [L, D], v [L, Dv]
    step = interpreter.decode(head, q, k, v)           # q [G, D], k [D], v [Dv]
    step.out, step.score, step.evicted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from numpy.typing import ArrayLike

from kvdsl.interp.attention import Attention, Call, Rope, attend
from kvdsl.interp.head import Head
from kvdsl.interp.inputs import NOTHING, Supplied
from kvdsl.interp.layer import Layer
from kvdsl.interp.numbers import Numbers, resolve, resolve_heads
from kvdsl.interp.operations import Operations, floats
from kvdsl.interp.settle import overflow, protected, victims
from kvdsl.interp.step import Step
from kvdsl.interp.text import Text

__all__ = [
    "Attention",
    "Call",
    "Head",
    "Interpreter",
    "Layer",
    "Numbers",
    "Rope",
    "Step",
    "Text",
    "attend",
    "overflow",
    "protected",
    "resolve",
    "resolve_heads",
    "victims",
]


@dataclass(frozen=True)
class Interpreter(Operations):
    """Runs one policy on KV head `head_index` of layer `numbers.layer`, as a layer of one head.

    A policy rewritten by `kvdsl.passes.columns.add_columns` runs on state columns, any other on its full history.
    """

    @cached_property
    def layer(self) -> Layer:
        """The head as a layer."""
        return Layer(
            self.policy, self.numbers, self.call, heads=1, head_offset=self.head_index, seed=self.seed, tensors=self.tensors,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def prefill(
        self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Mapping[str, ArrayLike] = NOTHING
    ) -> Step:
        """Run L prompt tokens, q [L, G, D], k [L, D], v [L, Dv]; each attends to earlier tokens and itself.

        Settles once, after the last token, or after each token that ends a block.

        Args:
            supplied: the caller's values, [L] by name.
        """
        return self.layer.prefill([head], floats(q)[None], floats(k)[None], floats(v)[None], _of_layer(supplied))[0]

    def decode(
        self, head: Head, q: ArrayLike, k: ArrayLike, v: ArrayLike, supplied: Mapping[str, ArrayLike] = NOTHING
    ) -> Step:
        """Run one decode token: q [G, D], k [D], v [Dv]; `supplied` [1] by name."""
        return self.layer.decode([head], floats(q)[None], floats(k)[None], floats(v)[None], _of_layer(supplied))[0]

    def observe_row(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """Run one decode token with given attention: attn [n + 1], over the slots and, last, the token itself."""
        key, value = (None if x is None else floats(x)[None] for x in (k, v))
        return self.layer.observe_row([head], [attn], key, value)[0]

    def observe_rows(self, head: Head, attn: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None) -> Step:
        """Run L prompt tokens with given attention, attn [L, n + L]; each row counts up to its own token.

        Keys and values, [L, D] and [L, Dv], are zero by default. Logits are NaN.
        """
        key, value = (None if x is None else floats(x)[None] for x in (k, v))
        return self.layer.observe_rows([head], [attn], key, value)[0]

    def settle(self, head: Head) -> Step:
        """Evaluate score and keeps on the live slots, and evict if the trigger fires."""
        return self.layer.settle([head])[0]


def _of_layer(supplied: Mapping[str, ArrayLike]) -> Supplied:
    """Turn a head's values into those of a layer of one head."""
    return {name: floats(values)[None] for name, values in supplied.items()}
