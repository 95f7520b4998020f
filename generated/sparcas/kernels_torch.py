"""SparCas in torch: selection.

Made by kvdsl 0.1.0 from sparcas.kv (7aefa5e84f82). Do not edit: `kvdsl compile` rewrites it.

Values are [batch, kv_heads, queries, slots]; see `kvdsl.runtime.torch.view`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.torch.settle import Protection
from kvdsl.runtime.torch.view import View


def protect(slots: View, keep: Protection, numbers: dict[str, Tensor]) -> None:
    """Mark tokens that are always selected."""


def sketch(row: View) -> Tensor | float:
    """Rank dims, the highest are read: abs(q)."""
    return row.over_group(torch.abs(row.q))


def select(row: View) -> Tensor | float:
    """Rank slots, a query attends to the highest: sum(q * k over sketch)."""
    return row.over_group(row.sketch.dot(row.query, row.key))
