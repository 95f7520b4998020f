"""VATP_H2O in torch: what is remembered of every query, and who leaves.

Made by kvdsl 0.1.0 from vatp_h2o.kv (53b6ebffc25c). Do not edit: run `kvdsl compile vatp_h2o.kv`.

Shapes: a row is a block of queries, values are [batch, kv_heads, queries, slots]; see `kvdsl.runtime.view`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.settle import Protection
from kvdsl.runtime.view import Columns, View


def place(new: View, columns: Columns) -> None:
    """What a token's own key and value say, once, when it is placed."""
    columns.put("norm1_v", (torch.abs(new.v)).sum(-1))


def observe(row: View, columns: Columns) -> None:
    """Fold what a block of queries gave the slots into the state columns."""
    columns.sum("sum_attn", row.attn)


def protect(slots: View, keep: Protection, numbers: dict[str, Tensor]) -> None:
    """What may not leave."""
    keep.last(numbers["recent"])
    keep.first(numbers["sinks"])


def score(slots: View) -> Tensor | float:
    """The lowest leaves first: sum(attn) * sum(abs(v) over dims)."""
    sum_attn = slots.column("sum_attn")
    norm1_v = slots.column("norm1_v")
    return sum_attn * norm1_v
