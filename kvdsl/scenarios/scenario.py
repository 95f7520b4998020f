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
    """A test that its policy can run.

    Attributes:
        test: the syntax.
        policy: the policy with the test's settings, on state columns; None if it is refused, as the test expects.
        layer, layers: the layer, counted from 0, and the number of layers.
        heads: the number of KV heads.
        group: the number of query heads of each.
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
        """The test's title."""
        return self.test.title.text


def of_head(brought: Sequence[T], head: int) -> T:
    """Return a KV head's part; a single part holds for all heads."""
    return brought[head if len(brought) > 1 else 0]
