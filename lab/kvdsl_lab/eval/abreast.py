"""Several caches of one model, fed in one forward: each has some rows of the batch.

A decoded token of a small batch costs a model as much as one of a large batch: what takes the time is reading the weights. So caches of
different policies that are fed texts of equal length go through a model together, and only their attention is theirs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.layer import SlotLayer, mark
from kvdsl.runtime.hf.versions import with_cache


class Abreast(Cache):
    """Caches one below another: the batch is the first cache's rows, then the second's, and so on.

    Args:
        caches: of the same model, kvdsl's in all of its layers, all as long.
        rows: of every cache.

    Raises:
        KvdslError: if one has a layer of transformers' own, or asks its caller for values, or if they are not equally long.
    """

    def __init__(self, caches: Sequence[Any], rows: int = 1) -> None:
        for cache in caches:
            if not can_stand_abreast(cache):
                raise KvdslError(
                    f"{type(cache).__name__} cannot be fed with others: it has layers, or asks for values, of its own"
                )
        lengths = {int(cache.get_seq_length()) for cache in caches}
        if len(lengths) > 1:
            raise KvdslError(
                f"the caches hold texts of {', '.join(map(str, sorted(lengths)))} tokens; feed equally long ones together"
            )
        self.caches = list(caches)
        super().__init__(layers=[_Layer(layers, rows) for layers in zip(*(cache.layers for cache in caches), strict=True)])

    def expect_prompt(self, tokens: int) -> None:
        """See `KVCache.expect_prompt`."""
        for cache in self.caches:
            cache.expect_prompt(tokens)


def can_stand_abreast(cache: Any) -> bool:
    """Whether `Abreast` can have a cache: kvdsl's in all layers, which asks nobody for values."""
    return all(isinstance(layer, SlotLayer) and not layer.state.spec.supplied for layer in cache.layers)


def abreast(caches: Sequence[Any], rows: int = 1) -> list[tuple[Any, int]]:
    """What to feed, and how many of the caches it is: one `Abreast` of all, or each by itself if one cannot stand there."""
    if caches and all(map(can_stand_abreast, caches)):
        return [(Abreast(caches, rows), len(caches))]
    return [(cache, 1) for cache in caches]


def feed(model: Any, caches: Sequence[Any], ids: Tensor) -> Tensor:
    """Feed tokens to caches of a row each: the logits after the last, float32 [caches, vocabulary].

    Args:
        ids: int64 [caches, tokens].
    """
    fed = abreast(caches)
    parts = ids.split([count for _, count in fed])
    return torch.cat([_logits(model, cache, part) for (cache, _), part in zip(fed, parts, strict=True)])


def _logits(model: Any, cache: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        out = model(input_ids=ids.to(model.device), **with_cache(cache), use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1].float()
    return logits


class _Layer(CacheLayerMixin):
    """One layer of all the caches, as the attention function and transformers see it."""

    is_sliding = False

    def __init__(self, layers: Sequence[SlotLayer], rows: int) -> None:
        super().__init__()
        self._layers, self._rows = layers, rows
        self._keys: list[Tensor] = []

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """What is each cache's."""
        return tensor.split(self._rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """The layers do it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `SlotLayer.update`."""
        parts = zip(self._layers, self._parts(key_states), self._parts(value_states), strict=True)
        self._keys = [layer.update(key, value)[0] for layer, key, value in parts]
        return mark(key_states, self), value_states

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, *, positions: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """See `SlotLayer.attend`; padding is nobody's."""
        assert real is None or bool(real.all())
        found = [
            layer.attend(module, own_query, own_key, own_value, None, positions=None, **options)
            for layer, own_query, own_key, own_value in zip(
                self._layers, self._parts(query), self._keys, self._parts(value), strict=True
            )
        ]
        return torch.cat(found)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens that every cache has seen."""
        return self._layers[0].length

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        """See `SlotLayer.get_mask_sizes`."""
        return self._layers[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length
