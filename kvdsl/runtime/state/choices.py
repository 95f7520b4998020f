"""What the queries of one layer choose for the layers above, which take it over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.runtime.state.slots import SlotState


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


def choices_of(state: SlotState, group: int) -> int:
    """How many choices a query of a KV head makes: one, or one for each query head of its group."""
    return group if state.spec.group == "each" else 1


def of_forward(state: SlotState, tokens: int, group: int) -> tuple[Tensor | None, Tensor | None]:
    """Room for what some tokens choose for the layers above, and what they take over.

    Returns:
        Bool [tokens, batch, kv_heads, choices, slots], or None.
    """
    choices, position = state.choices, state.position
    if choices is None:
        return None, None
    count = choices_of(state, group)
    if choices.chooser == state.layer:
        batch, heads, slots = position.shape
        return torch.zeros(tokens, batch, heads, count, slots, dtype=torch.bool, device=position.device), None
    return None, torch.stack([choices.take(state.layer, position, count) for _ in range(tokens)])


def hand_over(states: Iterable[SlotState]) -> None:
    """Have the layers of a cache warn of the same thing once; those that take over a choice know whose, and those that make it for whom.

    Raises:
        KvdslError: if the layer that would choose is none of these.
    """
    known: dict[int, SlotState] = {state.layer: state for state in states}
    warned: set[str] = set()
    for state in known.values():
        state.warned = warned
    made: dict[int, Choices] = {}
    for layer, state in known.items():
        chooser = state.settings.chooser()
        if chooser < 0:
            continue
        if chooser not in known:
            raise KvdslError(
                f"layer {layer} would attend to what layer {chooser} chooses, but {state.spec.name} does not serve that one, whose "
                f"window is the model's own: name another layer in `from layers`"
            )
        state.choices = made.setdefault(chooser, Choices(chooser))
