"""How good a policy is, without reading whole books: rungs of a ladder, of which each costs more than the one below and says more.

The lower ones look at attention: at the error of its output, on what a model's layers attend with in a text. The layers are rows of
one batch, so that a policy runs through all of them at once. What they attend with is recorded under the full cache: that an
earlier layer's error changes a later layer's queries is left out. The highest looks at what the model makes of it: how far the
distribution of the next token is from the full cache's. On all of them a policy begins with a prompt as long as its budget, and then
evicts token by token, on the torch backend, which builds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl.loading import class_in_memory, load
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
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


class Rung(Protocol):
    """A way to judge.

    Attributes:
        what: what its errors are of, in words.
    """

    what: str

    def error(self, cache_class: Any, budget: int) -> float:
        """0 is the full cache; NaN where a policy makes one.

        Raises:
            KvdslError: if the policy protects more than the budget holds.
        """


class Attention:
    """The error of the attention's output.

    The squared distance of the outputs from the full cache's, over the latter's square, in each layer, over the tokens behind the
    prompt; of that the root, and the mean over the layers.
    """

    def __init__(self, text: Recorded) -> None:
        self._text = text
        self.what = f"the attention's output, {len(text.out)} layers of texts of {text.tokens} tokens"

    def error(self, cache_class: Any, budget: int) -> float:
        """See `Rung.error`."""
        with torch.no_grad():  # the state outlives a forward, as in a cache
            found, wanted = _run(cache_class.spec, self._text.call, budget), self._text.out[:, budget:]
            distance = (found[:, budget:] - wanted).square().sum((1, 2, 3))
            return float((distance / wanted.square().sum((1, 2, 3))).sqrt().mean())


class NextToken:
    """The divergence (KL) of the next token's distribution from the full cache's, in nats, the mean over the tokens behind the prompt.

    Args:
        ids: int64 [texts, length], of which no more than `tokens` behind a prompt are read.
        budgets: those that will be asked for.
    """

    def __init__(self, model: Any, ids: Tensor, budgets: Sequence[int], tokens: int) -> None:
        self._model, self._tokens, self._first = model, tokens, min(budgets)
        self._ids = ids[:, : max(budgets) + tokens].to(model.device)
        self.what = f"the next token's distribution, {len(ids)} texts of {tokens} tokens behind the budget"
        with torch.inference_mode():
            logits = model(input_ids=self._ids, logits_to_keep=self._ids.shape[1] - self._first, use_cache=False).logits
            self._wanted = logits.float().log_softmax(-1)

    def error(self, cache_class: Any, budget: int) -> float:
        """See `Rung.error`."""
        cache = cache_class(self._model, budget=budget, backend="torch")
        steps = range(budget, min(budget + self._tokens, self._ids.shape[1]))
        divergence = torch.zeros((), dtype=torch.float64)
        with torch.inference_mode():
            self._model(input_ids=self._ids[:, :budget], **with_cache(cache), use_cache=True, logits_to_keep=1)
            for step in steps:
                logits = self._model(input_ids=self._ids[:, step : step + 1], **with_cache(cache), use_cache=True).logits
                wanted = self._wanted[:, step - self._first]
                found = logits[:, 0].float().log_softmax(-1)
                divergence += (wanted.exp() * (wanted - found)).sum(-1).mean().double().cpu()
        return float(divergence) / len(steps)


class Judge:
    """Judges policies.

    Attributes:
        budgets: tokens.
        rungs: the cheapest first.
    """

    def __init__(self, budgets: Sequence[int], rungs: Sequence[Rung]) -> None:
        self.budgets, self.rungs = tuple(budgets), tuple(rungs)

    def errors(self, policy: Policy, rung: int) -> list[float]:
        """The error at each budget, 0 (that of the full cache) upwards; infinite where the policy protects more than the budget holds."""
        cache_class = class_in_memory(policy)
        try:
            errors = [self.rungs[rung].error(cache_class, budget) for budget in self.budgets]
        except KvdslError:
            return [float("inf")] * len(self.budgets)
        return [error if error == error else float("inf") for error in errors]


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
