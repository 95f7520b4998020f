"""How good a policy is, without reading whole books: rungs of a ladder, of which each costs more than the one below and says more.

The lower ones look at attention: at the error of its output, on what a model's layers attend with in a text. The layers are rows of
one batch, so that a policy runs through all of them at once. What they attend with is recorded under the full cache: that an
earlier layer's error changes a later layer's queries is left out. The highest looks at what the model makes of it: how far the
distribution of the next token is from the full cache's. What is asked on all of them is a `Case`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvdsl.build import cache_folder_at
from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.loading import class_in_memory, compile, load
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl_lab.eval.abreast import Abreast
from kvdsl_lab.eval.reading import Reading, read


@dataclass(frozen=True)
class Task:
    """A way in which a cache is used.

    Attributes:
        longer: how many times as long as the budget the prompt is.
        behind: so many tokens come behind the prompt, one by one, where the budget is no less than a third of that.
    """

    longer: int
    behind: int


TASKS = {"text": Task(1, 256), "prompt": Task(4, 64)}
"""`text`: a policy evicts token by token. `prompt`: it has a long prompt to cut down to its budget first."""


@dataclass(frozen=True)
class Case:
    """A task at a budget, in tokens."""

    task: str
    budget: int

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return TASKS[self.task].longer * self.budget

    @property
    def behind(self) -> int:
        """Tokens that are read one by one behind it."""
        return min(TASKS[self.task].behind, 3 * self.budget)

    @property
    def tokens(self) -> int:
        """Of the whole."""
        return self.prompt + self.behind

    def __str__(self) -> str:
        return f"{self.task} {self.budget}"


@dataclass(frozen=True)
class Recorded:
    """Some layers of a text, as rows: what their attention is called with, and what comes out under the full cache.

    Attributes:
        call: of [rows, heads, tokens, dim].
        out: [rows, tokens, query_heads, dim].
    """

    call: AttentionCall
    out: Tensor


def recorded(model: Any, ids: Tensor, rows: int) -> Recorded:
    """Layers of texts, int64 [texts, tokens], in float32 whatever the model's dtype: errors are sums of small squares.

    Args:
        rows: of all layers and texts so many, spread evenly; all if they are fewer.
    """
    from kvdsl_lab.eval.recording import record

    layers = record(model, ids)
    there = len(layers) * len(ids)
    chosen = torch.linspace(0, there - 1, min(rows, there)).round().long()
    query, key, value = (
        torch.cat([getattr(layer.call, name) for layer in layers])[chosen].float() for name in ("query", "key", "value")
    )
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

    def errors(self, policies: Sequence[Policy], case: Case) -> list[float]:
        """0 is the full cache; infinite where a policy makes a NaN, or protects more than the budget holds."""


class Attention:
    """The error of the attention's output.

    The squared distance of the outputs from the full cache's, over the latter's square, in each layer, over as many tokens behind the
    prompt as there are in the budget, at most the case's; of that the root, and the mean over the layers.
    """

    def __init__(self, text: Recorded) -> None:
        self._text = text
        self.what = f"the attention's output, in {len(text.out)} layers"

    def errors(self, policies: Sequence[Policy], case: Case) -> list[float]:
        """See `Rung.errors`. On the torch backend, which builds nothing."""
        return [_finite(partial(self._error, class_in_memory(policy).spec, case)) for policy in policies]

    def _error(self, spec: Any, case: Case) -> float:
        end = case.prompt + min(case.behind, case.budget)
        with torch.no_grad():  # the state outlives a forward, as in a cache
            found, wanted = _behind(spec, self._text.call, case, end), self._text.out[:, case.prompt : end]
            distance = (found - wanted).square().sum((1, 2, 3))
            return float((distance / wanted.square().sum((1, 2, 3))).sqrt().mean())


class NextToken:
    """The divergence (KL) of the next token's distribution from the full cache's, in nats, the mean over the tokens behind the prompt.

    Args:
        ids: int64 [texts, tokens].
        which: what the texts are called.
    """

    def __init__(self, model: Any, ids: Tensor, which: str = "texts") -> None:
        self._model, self._ids = model, ids.to(model.device)
        self._read: dict[Case, _Read] = {}
        self._built = TemporaryDirectory(prefix="kvdsl-search-") if model.config.num_hidden_layers >= _DEEP else None
        self.what = f"the next token's distribution, in {len(ids)} {which}"

    def errors(self, policies: Sequence[Policy], case: Case) -> list[float]:
        """See `Rung.errors`. The policies go through the model together."""
        if case not in self._read:
            self._read[case] = _Read(self._model, self._ids, case)
        begun: dict[int, Any] = {}
        for number, policy in enumerate(policies):
            with suppress(KvdslError):
                begun[number] = self._begun(policy, case)
        found = [float("inf")] * len(policies)
        for number, error in zip(begun, self._divergences(list(begun.values()), case), strict=True):
            found[number] = error if math.isfinite(error) else float("inf")
        return found

    def _begun(self, policy: Policy, case: Case) -> Any:
        """A cache that has read a prompt."""
        if self._built is None:
            cache = cast("Any", class_in_memory(policy))(self._model, budget=case.budget, backend="torch")
        else:
            with cache_folder_at(Path(self._built.name)):
                cache = cast("Any", compile(print_policy(policy)))(self._model, budget=case.budget)
        read(self._model, cache, self._read[case].prompt)
        return cache

    def _divergences(self, caches: Sequence[Any], case: Case) -> list[float]:
        if not caches:
            return []
        rows, total = len(self._ids), torch.zeros(len(caches), dtype=torch.float64)
        together, behind = Abreast(caches, rows), torch.split(self._ids[:, case.prompt : case.tokens], 1, dim=1)
        with torch.inference_mode():
            for step, ids in enumerate(behind):
                logits = self._model(input_ids=ids.repeat(len(caches), 1), **with_cache(together), use_cache=True).logits
                for text, found in enumerate(logits[:, 0].unflatten(0, (-1, rows)).unbind(1)):
                    total += self._read[case].divergence(text, step, found).double().cpu()
        return [float(one) / len(behind) / rows for one in total]


class _Read:
    """What a case has of texts: a prompt that was read once, and what the full cache makes of the tokens behind it.

    Attributes:
        wanted: of every text probabilities, float32 [tokens behind, vocabulary].
        certainty: of every text the sums of probabilities times their logarithms, float32 [tokens behind].
    """

    def __init__(self, model: Any, ids: Tensor, case: Case) -> None:
        self.prompt = Reading(model, ids[:, : case.prompt])
        self.wanted: list[Tensor] = []
        self.certainty: list[Tensor] = []
        ids = ids[:, : case.tokens]
        with torch.inference_mode():
            logits = model(input_ids=ids, logits_to_keep=ids.shape[1] - case.prompt, use_cache=False).logits
            for text in logits:  # one by one: what is on the way would take twice the memory of what is kept
                logarithms = text.float().log_softmax(-1)
                self.wanted.append(logarithms.exp())
                self.certainty.append((self.wanted[-1] * logarithms).sum(-1))

    def divergence(self, text: int, step: int, logits: Tensor) -> Tensor:
        """From what is wanted of a token to other logits, [any, vocabulary]: [any]. A text at a time stays in a CPU's cache."""
        logits = logits.float()
        return self.certainty[text][step] + logits.logsumexp(-1) - logits @ self.wanted[text][step]


