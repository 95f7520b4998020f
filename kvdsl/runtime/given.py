"""The user's params, checked and resolved per row of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvdsl.budget import ALLOWED, is_number, is_rate, tokens_or_rate
from kvdsl.errors import KvdslError


class TooManyKeptError(KvdslError):
    """`keep first` and `keep last` protect more tokens than fit.

    Attributes:
        text: what is wrong.
        mend: what to do.
        mend_by_budget: whether a larger budget helps.
    """

    def __init__(self, text: str, mend: str, *, mend_by_budget: bool) -> None:
        self.text, self.mend, self.mend_by_budget = text, mend, mend_by_budget
        super().__init__(f"{text}; {mend}")


class Given:
    """Params of one layer, resolved per row by a generated `resolve(given)`.

    Every number is float64 [batch], or [batch, kv_heads] where heads differ.

    Args:
        tensors: the policy's tensors without dims, by name: float64 [kv_heads], or [1] if all heads share the number.

    Attributes:
        prompt: prompt length of each row.
        layers, everything, turns: one number for all rows, expanded so that generated expressions are torch expressions. So is `layer`.
        layer_was_read: whether `resolve` has read the layer's number, so that its result holds for this layer only.
    """

    def __init__(
        self,
        policy: str,
        values: Mapping[str, float | None],
        prompt: Tensor,
        layer: int,
        layers: int,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        turns: int = 0,
    ) -> None:
        self._policy = policy
        self._tensors = tensors
        self._values = values
        self.prompt = prompt.double()
        self._layer = layer
        self.layer_was_read = False
        self.layers = torch.full_like(self.prompt, layers)
        self.turns = torch.full_like(self.prompt, turns)
        self.everything = torch.full_like(self.prompt, torch.inf)

    @property
    def layer(self) -> Tensor:
        """The number of this layer; sets `layer_was_read`."""
        self.layer_was_read = True
        return torch.full_like(self.prompt, self._layer)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the policy that has no dims, one number per KV head."""
        return self._tensors[name].to(self.prompt.device)

    def number(self, name: str, default: Tensor | float, *, low: float = -math.inf, high: float = math.inf) -> Tensor:
        """Return the param's value, float64 [batch].

        Raises:
            KvdslError: if it is not in low..high.
        """
        value = self._values.get(name)
        if value is not None and not low <= value <= high:
            raise KvdslError(f"`{name}` of {self._policy} is {value:g}; give {_between(low, high)}")
        return self.per_row(default if value is None else value)

    def per_row(self, value: Tensor | float) -> Tensor:
        """Expand a number, or one per row, to float64 [batch]."""
        return torch.as_tensor(value, dtype=torch.float64, device=self.prompt.device).expand_as(self.prompt)

    def tokens(self, name: str, default: Tensor | float, *, low: float = -math.inf, high: float = math.inf) -> Tensor:
        """Return the param in tokens. A float up to 1.0 from the user is a ratio of the row's prompt, at least one token.

        Raises:
            KvdslError: if it is not positive.
        """
        given = self._values.get(name)
        if given is not None and is_rate(given):
            return (given * self.prompt).floor().clamp(min=1)
        value = self.number(name, default, low=low, high=high)
        if bool(((value <= 0) & (self.prompt > 0)).any()):
            raise KvdslError(
                f"`{name}` of {self._policy} is {float(value.min()):g}; "
                f"give a number of tokens (512), or a ratio of the prompt (0.25)"
            )
        return value

    def count(self, value: Tensor | float, *, low: float = 0) -> Tensor:
        """Floor a count of tokens, float64 [batch]; values below `low` and NaN (0 / 0) become `low`."""
        count = torch.as_tensor(value, dtype=torch.float64, device=self.prompt.device)
        return torch.where(count >= low, count.floor(), low).expand_as(self.prompt)

    def some(self, value: Tensor | float) -> Tensor:
        """Floor a count for which 0 has a special meaning, float64 [batch]: between 0 and 1 it becomes 1."""
        count = self.count(value)
        return torch.where((count == 0) & (torch.as_tensor(value, device=count.device) > 0), 1.0, count)

    def inside(self, count: Tensor, *, low: Tensor | float = 0, high: Tensor | float = math.inf) -> Tensor:
        """Return the count in layers `low` to `high` inclusive, inf in the others: float64 [batch]."""
        return torch.where((self.layer >= low) & (self.layer <= high), count, math.inf)

    def chooser(self, *layers: Tensor | float) -> Tensor:
        """Return the nearest of these layers (floored) up to this one, float64 [batch]: it chooses what this one attends to. -1 if none."""
        found = torch.full_like(self.prompt, -1, dtype=torch.float64)
        for layer in layers:
            one = torch.as_tensor(layer, dtype=torch.float64, device=self.prompt.device).floor()
            found = torch.where(one <= self.layer, torch.maximum(found, one), found)
        return found

    def share(self, capacity: Tensor, rate: Tensor | float) -> Tensor:
        """Return the part of its budget that a KV head or a layer cannot lose to others, in tokens, float64 [batch].

        Raises:
            KvdslError: if the ratio is not in 0..1.
        """
        return self.count(capacity * self.rate(rate))

    def rate(self, rate: Tensor | float) -> Tensor:
        """Return the floor of a shared budget, a ratio, float64 [batch].

        Raises:
            KvdslError: if it is not in 0..1.
        """
        return self._share_of_one(rate, f"the floor of {self._policy}'s budgets")

    def check_decay(self, decay: Tensor | float) -> None:
        """Check the decay of a moving average.

        Raises:
            KvdslError: if it is not in 0..1.
        """
        self._share_of_one(decay, f"the decay of {self._policy}'s `ema`")

    def _share_of_one(self, value: Tensor | float, what: str) -> Tensor:
        """Return a ratio per row, float64 [batch], checked except in rows of padding only."""
        share = torch.as_tensor(value, dtype=torch.float64, device=self.prompt.device).expand_as(self.prompt)
        outside = ~((share >= 0) & (share <= 1)) & (self.prompt > 0)
        if bool(outside.any()):
            raise KvdslError(f"{what} is {float(share[outside][0]):g}; it must lie in 0..1")
        return share

    def check_fits(self, first: Tensor, last: Tensor, count: Tensor, keeps: str, *, selected: bool = False) -> None:
        """Check that `keep first` and `keep last` fit.

        Args:
            count: tokens in the budget, or tokens `selected`.

        Raises:
            TooManyKeptError: if they protect more than `count`.
        """
        excess = (first + last - count).masked_fill(self.prompt <= 0, -1.0)  # a row of padding only has no prompt to check
        worst = int(excess.argmax())
        if excess.flatten()[worst] > 0:
            protected, room = (float(x.expand_as(excess).flatten()[worst]) for x in (first + last, count))
            if math.isinf(protected):
                raise KvdslError(f"{self._policy} protects no finite number of tokens ({keeps}): is something divided by 0?")
            tokens = "1 token" if protected == 1 else f"{protected:g} tokens"
            holds, mend = ("it selects", "select more") if selected else ("its budget holds", "raise the budget")
            text = f"{self._policy} protects {tokens} ({keeps}) but {holds} {room:g}"
            raise TooManyKeptError(text, f"{mend} or protect fewer", mend_by_budget=not selected)

    def largest(self, *counts: Tensor | float) -> Tensor:
        """Return the largest of some counts, float64 [batch]; 0 if there are none."""
        found = self.count(0)
        for count in counts:
            found = torch.maximum(found, self.count(count))
        return found


