"""How good a policy is, without reading whole books: rungs of a ladder, of which each costs more than the one below and says more.

The lower ones look at attention: at the error of its output, on what a model's layers attend with in a text. The layers are rows of
one batch, so that a policy runs through all of them at once. What they attend with is recorded under the full cache: that an
earlier layer's error changes a later layer's queries is left out. The highest looks at what the model makes of it: how far the
distribution of the next token is from the full cache's. On all of them a policy begins with a prompt as long as its budget, and then
evicts token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvdsl.build.cache import cache_folder_at
from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.loading import class_in_memory, compile, load
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layouts import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl_lab.eval.abreast import Abreast


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


_DEEP = 8
"""Layers of a model that gives back the half second in which a policy's kernels are built."""


class Rung(Protocol):
    """A way to judge.

    Attributes:
        what: what its errors are of, in words.
    """

    what: str

    def errors(self, policies: Sequence[Policy], budget: int) -> list[float]:
        """0 is the full cache; infinite where a policy makes a NaN, or protects more than the budget holds."""


class Attention:
    """The error of the attention's output.

    The squared distance of the outputs from the full cache's, over the latter's square, in each layer, over the tokens behind the
    prompt; of that the root, and the mean over the layers.
    """

    def __init__(self, text: Recorded) -> None:
        self._text = text
        self.what = f"the attention's output, {len(text.out)} layers of texts of {text.tokens} tokens"

    def errors(self, policies: Sequence[Policy], budget: int) -> list[float]:
        """See `Rung.errors`. On the torch backend, which builds nothing."""
        return [_finite(partial(self._error, class_in_memory(policy).spec, budget)) for policy in policies]

    def _error(self, spec: Any, budget: int) -> float:
        with torch.no_grad():  # the state outlives a forward, as in a cache
            found, wanted = _run(spec, self._text.call, budget), self._text.out[:, budget:]
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
        self._built = TemporaryDirectory(prefix="kvdsl-search-") if model.config.num_hidden_layers >= _DEEP else None
        self.what = f"the next token's distribution, {len(ids)} texts of {tokens} tokens behind the budget"
        with torch.inference_mode():
            logits = model(input_ids=self._ids, logits_to_keep=self._ids.shape[1] - self._first, use_cache=False).logits
            self._wanted = logits.float().log_softmax(-1)

    def errors(self, policies: Sequence[Policy], budget: int) -> list[float]:
        """See `Rung.errors`. The policies go through the model together."""
        begun: dict[int, Any] = {}
        for number, policy in enumerate(policies):
            with suppress(KvdslError):
                begun[number] = self._begun(policy, budget)
        found = [float("inf")] * len(policies)
        for number, error in zip(begun, self._divergences(list(begun.values()), budget), strict=True):
            found[number] = error if math.isfinite(error) else float("inf")
        return found

    def _begun(self, policy: Policy, budget: int) -> Any:
        """A cache that has read a prompt."""
        if self._built is None:
            cache = cast("Any", class_in_memory(policy))(self._model, budget=budget, backend="torch")
        else:
            with cache_folder_at(Path(self._built.name)):
                cache = cast("Any", compile(print_policy(policy)))(self._model, budget=budget)
        with torch.inference_mode():
            self._model(input_ids=self._ids[:, :budget], **with_cache(cache), use_cache=True, logits_to_keep=1)
        return cache

    def _divergences(self, caches: Sequence[Any], budget: int) -> list[float]:
        if not caches:
            return []
        rows, total = len(self._ids), torch.zeros(len(caches), dtype=torch.float64)
        together = Abreast(caches, rows)
        steps = range(budget, min(budget + self._tokens, self._ids.shape[1]))
        with torch.inference_mode():
            for step in steps:
                ids = self._ids[:, step : step + 1].repeat(len(caches), 1)
                logits = self._model(input_ids=ids, **with_cache(together), use_cache=True).logits
                wanted = self._wanted[:, step - self._first]
                found = logits[:, 0].float().log_softmax(-1).unflatten(0, (-1, rows))
                total += (wanted.exp() * (wanted - found)).sum(-1).mean(1).double().cpu()
        return [float(one) / len(steps) for one in total]


class Judge:
    """Judges policies.

    Attributes:
        budgets: tokens.
        rungs: the cheapest first.
    """

    def __init__(self, budgets: Sequence[int], rungs: Sequence[Rung]) -> None:
        self.budgets, self.rungs = tuple(budgets), tuple(rungs)

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        """Of every policy the error at each budget, 0 (that of the full cache) upwards; see `Rung.errors`."""
        return list(map(list, zip(*(self.rungs[rung].errors(policies, budget) for budget in self.budgets), strict=True)))


def _finite(error: Callable[[], float]) -> float:
    """An error, or infinity where there is none."""
    try:
        found = error()
    except KvdslError:
        return float("inf")
    return found if math.isfinite(found) else float("inf")


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