class Judge:
    """Judges policies.

    Attributes:
        cases: what is asked.
        rungs: what their errors are of, the cheapest first.
        choice: what the finalists' errors are of, if they are chosen on another text than is searched on.
    """

    def __init__(self, cases: Sequence[Case], rungs: Sequence[Rung], choice: Rung | None = None) -> None:
        self.cases, self._all = tuple(cases), (*rungs, *([] if choice is None else [choice]))
        self.rungs = tuple(rung.what for rung in rungs)
        self.choice = None if choice is None else choice.what

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        """Of every policy the error in each case, 0 (that of the full cache) upwards; see `Rung.errors`.

        Args:
            rung: its number; the choice has the one behind the last.
        """
        return list(map(list, zip(*(self._all[rung].errors(policies, case) for case in self.cases), strict=True)))

    def processor_time(self) -> float:
        """Seconds that this process has had."""
        return time.process_time()


def _finite(error: Callable[[], float]) -> float:
    """An error, or infinity where there is none."""
    try:
        found = error()
    except KvdslError:
        return float("inf")
    return found if math.isfinite(found) else float("inf")


def _state(spec: Any, budget: int | None) -> SlotState:
    return slot_state(spec, {} if budget is None else {"budget": float(budget)}, layer=0, layers=1, head_offset=0, seed=0)


def _behind(spec: Any, call: AttentionCall, case: Case, end: int) -> Tensor:
    """A policy's outputs for the tokens behind a case's prompt, up to `end`: [rows, tokens, query_heads, dim]."""
    state, backend = _state(spec, case.budget), TorchBackend()
    prompt, behind = (
        call._replace(query=call.query[:, :, part], key=call.key[:, :, part], value=call.value[:, :, part])
        for part in (slice(case.prompt), slice(case.prompt, end))
    )
    backend.prefill(state, prompt)
    return backend.decode(state, behind)
