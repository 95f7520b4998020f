"""What a model's layers attend with under the full cache: queries, keys, values, and the attention that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.loading import load
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.attention import bias_of, scores, softmax
from kvdsl.runtime.torch.backend import TorchBackend


@dataclass(frozen=True)
class Recording:
    """One layer of a whole text: what its attention was called with, in float32."""

    call: AttentionCall

    @property
    def query(self) -> Tensor:
        """[rows, kv_heads, group, length, dim], rotated."""
        return self.call.query.unflatten(1, (self.key.shape[1], -1))

    @property
    def key(self) -> Tensor:
        """[rows, kv_heads, length, dim], rotated."""
        return self.call.key

    @property
    def value(self) -> Tensor:
        """[rows, kv_heads, length, dim]."""
        return self.call.value

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return int(self.key.shape[2])

    def rows(self) -> Iterator[Recording]:
        """One row at a time, each as a recording of its own."""
        for query, key, value in zip(*(x.split(1) for x in (self.call.query, self.key, self.value)), strict=True):
            yield Recording(self.call._replace(query=query, key=key, value=value))

    def before(self, end: int) -> Recording:
        """The text's first `end` tokens."""
        query, key, value = (x[:, :, :end] for x in (self.call.query, self.key, self.value))
        return Recording(self.call._replace(query=query, key=key, value=value))

    def _behind(self, first: int, end: int) -> Tensor:
        """How many places the tokens before `end` stand behind the queries from `first` on, [queries, end]."""
        device = self.key.device
        return torch.arange(first, end, device=device)[:, None] - torch.arange(end, device=device)

    def logit(self, first: int, end: int) -> Tensor:
        """Scores of the queries `first` to `end - 1` and the tokens before `end`: [rows, kv_heads, group, queries, end]."""
        bias = None
        if self.call.slopes is not None:
            bias = bias_of(self.call, slice(None), self._behind(first, end)[None, None])
        return scores(self.call, self.query[..., first:end, :], self.key[..., :end, :], bias)

    def attention(self, first: int, end: int) -> Tensor:
        """What the queries `first` to `end - 1` give the tokens before `end`, the mean over a group as in the language's `attn`.

        Returns:
            [rows, kv_heads, queries, end]; 0 where a query does not see the token.
        """
        logit = self.logit(first, end)
        behind = self._behind(first, end)
        window = end if self.call.window is None else self.call.window
        return softmax(logit.masked_fill((behind < 0) | (behind >= window), -torch.inf), self.call.sinks).mean(2)


class _Recorder(TorchBackend):
    """Serves a forward, and notes it."""

    def __init__(self) -> None:
        self.found: dict[int, Recording] = {}

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        query, key, value = (x.float() for x in (call.query, call.key, call.value))
        self.found[state.layer] = Recording(call._replace(query=query, key=key, value=value, forward=None))
        return super().prefill(state, call)


def record(model: Any, ids: Tensor, first: int = 0) -> list[Recording]:
    """The layers from `first` on that a policy would manage, of texts of equal length, [rows, length], in one forward."""
    return [found for layer, found in recorded(model, ids).items() if layer >= first]


def recorded(model: Any, ids: Tensor) -> dict[int, Recording]:
    """The same by their numbers, in order."""
    full: Any = load("full")
    prepares = full(model, backend="torch")  # for as long as it is there
    recorder = _Recorder()
    cache = full.assemble(model, full.spec, {}, lambda *_: recorder)
    with torch.inference_mode():
        model(input_ids=ids.to(model.device), **with_cache(cache), use_cache=True, logits_to_keep=1)
    del prepares
    return dict(sorted(recorder.found.items()))
