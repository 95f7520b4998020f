"""A contender's text as far as it has come, fed one piece at a time and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvdsl.budget import tokens_of
from kvdsl.runtime.hf.versions import with_cache


@dataclass
class Text:
    """One contender's text as far as it has come: the cache, and the next token of every row, int64 [batch, 1]."""

    model: Any
    cache: Any
    newest: Tensor = field(default_factory=lambda: torch.empty(0))
    _logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, ids: Tensor) -> float:
        """Feed the prompt, or the newest token; milliseconds until the next is there."""
        _finish(ids.device)
        begun = time.perf_counter()
        self._logits = self.model(
            input_ids=ids, **with_cache(self.cache), use_cache=self.cache is not None, logits_to_keep=1
        ).logits[:, -1]
        self.newest = self._logits.argmax(-1, keepdim=True)
        _finish(ids.device)
        return (time.perf_counter() - begun) * 1e3

    def share(self, rows: int) -> None:
        """The one prompt that was read becomes that of many rows, each of which goes on with another of its likeliest tokens."""
        if self.cache is not None:
            self.cache.batch_repeat_interleave(rows)
        self.newest = self._logits[0].topk(rows).indices[:, None]

    def go_on(self) -> float:
        """One token more."""
        return self.read(self.newest)


@dataclass
class Recomputed(Text):
    """The same without a cache: every token is computed from the `window` tokens before it, of which all are run; a ratio of the prompt."""

    window: float = 1
    seen: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, ids: Tensor) -> float:
        if not self.seen.numel():
            self.window = tokens_of(self.window, ids.shape[1])
        self.seen = torch.cat([self.seen, ids], 1) if self.seen.numel() else ids
        return super().read(self.seen[:, -int(self.window) :])

    def share(self, rows: int) -> None:
        super().share(rows)
        self.seen = self.seen.expand(rows, -1)


@dataclass
class Pressed(Text):
    """The same with a press of kvpress, which takes hold of the model while the prompt is read.

    Attributes:
        press: for a prompt of so many tokens, what presses the model that it is given.
    """

    press: Callable[[int], Callable[[Any], AbstractContextManager[Any]]] | None = None

    def read(self, ids: Tensor) -> float:
        if self.press is None:
            return super().read(ids)
        with self.press(ids.shape[1])(self.model):
            ms = super().read(ids)
        self.press = None
        return ms


def _finish(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
