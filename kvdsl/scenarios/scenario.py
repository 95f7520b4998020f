"""A checked test: the steps to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvdsl.ir.nodes import Policy
from kvdsl.syntax import nodes as syn

T = TypeVar("T")


@dataclass(frozen=True)
class Scenario:
    """A test whose steps make sense for its policy.

    Attributes:
        test: what the file says.
        policy: the policy with the values that the test sets, on state columns; None: it is refused, as the test expects.
        layer, layers: which layer it is, counted from 0, and of how many.
        heads: how many KV heads there are.
        group: how many query heads each of them has.
        key_dim, value_dim: the sizes of keys and values; 1, and every number 0, if the test gives none.
    """

    test: syn.Test
    policy: Policy | None
    layer: int = 0
    layers: int = 1
    heads: int = 1
    group: int = 1
    key_dim: int = 1
    value_dim: int = 1

    @property
    def title(self) -> str:
        """What the test is called."""
        return self.test.title.text


def of_head(brought: Sequence[T], head: int) -> T:
    """What is brought for a KV head; what is brought once holds for all."""
    return brought[head if len(brought) > 1 else 0]
