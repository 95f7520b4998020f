"""The layers of a cache: those that the policy manages, and transformers' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.layer import SlotLayer
from kvdsl.runtime.state.slots import SlotState


class Layers:
    """The layers of a cache by kind.

    Args:
        layers: the cache's own list, in which layers may be replaced.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    @property
    def managed(self) -> list[SlotLayer]:
        """The layers that the policy manages."""
        return [layer for layer in self._layers if isinstance(layer, SlotLayer)]

    @property
    def native(self) -> list[Any]:
        """The layers that are transformers' own."""
        return [layer for layer in self._layers if not isinstance(layer, SlotLayer)]

    @property
    def indices(self) -> list[int]:
        """The numbers of the managed layers."""
        return [layer.state.layer for layer in self.managed]

    def managed_layer(self, index: int) -> SlotLayer:
        """Return a managed layer.

        Raises:
            KvdslError: if there is no such layer, or it is not managed.
        """
        if not -len(self._layers) <= index < len(self._layers):
            raise KvdslError(f"there is no layer {index}: the model has {len(self._layers)} (0 to {len(self._layers) - 1})")
        found = self._layers[index]
        if not isinstance(found, SlotLayer):
            raise KvdslError(f"layer {index} is transformers' own {type(found).__name__}; the policy manages {self.indices}")
        return found

    def state(self, index: int) -> SlotState:
        """Return the slots of a managed layer.

        Raises:
            KvdslError: if the layer is not managed, or nothing is cached.
        """
        found = self.managed_layer(index)
        if not found.state.allocated:
            raise KvdslError("nothing is cached yet: generate, or run the model once with this cache")
        return found.state

    def bytes(self) -> int:
        """Return the size of all layers in bytes."""
        return sum(layer.bytes() for layer in self.managed) + sum(map(native_bytes, self.native))


def native_bytes(layer: Any) -> int:
    """Return the size of one of transformers' own layers in bytes."""
    tensors: list[Any] = []
    for value in vars(layer).values():
        tensors += value.values() if isinstance(value, dict) else [value]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
