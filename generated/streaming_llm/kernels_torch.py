"""StreamingLLM in torch: state columns and eviction.

Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.

Values are [batch, kv_heads, queries, slots]; see `kvdsl.runtime.torch.view`.
"""

from __future__ import annotations

from torch import Tensor

from kvdsl.runtime.torch.settle import Protection
from kvdsl.runtime.torch.view import View


def protect(slots: View, keep: Protection, numbers: dict[str, Tensor]) -> None:
    """Protect tokens from eviction."""
    keep.first(numbers["sinks"])
    keep.last(1)


def score(slots: View) -> Tensor | float:
    """Score slots, the lowest is evicted first: position."""
    return slots.position
