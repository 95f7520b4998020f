"""What the layers of one cache share: choices that some make for others, and decisions that wait for all of them."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Weakly

State = TypeVar("State")
Waiting = TypeVar("Waiting")


class Together(Generic[State, Waiting]):
    """The layers of one cache that agree on their victims or share a budget: nothing leaves before the last one has attended.

    Attributes:
        states: of the layers, in the model's order.
        waiting: what layers have left that have attended.
    """

    def __init__(self) -> None:
        self.states: list[Weakly[State]] = []
        self.waiting: list[Waiting] = []

    def forget(self) -> None:
        """Nobody waits any more: the last forward was interrupted."""
        self.waiting = []

    def wait(self, one: Waiting) -> list[Waiting]:
        """A layer has attended: what all have left, once this is the last one; nothing before."""
        self.waiting.append(one)
        if len(self.waiting) < len(self.states):
            return []
        waiting, self.waiting = self.waiting, []
        return waiting


class Choices:
    """Shared by the layer that chooses and those that take its choices over, as long as a forward lasts.

    These layers never evict, so that a slot holds the same token in all of them.

    Attributes:
        chooser: the number of the layer that chooses.
    """

    def __init__(self, chooser: int) -> None:
        self.chooser = chooser
        self._made: list[Tensor] = []
        self._taken: dict[int, int] = {}

    def begin(self, layer: int) -> None:
        """A layer's forward begins."""
        self._taken[layer] = 0
        if layer == self.chooser:
            self._made.clear()

    def make(self, choice: Tensor) -> None:
        """What the forward's next token chooses, bool [batch, kv_heads, choices, slots]."""
        self._made.append(choice)

    def make_several(self, choices: Tensor) -> None:
        """The same of some tokens, bool [tokens, batch, kv_heads, choices, slots]."""
        self._made.extend(choices)

    def take(self, layer: int, like: Tensor, count: int) -> Tensor:
        """What the forward's next token attends to in a layer above, bool [batch, kv_heads, choices, slots].

        Args:
            like: has as many rows, heads and slots, and lies where the choice is wanted.
            count: how many choices there are.

        Raises:
            KvdslError: if the layers hold different tokens.
        """
        index = self._taken[layer]
        choice = self._made[index] if index < len(self._made) else None
        if choice is None or choice.shape != (*like.shape[:2], count, like.shape[2]):
            raise KvdslError(
                f"layer {layer} attends to what layer {self.chooser} chooses, but the two hold different tokens, or not as many heads: "
                f"the last forward was interrupted, or the model's layers differ; call `cache.reset()`"
            )
        self._taken[layer] = index + 1
        return choice.to(like.device)

    def of_forward(self, layer: int, position: Tensor, tokens: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Room for what some tokens choose for the layers above, and what they take over.

        Returns:
            Bool [tokens, batch, kv_heads, choices, slots], or None.
        """
        if self.chooser == layer:
            batch, heads, slots = position.shape
            return torch.zeros(tokens, batch, heads, count, slots, dtype=torch.bool, device=position.device), None
        return None, torch.stack([self.take(layer, position, count) for _ in range(tokens)])


def choices_of(mode: str, group: int) -> int:
    """How many choices a query of a KV head makes: one, or one for each query head of its group."""
    return group if mode == "each" else 1
