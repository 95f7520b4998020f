"""Count evicted tokens in the pages after each step: those that the request has seen and no longer holds."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvdsl.integrations.vllm.ledger import Ledger, Sizes

_SOURCE = Path(__file__).with_name("evictions.cpp")


class Lies(NamedTuple):
    """Where a block says what a request's layer holds.

    Attributes:
        seen, position: where these begin, in bytes. heads, slots: the shape of `position`.
        blocks: how many of the policy's blocks a request takes in each layer.
    """

    seen: int
    position: int
    heads: int
    slots: int
    blocks: int


class Left(NamedTuple):
    """Where a step may have evicted tokens.

    Attributes:
        begun: blocks that have gone to another request.
        blocks: int64 [requests], those that show it.
        beside: int64 [requests], tokens that the requests hold elsewhere.
    """

    begun: Sequence[int]
    blocks: Tensor
    beside: Tensor


class Counted(Protocol):
    """A step."""

    def left(self) -> Left:
        """Where it may have evicted tokens."""


class Evictions:
    """Counts an engine's evicted tokens, step by step, once all of its layers have attended.

    Args:
        ledger: gets the sum.
    """

    _latest: ClassVar[tuple[weakref.ref[Any], Evictions] | None] = None
    """Those of the latest engine of this process, and its configuration."""

    def __init__(self, ledger: Ledger) -> None:
        self.layers = 0
        self._ledger = ledger
        self._done: list[tuple[Tensor, Lies | None]] = []
        """The caches of the layers that have attended in this step, and where they show the policy's evictions."""
        self._counted = torch.zeros(0, dtype=torch.int64)
        """By block: what was counted for its request."""

    @classmethod
    def of_engine(cls, config: Any, rank: int, layers: int) -> Evictions:
        """Return the counter of the engine of a `VllmConfig`, and add layers to it.

        vLLM makes a builder for every kind of page; they count together.

        Args:
            rank: this process's, among those that have the KV heads.
        """
        if cls._latest is None or cls._latest[0]() is not config:
            ledger = Ledger.make(config.parallel_config.data_parallel_index, rank)
            cls._latest = weakref.ref(config), cls(ledger)
        found = cls._latest[1]
        found.layers += layers
        return found

    def layer_is_done(self, kv_cache: Tensor, lies: Lies | None, step: Counted) -> None:
        """Note that a layer has attended and evicted; count the step with the last one.

        Args:
            kv_cache: the layer's blocks.
            lies: where they show what is held; None for a layer that the policy does not serve, or whose pages do not lie in blocks. On a
                GPU nothing is counted, since that would wait for the device.
        """
        self._done.append((kv_cache, lies))
        if len(self._done) == self.layers:
            self._count(step.left())
            self._done.clear()

    def _count(self, step: Left) -> None:
        blocks = self._done[0][0].shape[0]
        policys = {lies for cache, lies in self._done if lies is not None and cache.is_cpu}
        if len(self._counted) != blocks:
            self._counted = torch.zeros(blocks, dtype=torch.int64)
            request = sum(_stride(cache) * (1 if lies is None else lies.blocks) for cache, lies in self._done)
            self._ledger.sizes = Sizes(request, blocks, self.layers, bool(policys))
        self._counted[list(step.begun)] = 0
        left = torch.zeros_like(step.blocks)
        for lies in policys:
            caches = [cache for cache, own in self._done if own == lies]
            left += _left(caches, step.blocks, lies) - len(caches) * lies.heads * step.beside
        self._ledger.add(int((left - self._counted[step.blocks]).sum()))
        self._counted[step.blocks] = left


def _stride(cache: Tensor) -> int:
    """Bytes from block to block."""
    return cache.stride(0) * cache.element_size()


def _left(caches: list[Tensor], blocks: Tensor, lies: Lies) -> Tensor:
    """Count tokens that were seen and are not held in blocks, summed over KV heads and layers; int64 like `blocks`."""
    bases, strides = torch.tensor([(cache.data_ptr(), _stride(cache)) for cache in caches]).T
    places = (bases[:, None] + blocks * strides[:, None]).contiguous()
    left = torch.empty_like(places)
    library().kvdsl_evicted(
        ctypes.c_void_p(places.data_ptr()), ctypes.c_int64(places.numel()), ctypes.c_int64(lies.seen), ctypes.c_int64(lies.position),
        ctypes.c_int64(lies.heads), ctypes.c_int64(lies.slots), ctypes.c_void_p(left.data_ptr()), torch.get_num_threads(),
    )  # fmt: skip
    return left.sum(0)


@lru_cache
def library() -> ctypes.CDLL:
    """The library that counts; build it at the first call."""
    from kvdsl.build.cxx import open_library, shared_library

    return open_library(partial(shared_library, _SOURCE, "evictions"), "evictions")
