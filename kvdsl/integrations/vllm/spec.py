"""A page as vLLM's scheduler and workers see it: its size, and that a request has one, whatever its length."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import CircularBufferSpec


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):  # type: ignore[misc]
    """One block a request and layer: slots, positions and state columns.

    As in `CircularBufferSpec`, a request takes one block, no token has a place of its own in it, and prefixes are not shared. With
    `tokens_per_state=-1` the block's size does not depend on tokens.

    Attributes:
        non_causal: makes vLLM pass prompts whole, if a step has room for any. vLLM cuts prompts in parts even then. In its release for
            CPUs a part of a request with a seed ends the engine, under any attention.
    """

    non_causal: bool = True
