"""RoCo in torch: state columns and eviction.

Made by kvdsl 0.1.0 from roco.kv (5994bd044d6d). Do not edit: `kvdsl compile` rewrites it.

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
    columns.squares("sum_attn_squared", row.attn)


def protect(slots: View, keep: Protection, numbers: dict[str, Tensor]) -> None:
    """Protect tokens from eviction."""
    sum_attn_squared = slots.column("sum_attn_squared")
    sum_attn = slots.column("sum_attn")
    keep.top(slots.sqrt((sum_attn_squared / slots.observed - (sum_attn / slots.observed).square()).clamp(min=0)), numbers["protect"])
    keep.last(1, ends_last=True)


def counts_protected(numbers: dict[str, Tensor]) -> list[Tensor | float]:
    """Return the most tokens that each `keep` line protects."""
    return [numbers["protect"], 1]


def score(slots: View) -> Tensor | float:
    """Score slots, the lowest is evicted first: mean(attn)."""
    sum_attn = slots.column("sum_attn")
    return sum_attn / slots.observed
