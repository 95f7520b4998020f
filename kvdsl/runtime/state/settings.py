"""The numbers of a policy in one layer, computed from the user's params for prompts of given lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdsl.budget import is_rate
from kvdsl.errors import KvdslError
from kvdsl.runtime.given import Given, TooManyKeptError
from kvdsl.runtime.lifetimes import Linked
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.table import Table, most_while_attending, named

_MOST_TOKENS = 2**24
"""Upper end of the search for a budget that fits."""

_SIZES = frozenset({"page", "sketch_every", "prefill_block", "block"})
_LARGEST = 2.0**31 - 1
"""Stands for infinity in page sizes, block sizes and sketch intervals, by which positions are divided as integers."""

_LONG = 2.0**30
"""A prompt length that stands for all long prompts."""


class Settings(Linked):
    """The results of a policy's `resolve` for one layer.

    A table of numbers is float64 [batch, len(spec.numbers)]; [batch, kv_heads, len(spec.numbers)] where heads differ.

    Attributes:
        heads: the layer's KV heads served here; all until keys are known.
        turns: the number of turns that have ended.
    """

    LINKS = ("spec", "_resolved")

    _latest: ClassVar[tuple[PolicySpec, Any, Table] | None] = None
    """The last arguments and result. Layers of one model ask for the same table one after the other."""

    def __init__(self, spec: PolicySpec, params: Mapping[str, float | None], layer: int = 0, layers: int = 1) -> None:
        self.spec = spec
        self.params = dict(params)
        self.layer = layer
        self.layers = layers
        self.heads = slice(None)
        self.turns = 0
        self._resolved: tuple[Tensor, Table] | None = None

    def resolve(self, prompt: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the table for rows with these prompt lengths, [batch], on their device or `device`.

        The host computes it. It waits for the lengths unless they are on the CPU.

        Raises:
            KvdslError: if static keeps protect more tokens than the budget.
        """
        found = self._found(prompt.cpu())
        numbers = found.on(prompt.device if device is None else device)
        self._resolved = numbers, found
        return numbers

    def table(self, numbers: Tensor) -> Table:
        """Return a table that the host can read, without waiting for the device if it was the last one resolved."""
        if self._resolved is not None and self._resolved[0] is numbers:
            return self._resolved[1]
        return Table(self.spec, numbers.cpu())

    def _found(self, prompt: Tensor) -> Table:
        """Compute the table, or return the previous layer's if no number depends on the layer."""
        asked = repr(self.params), self.layers, prompt.tolist()  # repr, because 1.0 (a ratio) == 1 (a token)
        latest = Settings._latest  # read once: another thread may serve another model
        if latest is not None and latest[0] is self.spec and latest[1] == asked:
            return latest[2]
        given = self._given(prompt, self.layer, self.params)
        try:
            named = self.spec.resolve(given)
        except TooManyKeptError as error:
            raise self._where_and_how_many(error, prompt) from None
        if not self.spec.numbers:
            return Table(self.spec, given.prompt.new_zeros(*given.prompt.shape, 0))
        columns = (
            given.per_row(named[name]).clamp(max=_LARGEST if name in _SIZES else torch.inf) for name in self.spec.numbers
        )
        found = Table(self.spec, torch.stack([*columns], -1))
        alike = self.spec.tensors is None and not given.layer_was_read
        if alike and "turns" not in self.spec.numbers:  # the number of turns is not in the key
            Settings._latest = self.spec, asked, found
        return found

    def tried(self, prompt: float) -> Tensor | None:
        """Return the numbers for a prompt of this length, None if the policy refuses it."""
        try:
            return self.resolve(torch.full((1,), prompt, dtype=torch.float64))
        except KvdslError:
            return None

    def served(self) -> list[Tensor]:
        """Return the numbers for the shortest and for a very long prompt, without those that the policy refuses."""
        try:
            return list(self._found(torch.tensor([1.0, _LONG], dtype=torch.float64)).numbers.split(1))
        except KvdslError:
            return [numbers for numbers in map(self.tried, (1.0, _LONG)) if numbers is not None]

    def keeps_a_share(self) -> bool:
        """Whether the param `budget` is a ratio of the prompt, not a number of tokens."""
        budget = self.params.get("budget")
        if budget is not None or "budget" not in self.spec.params or not self.spec.bounded:
            return budget is not None and is_rate(budget)
        short, long = (None if found is None else self.named(found)["capacity"] for found in map(self.tried, (1.0, _LONG)))
        return short is not None and long is not None and bool((short <= 1).all() & (long > 1).any())

    def refuse_hopeless(self) -> None:
        """Raise KvdslError for params that fit neither the shortest nor a very long prompt. Others are checked per prompt."""
        if self.tried(1.0) is None:
            self.resolve(torch.full((1,), _LONG, dtype=torch.float64))

    def named(self, numbers: Tensor) -> dict[str, Tensor]:
        return named(self.spec, numbers)

    def per_head(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return `named`, broadcast over heads and slots: [batch, kv_heads or 1, 1] each."""
        return {name: value.reshape(len(value), -1, 1) for name, value in self.named(numbers).items()}

    def of_rows(self, numbers: Tensor, name: str) -> Tensor:
        """Return a number that is the same for all KV heads: [batch]."""
        return self.named(numbers if numbers.dim() == 2 else numbers[:, 0])[name]

    def chooser(self) -> int:
        """Return the layer whose selection this one uses (perhaps itself), -1 if there is none."""
        numbers = self.served() if self.spec.reuses else []
        return int(self.named(numbers[0])["chooser"][0]) if numbers else -1

    def while_decoding(self, numbers: Tensor) -> tuple[Tensor, bool]:
        """Return the numbers for decoding, and whether it may evict. A policy that evicts in the prompt only has no capacity there."""
        if self.spec.bounded and self.spec.when == "prefill":
            numbers = numbers.clone()
            numbers[..., self.spec.numbers.index("capacity")] = torch.inf
            return numbers, False
        return numbers, self.spec.bounded and self.table(numbers).evicts

    # -- how many tokens a head holds ----------------------------------------------------------------------------------

    def most_while_attending(self, numbers: Tensor) -> Tensor:
        return most_while_attending(self.spec, self.named(numbers))

    def bounded_by(self) -> Tensor | None:
        """Return the most tokens of a KV head while decoding after the shortest prompt served, [1] or [1, kv_heads].

        None if no number of slots suffices for all prompts.
        """
        if not self.spec.bounded or self.spec.when == "prefill":
            return None
        served = self.served()
        if not served or not self.named(served[-1])["capacity"].isfinite().all() or self.table(served[-1]).never_settles:
            return None
        return self.most_while_attending(served[0])

    # -- errors --------------------------------------------------------------------------------------------------------

    def _given(self, prompt: Tensor, layer: int, values: Mapping[str, float | None]) -> Given:
        if self.spec.tensors is None:
            return Given(self.spec.name, values, prompt, layer, self.layers, turns=self.turns)
        tensors = self.spec.tensors.numbers(layer, self.heads)
        if self.spec.heads_differ:
            prompt = prompt[:, None].expand(-1, max(len(one) for one in tensors.values()))
        return Given(self.spec.name, values, prompt, layer, self.layers, tensors, self.turns)

    def _where_and_how_many(self, error: TooManyKeptError, prompt: Tensor) -> KvdslError:
        """Add to the error the layer, if other layers fit, and the smallest budget that fits in all layers."""
        layers = range(self.layers)
        others_fit = any(self._fits(prompt, layer, self.params) for layer in layers)
        where = f" in layer {self.layer} of {self.layers}" if others_fit else ""
        mend = error.mend
        if error.mend_by_budget and "budget" in self.spec.params:

            def holds(budget: int) -> bool:
                return all(self._fits(prompt, layer, {**self.params, "budget": budget}) for layer in layers)

            found = bisect_left(range(_MOST_TOKENS), True, lo=1, key=holds)
            mend = mend.replace("the budget", f"the budget to at least {found} tokens") if found < _MOST_TOKENS else mend
        return KvdslError(f"{error.text}{where}; {mend}")

    def _fits(self, prompt: Tensor, layer: int, values: Mapping[str, float | None]) -> bool:
        try:
            self.spec.resolve(self._given(prompt, layer, values))
        except KvdslError:
            return False
        return True
