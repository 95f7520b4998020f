"""How good a policy is, cheaply: the error of the attention's output, on what a model's layers attend with in a text.

The layers are rows of one batch, so that a policy runs through all of them at once, on the torch backend. It begins with a prompt as
long as its budget, and then evicts token by token. What the layers attend with is recorded under the full cache: that an
earlier layer's error changes a later layer's queries is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl.loading import class_in_memory, load
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.state.layouts import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend


@dataclass(frozen=True)
class Recorded:
    """Some layers of a text, as rows: what their attention is called with, and what comes out under the full cache.

    Attributes:
        call: of [rows, heads, tokens, dim].
        out: [rows, tokens, query_heads, dim].
    """

    call: AttentionCall
    out: Tensor

    @property
    def tokens(self) -> int:
        """The text's length."""
        return int(self.call.key.shape[2])

    def part(self, tokens: int, rows: int) -> Recorded:
        """The texts' beginnings, and at most so many rows, spread evenly over layers and texts."""
        there = len(self.out)
        chosen = torch.linspace(0, there - 1, min(rows, there)).round().long()
        query, key, value = (x[chosen, :, :tokens] for x in self.call[:3])
        return Recorded(self.call._replace(query=query, key=key, value=value), self.out[chosen, :tokens])


def recorded(model: Any, ids: Tensor, tokens: int) -> Recorded:
    """All layers of texts of one length.

    Args:
        ids: int64 [texts, length].
        tokens: so many of each are kept: the beginning.
    """
    from kvdsl_lab.eval.recording import record

    layers = [one.before(tokens) for one in record(model, ids)]
    query, key, value = (torch.cat([getattr(layer.call, name) for layer in layers]) for name in ("query", "key", "value"))
    call = layers[0].call._replace(query=query, key=key, value=value, rope=None)
    with torch.no_grad():
        return Recorded(call, TorchBackend().prefill(_state(load("full").spec, None), call))


@dataclass(frozen=True)
class Rung:
    """On how many tokens a policy is judged, and on how many layers of texts; later rungs cost more and say more."""

    tokens: int
    rows: int


class Judge:
    """Judges policies on a recorded text.

    Attributes:
        budgets: tokens.
        rungs: the cheapest first.
    """

    def __init__(self, text: Recorded, budgets: Sequence[int], rungs: Sequence[Rung]) -> None:
        self.budgets, self.rungs = tuple(budgets), tuple(rungs)
        self._texts = [text.part(rung.tokens, rung.rows) for rung in rungs]

    def errors(self, policy: Policy, rung: int) -> list[float]:
        """The error at each budget, 0 (that of the full cache) upwards.

        The squared distance of the outputs from the full cache's, over the latter's square, in each layer, over the tokens behind
        the prompt; of that the root, and the mean over the layers. Infinite where the policy protects more than the budget holds.
        """
        spec = class_in_memory(policy).spec
        try:
            return [self._error(spec, self._texts[rung], budget) for budget in self.budgets]
        except KvdslError:
            return [float("inf")] * len(self.budgets)

    def _error(self, spec: Any, text: Recorded, budget: int) -> float:
        with torch.no_grad():  # the state outlives a forward, as in a cache
            found, wanted = _run(spec, text.call, budget), text.out[:, budget:]
            distance = (found[:, budget:] - wanted).square().sum((1, 2, 3))
            error = float((distance / wanted.square().sum((1, 2, 3))).sqrt().mean())
        return error if error == error else float("inf")


def _state(spec: Any, budget: int | None) -> SlotState:
    return slot_state(spec, {} if budget is None else {"budget": float(budget)}, layer=0, layers=1, head_offset=0, seed=0)


def _run(spec: Any, call: AttentionCall, budget: int) -> Tensor:
    """The outputs of a policy, [rows, tokens, query_heads, dim]: a prompt as long as its budget, then token by token."""
    state, backend = _state(spec, budget), TorchBackend()
    first, rest = (
        call._replace(query=call.query[:, :, part], key=call.key[:, :, part], value=call.value[:, :, part])
        for part in (slice(budget), slice(budget, None))
    )
    return torch.cat([backend.prefill(state, first), backend.decode(state, rest)], 1)
