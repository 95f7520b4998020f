"""How many tokens have left, counted in the pages themselves after each step: seen by the request, and no longer held."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdsl.integrations.vllm.ledger import Ledger, Sizes
from kvdsl.integrations.vllm.page import Page
from kvdsl.integrations.vllm.step import Step

_SOURCE = Path(__file__).with_name("evictions.cpp")


class Evictions:
    """Counts an engine's, step by step, once all of its layers have attended.

    Args:
        ledger: gets the sum.
    """

    _latest: ClassVar[tuple[weakref.ref[Any], Evictions] | None] = None
    """Those of the engine that this process has made last, and its configuration."""

    def __init__(self, ledger: Ledger) -> None:
        self.layers = 0
        self._ledger = ledger
        self._done: list[tuple[Tensor, Page | None]] = []
        """The caches of the layers that have attended in this step, and where in them the policy's evictions are to be seen."""
        self._counted = torch.zeros(0, dtype=torch.int64)
        """By block: what has been counted of the request that has it."""

    @classmethod
    def of_engine(cls, config: Any, rank: int, layers: int) -> Evictions:
        """Those of the engine of a `VllmConfig`, which comes to have so many layers more.

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

    def layer_is_done(self, kv_cache: Tensor, page: Page | None, step: Step) -> None:
        """A layer has attended, and evicted; with the last one the step is counted.

        Args:
            kv_cache: the layer's blocks.
            page: how they lie there; None for a layer that the policy does not serve, or whose pages do not lie in blocks.
        """
        self._done.append((kv_cache, page))
        if len(self._done) == self.layers:
            self._count(step)
            self._done.clear()

    def _count(self, step: Step) -> None:
        blocks = self._done[0][0].shape[0]
        if len(self._counted) != blocks:
            self._counted = torch.zeros(blocks, dtype=torch.int64)
            counted = any(page is not None for _, page in self._done)
            self._ledger.sizes = Sizes(sum(_stride(cache) for cache, _ in self._done), blocks, self.layers, counted)
        for prompt in step.prompts():
            if prompt.begins:
                self._counted[prompt.page] = 0
        ended = {prompt.page for prompt in step.prompts() if prompt.ends}
        pages = torch.tensor(list(ended.union(*(decoded.pages.tolist() for decoded in step.decoded))), dtype=torch.int64)
        left = torch.zeros_like(pages)
        for page in {id(page): page for _, page in self._done if page is not None}.values():
            left += _left([cache for cache, own in self._done if own is page], pages, page)
        self._ledger.add(int((left - self._counted[pages]).sum()))
        self._counted[pages] = left


def _stride(cache: Tensor) -> int:
    """Bytes from block to block."""
    return cache.stride(0) * cache.element_size()


def _left(caches: list[Tensor], pages: Tensor, page: Page) -> Tensor:
    """How many tokens have left pages, KV heads and layers summed; int64 like `pages`."""
    (seen, _, _), (position, (_, heads, slots), _) = page.parts["seen"], page.parts["position"]
    bases, strides = torch.tensor([(cache.data_ptr(), _stride(cache)) for cache in caches]).T
    places = (bases[:, None] + pages * strides[:, None]).contiguous()
    left = torch.empty_like(places)
    library().kvdsl_evicted(
        ctypes.c_void_p(places.data_ptr()), ctypes.c_int64(places.numel()), ctypes.c_int64(seen), ctypes.c_int64(position),
        ctypes.c_int64(heads), ctypes.c_int64(slots), ctypes.c_void_p(left.data_ptr()), torch.get_num_threads(),
    )  # fmt: skip
    return left.sum(0)


@lru_cache
def library() -> ctypes.CDLL:
    """What counts, built now if it has not been."""
    from kvdsl.build.cxx import open_library, shared_library

    return open_library(partial(shared_library, _SOURCE, "evictions"), "evictions")
