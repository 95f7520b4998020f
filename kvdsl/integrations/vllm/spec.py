"""What vLLM's scheduler and workers are told of a page: its size, and that a request has one, whatever its length."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import CircularBufferSpec


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):  # type: ignore[misc]
    """One block a request and layer: slots, positions and state columns.

    Of `CircularBufferSpec` it has that a request takes one block, that no token has a place of its own in it, and that prefixes are not
    shared. With `tokens_per_state=-1` the block's size has nothing to do with tokens.

    Attributes:
        non_causal: has vLLM pass prompts whole, if one step is long enough for any. It cuts them in parts even then, and in its release
            for CPUs a part of a request that has a seed ends the engine, whatever the attention.
    """

    non_causal: bool = True
