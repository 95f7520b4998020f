"""A model's own rotation of keys, for caches that rotate all of them anew at every token."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError


class Rotary:
    """The model's own rotation, there and back.

    Raises:
        KvdslError: if the model is not laid out as Llama is, or scales what it rotates.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base = model.base_model
        try:
            self._angles = base.rotary_emb
            self._apply = sys.modules[type(base.layers[0].self_attn).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        except AttributeError as error:
            raise KvdslError(
                f"{type(model).__name__} is not laid out as Llama is: its keys cannot be rotated anew"
            ) from error
        if getattr(self._angles, "attention_scaling", 1.0) != 1.0:
            raise KvdslError(f"{type(model).__name__} scales what it rotates: its keys cannot be rotated back")
        self._known: dict[bool, tuple[tuple[Any, ...], tuple[Tensor, Tensor]]] = {}

    def __call__(self, keys: Tensor, first: int, *, back: bool = False) -> Tensor:
        """Keys [batch, kv_heads, tokens, dim] rotated for the places from `first` on, or back from there."""
        cos, sin = self.tables(keys, first)
        rotated: Tensor = self._apply(keys[:1, :1], keys, cos[None], -sin[None] if back else sin[None])[1]
        return rotated

    def tables(self, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines for as many places as there are keys, [tokens, any]; the last are kept, of those from 0 and others."""
        wanted = (first, keys.shape[2], keys.dtype, keys.device)
        known, tables = self._known.get(first == 0, ((), None))
        if known != wanted or tables is None:
            cos, sin = self._angles(keys, torch.arange(first, first + keys.shape[2], device=keys.device)[None])
            tables = cos[0], sin[0]
            self._known[first == 0] = wanted, tables
        return tables
