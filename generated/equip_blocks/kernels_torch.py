"""EQUIPBlocks in torch: state columns and eviction.

Made by kvdsl 0.1.0 from equip_blocks.kv (3b7000443c68). Do not edit: `kvdsl compile` rewrites it.

Values are [batch, kv_heads, queries, slots]; see `kvdsl.runtime.torch.view`.
"""

from __future__ import annotations

from torch import Tensor

from kvdsl.runtime.torch.columns import Columns
from kvdsl.runtime.torch.settle import Protection
from kvdsl.runtime.torch.view import View


def observe(row: View, columns: Columns) -> None:
    """Update the state columns by a block of queries."""
    columns.sum("sum_attn", row.attn)


def protect(slots: View, keep: Protection, numbers: dict[str, Tensor]) -> None:
    """Protect tokens from eviction."""
    keep.last(numbers["recent"])


def score(slots: View) -> Tensor | float:
    """Score slots, the lowest is evicted first: sum(attn)."""
    sum_attn = slots.column("sum_attn")
    return sum_attn
