"""State shared by the layers of a cache: selections reused by other layers, and joint evictions."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Weakly

State = TypeVar("State")
Waiting = TypeVar("Waiting")


class Together(Generic[State, Waiting]):
    """Layers that agree on their victims or share a budget. They evict once the last of them has attended.

    Attributes:
        states: of the layers, in the model's order.
        waiting: what the layers that have attended passed to `wait`.
    """

    def __init__(self) -> None:
        self.states: list[Weakly[State]] = []
        self.waiting: list[Waiting] = []

    def forget(self) -> None:
        """Drop what is waiting: the last forward was interrupted."""
        self.waiting = []

    def wait(self, one: Waiting) -> list[Waiting]:
        """Add one layer's part. Returns the parts of all layers if this is the last one, else []."""
        self.waiting.append(one)
        if len(self.waiting) < len(self.states):
            return []
        waiting, self.waiting = self.waiting, []
        return waiting


class Choices:
    """Selections of the layer that chooses, for the layers that reuse them, during one forward.

    These layers never evict, so a slot holds the same token in all of them.

    Attributes:
        chooser: the number of the layer that chooses.
    """

    def __init__(self, chooser: int) -> None:
        self.chooser = chooser
        self._made: list[Tensor] = []
        self._taken: dict[int, int] = {}

    def begin(self, layer: int) -> None:
        """Begin a layer's forward."""
        self._taken[layer] = 0
        if layer == self.chooser:
            self._made.clear()

    def make(self, choice: Tensor) -> None:
        """Add the selection of the forward's next token, bool [batch, kv_heads, choices, slots]."""
        self._made.append(choice)

    def make_several(self, choices: Tensor) -> None:
        """Add the selections of several tokens, bool [tokens, batch, kv_heads, choices, slots]."""
        self._made.extend(choices)

    def take(self, layer: int, like: Tensor, count: int) -> Tensor:
        """Return the selection for the next token of a reusing layer, bool [batch, kv_heads, choices, slots].

        Args:
            like: [batch, kv_heads, slots], on the device where the selection is needed.
            count: selections per KV head.

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
        """Return the tensor that this layer's selections go to and the selections that it reuses, one of them None.

        Returns:
            Bool [tokens, batch, kv_heads, choices, slots] each.
        """
        if self.chooser == layer:
            batch, heads, slots = position.shape
            return torch.zeros(tokens, batch, heads, count, slots, dtype=torch.bool, device=position.device), None
        return None, torch.stack([self.take(layer, position, count) for _ in range(tokens)])


def choices_of(mode: str, group: int) -> int:
    """Return the number of selections per KV head: one, or one per query head of its group for `each`."""
    return group if mode == "each" else 1
