"""A policy's numbers for some rows, and what follows from them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvdsl.runtime.spec import PolicySpec


def named(spec: PolicySpec, numbers: Tensor) -> dict[str, Tensor]:
    """The columns of a table of numbers by name, [batch] each, or [batch, kv_heads]."""
    return dict(zip(spec.numbers, numbers.unbind(-1), strict=True))


def most_while_attending(spec: PolicySpec, named: dict[str, Tensor]) -> Tensor:
    """Tokens that a KV head of a policy that evicts holds at most, once it has settled after its prompt: [batch(, kv_heads)]."""
    capacity = named["capacity"]
    none = torch.zeros_like(capacity)
    slack = named.get("slack", none)
    if spec.hard_cap:
        return capacity + slack
    slack = torch.where(named.get("max_drop", none) > 0, slack, none)
    return capacity + torch.maximum(named.get("trigger", none), slack + 1)


class Table:
    """The numbers where the host can read them; nobody changes them.

    Args:
        numbers: float64 [batch, (kv_heads,) len(spec.numbers)], on the CPU.
    """

    def __init__(self, spec: PolicySpec, numbers: Tensor) -> None:
        self._spec = spec
        self.numbers = numbers

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """See `named`."""
        return named(self._spec, self.numbers)

    @cached_property
    def evicts(self) -> bool:
        """Whether tokens may leave some KV head of a policy that evicts: a budget that reads the data is not known before."""
        return self._spec.measures or bool(self.named["capacity"].isfinite().any())

    @cached_property
    def selects(self) -> bool:
        """Whether a query of a policy that selects may skip tokens."""
        return bool(self.named["select"].isfinite().any())

    @cached_property
    def never_settles(self) -> bool:
        """Whether some row has a trigger that nothing reaches."""
        trigger = self.named.get("trigger")
        return trigger is not None and bool((trigger == 0).any())

    @cached_property
    def least_capacity(self) -> float:
        """Tokens that a KV head keeps at least when it settles."""
        return float(self.named["capacity"].min())

    @cached_property
    def most(self) -> tuple[float, float]:
        """Of `most_while_attending`, the least and the most of all KV heads."""
        least, most = most_while_attending(self._spec, self.named).aminmax()
        return float(least), float(most)
