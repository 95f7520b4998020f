"""State columns: update per-slot statistics by the queries of a view."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.columns import size_name, writers
from kvdsl.runtime.torch.view import View

INITIAL = {
    "sum": 0.0,
    "squares": 0.0,
    "max": -torch.inf,
    "min": torch.inf,
    "last": torch.nan,
    "ema": torch.nan,
    "token": 0.0,
    "fold": torch.nan,
    "prune": torch.nan,
}
"""Initial values by rule. A `keep` reads them for a new token if a query selects."""


def observe(row: View, spec: PolicySpec) -> None:
    """Update the state columns by a block of queries in text order."""
    if spec.observes:
        spec.torch_kernels.observe(row, Columns(row))
    if "fold" in spec.column_rules:
        for query in row.queries():
            for name, x in spec.torch_kernels.fold(query).items():
                Columns(query).last(name, x)


class Columns:
    """Updates the state columns by the queries of a view."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.columns = view.columns
        self.visible = view.visible.mask

    def sum(self, name: str, x: Tensor) -> None:
        self.columns[name].add_(torch.where(self.visible, x.float(), 0.0).sum(2))

    def squares(self, name: str, x: Tensor) -> None:
        self.sum(name, x.float().square())

    def max(self, name: str, x: Tensor) -> None:
        self._fold(name, torch.maximum, torch.where(self.visible, x.float(), -torch.inf).amax(2))

    def min(self, name: str, x: Tensor) -> None:
        self._fold(name, torch.minimum, torch.where(self.visible, x.float(), torch.inf).amin(2))

    def last(self, name: str, x: Tensor) -> None:
        """Keep the value of the last query that saw the slot."""
        queries = torch.arange(self.visible.shape[2], device=self.visible.device).view(1, 1, -1, 1)
        latest = torch.where(self.visible, queries, -1).amax(2, keepdim=True)
        gave = x.float().expand_as(self.visible).gather(2, latest.clamp(min=0)).squeeze(2)
        self.columns[name].copy_(torch.where(latest.squeeze(2) >= 0, gave, self.columns[name]))

    def ema(self, name: str, x: Tensor, decay: Tensor | float) -> None:
        """Update a moving average: each query has weight (1 - decay); the slot's first query starts it.

        All queries at once: a query's value decays once per later query that saw the slot.
        """
        after = self.visible.flip(2).cumsum(2).flip(2) - self.visible.int()
        first = self.visible & (self._view.age == 0)
        decay = torch.as_tensor(decay, dtype=torch.float32, device=self.visible.device)
        gave = torch.where(first, 1.0, 1 - decay) * decay**after * x.float()
        old = self.columns[name].unsqueeze(2) * decay ** self.visible.sum(2, keepdim=True)
        old = torch.where(first.any(2, keepdim=True), 0.0, old)
        self.columns[name].copy_((old + torch.where(self.visible, gave, 0.0).sum(2, keepdim=True)).squeeze(2))

    def ring(self, name: str, x: Tensor) -> None:
        """Write each query's value to its place in the ring, over an older one."""
        ring, newest = self._view.rings[name], self._view.query_position[:, 0, :, 0]
        size = self._view.number(size_name(name))[:, 0, 0]
        writer = writers(len(ring), size, newest)[:, None, :, None].expand(-1, ring.shape[2], -1, ring.shape[3])
        seen = (writer >= 0) & self.visible.gather(2, writer.clamp(min=0))
        gave = x.float().expand(self.visible.shape).gather(2, writer.clamp(min=0))
        ring.copy_(torch.where(seen, gave, ring.permute(1, 2, 0, 3)).permute(2, 0, 1, 3))

    def _fold(self, name: str, fold: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> None:
        self.columns[name].copy_(fold(self.columns[name], x))
