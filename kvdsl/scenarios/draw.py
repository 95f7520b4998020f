"""Random small texts for policies, as numbers: each token's attention, or vectors that determine it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvdsl.interp.evaluate import Array
from kvdsl.ir.nodes import Given, Input, Policy
from kvdsl.ir.visitors import everywhere, expressions, parts_of, reads

DIMS = 4


@dataclass(frozen=True)
class Drawn:
    """A text.

    Attributes:
        prompt: the number of tokens that arrive together; the others follow one by one.
        attend: each token's attention to the tokens up to itself, [heads, tokens, tokens], with sum 1; None if vectors determine it.
        query: [heads, tokens, group, DIMS].
        key, value: [heads, tokens, DIMS].
        given: the caller's values of the tokens, [heads, tokens] by name.
    """

    prompt: int
    attend: Array | None
    query: Array
    key: Array
    value: Array
    given: Mapping[str, Array] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.key.shape[1])


class Form:
    """The shape of texts on which all of some policies can run."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = policies
        several = any(policy.across is not None or policy.victims != "own" for policy in policies)
        self.heads = 2 if several else 1
        groups = {policy.group for policy in policies}
        self.group = 2 if len(groups) > 1 or "each" in groups else 1

    @cached_property
    def reads(self) -> frozenset[str]:
        """The inputs that any of them reads in a settle."""
        exprs = [expr for policy in self.policies for expr in expressions(policy)]
        return frozenset(part.name for expr in exprs for part in parts_of(expr, Input))

    @property
    def by_vectors(self) -> bool:
        """Whether queries and keys must determine attention, also because tokens are evicted before attention is given."""
        selects = any(policy.select is not None for policy in self.policies)
        early = any(policy.prefill_block is not None or policy.cap == "hard" for policy in self.policies)
        return selects or early or self.group > 1 or bool(self.reads & {"q", "logit"})

    @cached_property
    def vectors(self) -> tuple[str, ...]:
        """The vectors that matter."""
        if self.by_vectors:
            return ("query", "key", "value")
        return tuple(name for name, short in (("key", "k"), ("value", "v")) if short in self.reads)

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The (layer, number of layers) in which the policies may differ."""
        ranged = any(policy.layers is not None for policy in self.policies)
        ranged |= any((policy.select.low or policy.select.high) is not None for policy in self.policies if policy.select)
        counted = any(reads(expr, "layer", "layers") for policy in self.policies for expr in everywhere(policy))
        return [(0, 1), (0, 4), (3, 4)] if ranged or counted else [(0, 1)]

    def draw(self, random: np.random.Generator, size: int) -> Drawn:
        """Draw a text of slightly more than `size` tokens, most or few of them in the prompt; numbers are short."""
        prompt = size + int(random.integers(1, 5)) if random.integers(2) else int(random.integers(1, size + 1))
        more = int(random.integers(1, 5)) + max(0, size - prompt)
        count = prompt + more
        attend = None
        if not self.by_vectors:
            attend = np.array([[_attention(random, token + 1, count) for token in range(count)] for _ in range(self.heads)])
        query = random.integers(-2, 3, (self.heads, count, self.group, DIMS)).astype(float)
        key, value = random.integers(-2, 3, (2, self.heads, count, DIMS)).astype(float)
        by_name = {one.name: one for policy in self.policies for one in policy.given if one.source != "turn"}
        given = {name: self._given(one, random, count) for name, one in by_name.items()}
        return Drawn(prompt, attend, query, key, value, given)

    def _given(self, given: Given, random: np.random.Generator, count: int) -> Array:
        """Draw the caller's values of so many tokens: tenths per KV head, or whether they lie in a span."""
        if given.source == "spans":
            return np.tile(random.integers(0, 2, count).astype(float), (self.heads, 1))
        return random.integers(0, 10, (self.heads, count)) / 10


def _attention(random: np.random.Generator, there: int, count: int) -> Array:
    """Draw a token's attention to `there` tokens, in tenths, or in hundredths for more than ten: [count]."""
    parts = 10 if there <= 10 else 100
    shares = random.multinomial(parts, random.dirichlet(np.ones(there)))
    return np.pad(shares / parts, (0, count - there))
