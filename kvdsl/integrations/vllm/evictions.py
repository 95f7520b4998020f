"""How many tokens have left, counted in the pages themselves after each step: seen by the request, and no longer held."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvdsl.integrations.vllm.ledger import Ledger, Sizes
from kvdsl.integrations.vllm.page import Page

if TYPE_CHECKING:
    from kvdsl.integrations.vllm.backend import Step

_SOURCE = Path(__file__).with_name("evictions.cpp")


class Evictions:
    """Counts an engine's, step by step, once all of its layers have attended.

    Args:
        layers: how many there are.
        ledger: gets the sum.
    """

    def __init__(self, layers: int, ledger: Ledger) -> None:
        self._layers, self._ledger = layers, ledger
        self._done: list[Tensor] = []
        """The caches of the layers that have attended in this step."""
        self._counted = torch.zeros(0, dtype=torch.int64)
        """By block: what has been counted of the request that has it."""

    def layer_is_done(self, kv_cache: Tensor, page: Page, step: Step) -> None:
        """A layer has attended, and evicted; with the last one the step is counted.

        Args:
            kv_cache: the layer's blocks.
        """
        self._done.append(kv_cache)
        if len(self._done) == self._layers:
            self._count(page, step)
            self._done.clear()

    def _count(self, page: Page, step: Step) -> None:
        blocks = self._done[0].shape[0]
        bases = torch.tensor([cache.data_ptr() for cache in self._done])
        strides = torch.tensor([cache.stride(0) * cache.element_size() for cache in self._done])
        if len(self._counted) != blocks:
            self._counted = torch.zeros(blocks, dtype=torch.int64)
            self._ledger.sizes = Sizes(int(strides.sum()), blocks, self._layers)
        for prompt in step.prompts:
            if prompt.begins:
                self._counted[prompt.page] = 0
        ended = {prompt.page for prompt in step.prompts if prompt.ends}
        pages = torch.tensor(list(ended.union(*(decoded.pages.tolist() for decoded in step.decoded))), dtype=torch.int64)
        left = _left(bases[:, None] + pages * strides[:, None], page).sum(0)
        self._ledger.add(int((left - self._counted[pages]).sum()))
        self._counted[pages] = left


def _left(places: Tensor, page: Page) -> Tensor:
    """How many tokens have left pages, KV heads summed; int64 like `places`, where the pages begin."""
    (seen, _, _), (position, (_, heads, slots), _) = page.parts["seen"], page.parts["position"]
    places, left = places.contiguous(), torch.empty_like(places)
    library().kvdsl_evicted(
        ctypes.c_void_p(places.data_ptr()), ctypes.c_int64(places.numel()), ctypes.c_int64(seen), ctypes.c_int64(position),
        ctypes.c_int64(heads), ctypes.c_int64(slots), ctypes.c_void_p(left.data_ptr()), torch.get_num_threads(),
    )  # fmt: skip
    return left


@lru_cache
def library() -> ctypes.CDLL:
    """What counts, built now if it has not been."""
    from kvdsl.build.cxx import shared_library

    return ctypes.CDLL(str(shared_library(_SOURCE, "evictions")))