def _between(low: float, high: float) -> str:
    """Describe the range low..high in words."""
    if math.isinf(low) and math.isinf(high):
        return "a number"
    if math.isinf(high):
        return f"{low:g} or more"
    return f"{high:g} or less" if math.isinf(low) else f"a number in {low:g}..{high:g}"


def random_seed(value: Any) -> int:
    """Return the seed of `random()`.

    Raises:
        KvdslError: if it is not a whole number of 32 bits.
    """
    if not (is_number(value) and isinstance(value, Integral) and 0 <= int(value) < 2**32):
        raise KvdslError(f"`seed` is {value!r}; give a whole number in 0..{2**32 - 1}")
    return int(value)


def param(policy: str, name: str, value: Any) -> float | None:
    """Return the param as a Python number, or None for its default. A budget is an int (tokens) or a float (a ratio).

    Raises:
        KvdslError: if it is not a finite number, or not a valid budget.
    """
    if value is None:
        return None
    allowed = ALLOWED if name == "budget" else "give a finite number"
    if not is_number(value):
        raise KvdslError(f"`{name}` of {policy} is {value!r}; {allowed}")
    if not math.isfinite(value):
        raise KvdslError(f"`{name}` of {policy} is {float(value):g}; {allowed}")
    number = int(value) if isinstance(value, Integral) else float(value)
    if name != "budget":
        return float(number)
    try:
        return tokens_or_rate(number)
    except ValueError as error:
        raise KvdslError(f"`{name}` of {policy} {error}") from None
