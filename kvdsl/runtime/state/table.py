"""A policy's numbers for some rows, and what follows from them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvdsl.runtime.spec import PolicySpec


def named(spec: PolicySpec, numbers: Tensor) -> dict[str, Tensor]:
    """Return the numbers of a table by name, [batch] or [batch, kv_heads] each."""
    return dict(zip(spec.numbers, numbers.unbind(-1), strict=True))


def most_while_attending(spec: PolicySpec, named: dict[str, Tensor]) -> Tensor:
    """Return the most tokens that a KV head holds once its prompt has settled: [batch] or [batch, kv_heads]."""
    capacity = named["capacity"]
    none = torch.zeros_like(capacity)
    slack = named.get("slack", none)
    if spec.hard_cap:
        return capacity + slack
    slack = torch.where(named.get("max_drop", none) > 0, slack, none)
    return capacity + torch.maximum(named.get("trigger", none), slack + 1)


class Table:
    """A table of numbers that the host can read. Immutable.

    Args:
        numbers: float64 [batch, (kv_heads,) len(spec.numbers)], on the CPU.
    """

    def __init__(self, spec: PolicySpec, numbers: Tensor) -> None:
        self._spec = spec
        self._moved: dict[torch.device, Tensor] = {}
        self.numbers = numbers

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on a device; the layers that have this table share them."""
        if device not in self._moved:
            self._moved[device] = self.numbers.to(device, non_blocking=True)
        return self._moved[device]

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The function `named` of this table."""
        return named(self._spec, self.numbers)

    @cached_property
    def evicts(self) -> bool:
        """Whether some KV head may evict. A budget that depends on the data may always do so."""
        return self._spec.measures or bool(self.named["capacity"].isfinite().any())

    @cached_property
    def selects(self) -> bool:
        """Whether a query may skip tokens."""
        return bool(self.named["select"].isfinite().any())

    @cached_property
    def never_settles(self) -> bool:
        """Whether some row has no trigger."""
        trigger = self.named.get("trigger")
        return trigger is not None and bool((trigger == 0).any())

    @cached_property
    def least_capacity(self) -> float:
        """The smallest capacity of all KV heads."""
        return float(self.named["capacity"].min())

    @cached_property
    def most(self) -> tuple[float, float]:
        """The minimum and maximum of `most_while_attending`."""
        least, most = most_while_attending(self._spec, self.named).aminmax()
        return float(least), float(most)
