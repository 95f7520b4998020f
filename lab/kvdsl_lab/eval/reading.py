"""A text that a model reads once for many caches.

A policy that takes a prompt in one forward evicts at the prompt's end. Until then every layer attends to all of it, whatever the policy,
so that queries, keys and values are those of the full cache: they are noted once, and given to a cache of any policy without running the
model again. What is saved is everything but attention, four fifths of a prompt's work on a small model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.generation.generate import expect_prompt
from kvdsl.loading import load
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend

_NEAR = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""How far one attention may lie from another's result, relative to its norm: kernels differ in the order of their sums only."""


@dataclass(frozen=True)
class _Attended:
    """One layer's attention to the whole text, and what came of it: [rows, tokens, query_heads, dim]."""

    call: AttentionCall
    out: Tensor


class _Noting(TorchBackend):
    """Serves a prompt, and notes it."""

    def __init__(self) -> None:
        self.found: dict[int, _Attended] = {}

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        out = super().prefill(state, call)
        self.found[state.layer] = _Attended(call, out)
        return out


class Reading:
    """Token ids, [rows, tokens], that the model has read under the full cache.

    Attributes:
        ids: the tokens, int64 [rows, tokens].
        logits: of the token after the last, float32 [rows, vocabulary].
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model = model
        self.ids = ids.to(model.device)
        full: Any = load("full")
        prepares = full(model, backend="torch")  # for as long as it is there
        noting = _Noting()
        cache = full.assemble(model, full.spec, {}, lambda *_: noting)
        with torch.inference_mode():
            out = model(input_ids=self.ids, **with_cache(cache), use_cache=True, logits_to_keep=1)
        del prepares
        self.logits = out.logits[:, -1].float()
        self._layers = noting.found

    def give(self, cache: Any, tokens: int | None = None) -> bool:
        """Have an empty cache of the same model read the text, or its first `tokens`.

        Returns:
            whether it could: False, with the cache empty again, if the policy's attention is not that of the full cache (it settles
            or selects within the prompt), or if the cache has layers that are not kvdsl's.
        """
        count = self.ids.shape[1] if tokens is None else tokens
        if list(cache.managed) != list(range(len(cache.layers))) or len(self._layers) != len(cache.layers):
            return False
        expect_prompt(cache, count)
        with torch.inference_mode():
            for index, layer in enumerate(cache.layers):
                if not self._attend(layer, self._layers[index], count):
                    cache.reset()
                    return False
        return True

    def _attend(self, layer: Any, known: _Attended, count: int) -> bool:
        """Whether a layer's attention to the first `count` tokens is the known one."""
        call = known.call
        query, key, value = (x[:, :, :count].contiguous() for x in (call.query, call.key, call.value))
        marked, value = layer.update(key, value)
        out = layer.attend(
            self._model, query, marked, value, None,
            scaling=call.scaling, softcap=call.softcap, sinks=call.sinks, slopes=call.slopes, positions=None,
        )  # fmt: skip
        wanted = known.out[:, count - 1].float()
        return bool(torch.dist(out[:, -1].float(), wanted) <= _NEAR[call.key.dtype] * wanted.norm())


def read(model: Any, cache: Any, reading: Reading, tokens: int | None = None) -> None:
    """Have an empty cache read the text, or its first `tokens`: from what is known if that is right, else by running the model."""
    if not reading.give(cache, tokens):
        ids = reading.ids[:, :tokens]
        expect_prompt(cache, ids.shape[1])
        with torch.inference_mode():
            model(input_ids=ids, **with_cache(cache), use_cache=True, logits_to_keep=1)
