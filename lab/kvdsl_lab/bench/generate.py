"""How fast whole models generate under policies: the prompt, then token by token, and what memory it takes.

All contenders run the same prompts on the same weights, and take turns: prompt by prompt, then token by token, so that a noisy
machine disturbs all of them alike. Every one goes on with its own likeliest token. Where a token's time goes is looked at
beforehand, while each generates alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvdsl.budget import tokens_of
from kvdsl.generation.generate import cache_bytes, full_cache_bytes
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.bench import measure, shifting
from kvdsl_lab.bench.shares import Shares, shares
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.usage import Usage

Row = dict[str, Any]
T = TypeVar("T")

NATIVE = "transformers"
"""The name of transformers' own growing cache, with the model's own attention."""

RECOMPUTE = "recompute"
"""The name of a window of `budget` tokens that is computed anew for every token, without a cache."""

SHIFT, FRESH = "shift:", "fresh:"
"""Before a policy's name: its rule with a cache that is shifted for every token, done well or as published (`kvdsl_lab.bench.shifting`)."""


@dataclass(frozen=True)
class Contender:
    """Something that generates: `make` gives it a fresh cache, or None where a `window` of tokens is computed anew.

    Attributes:
        model: one of its own, where its cache needs another attention; otherwise everybody's.
    """

    policy: str
    budget: float | None
    make: Callable[[], Any] = lambda: None
    window: float | None = None
    model: Any = None

    def begin(self, model: Any) -> Text:
        """A text of which nothing has been read."""
        if self.window is not None:
            return Recomputed(model, None, window=self.window)
        return Text(model if self.model is None else self.model, self.make())


def contenders(
    names: Sequence[str], settings: Mapping[str, str], budgets: Sequence[float], model: Any, backend: str
) -> list[Contender]:
    """Every policy, and `recompute`, with every budget, in the order of the names; those without a budget, and `transformers`, come once.

    Raises:
        DiagnosticError: if there is no such policy.
        KvdslError: if a policy is to be shifted for which that is not written.
    """
    for name in names:
        if name.startswith((SHIFT, FRESH)):
            shifting.check_served(_plain(name))
    own = [_plain(name) for name in names if name not in (NATIVE, RECOMPUTE)]
    policies = Policies(list(dict.fromkeys(own)), settings, backend)
    found: dict[str, list[Contender]] = {
        NATIVE: [Contender(NATIVE, None, lambda: _native_cache(model))],
        RECOMPUTE: [Contender(RECOMPUTE, budget, window=budget) for budget in budgets],
    }
    for name, budget in policies.pairs(budgets):
        found.setdefault(name, []).append(Contender(name, budget, partial(policies.make, name, model, budget)))
    twin = shifting.twin(model) if any(name.startswith((SHIFT, FRESH)) for name in names) else None
    for name in names:
        if name.startswith((SHIFT, FRESH)):
            spec, fresh = policies.classes[_plain(name)].spec, name.startswith(FRESH)
            for one in found[_plain(name)]:
                make = partial(shifting.ShiftedCache, twin, spec, {"budget": one.budget}, fresh=fresh)
                found.setdefault(name, []).append(Contender(name, one.budget, make, model=twin))
    return [one for name in names for one in found[name]]


def _plain(name: str) -> str:
    """The policy's name, where it is to be shifted as well."""
    return name.removeprefix(SHIFT).removeprefix(FRESH)


def _native_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


# -- what is timed -----------------------------------------------------------------------------------------------------


@dataclass
class Text:
    """One contender's text as far as it has come: the cache, and the next token of every row, int64 [batch, 1]."""

    model: Any
    cache: Any
    newest: Tensor = field(default_factory=lambda: torch.empty(0))
    _logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, ids: Tensor) -> float:
        """Feed the prompt, or the newest token; milliseconds until the next is there."""
        _finish(ids.device)
        begun = time.perf_counter()
        self._logits = self.model(
            input_ids=ids, **with_cache(self.cache), use_cache=self.cache is not None, logits_to_keep=1
        ).logits[:, -1]
        self.newest = self._logits.argmax(-1, keepdim=True)
        _finish(ids.device)
        return (time.perf_counter() - begun) * 1e3

    def share(self, rows: int) -> None:
        """The one prompt that was read becomes that of many rows, each of which goes on with another of its likeliest tokens."""
        if self.cache is not None:
            self.cache.batch_repeat_interleave(rows)
        self.newest = self._logits[0].topk(rows).indices[:, None]

    def go_on(self) -> float:
        """One token more."""
        return self.read(self.newest)


@dataclass
class Recomputed(Text):
    """The same without a cache: every token is computed from the `window` tokens before it, of which all are run; a rate of the prompt."""

    window: float = 1
    seen: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, ids: Tensor) -> float:
        """See `Text.read`."""
        if not self.seen.numel():
            self.window = tokens_of(self.window, ids.shape[1])
        self.seen = torch.cat([self.seen, ids], 1) if self.seen.numel() else ids
        return super().read(self.seen[:, -int(self.window) :])

    def share(self, rows: int) -> None:
        """See `Text.share`."""
        super().share(rows)
        self.seen = self.seen.expand(rows, -1)


def _finish(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device, run: Callable[[], object]) -> int | None:
    """By how much memory grows at most during a call: the device's, or the process's; None if nothing tells."""
    if device.type != "cuda":
        return measure.peak_bytes(run)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


@dataclass
class Times:
    """Milliseconds of one contender's prompts and of its tokens after the first; what its memory came to, and where its time goes."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    peak: int | None = None
    cache: int = 0
    full_cache: int = 0
    usage: Usage = field(default_factory=Usage)
    shares: Shares = field(default_factory=dict)


def bench_generate(
    model: Any,
    ids: Tensor,
    new_tokens: int,
    wanted: Sequence[Contender],
    *,
    rows: int | None = None,
    repeats: int = 3,
    warmup: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for each contender: `policy, budget, ttft_ms, tpot_ms, tokens_per_s, shares, peak_bytes, cache_bytes` and more.

    Before anything is timed every contender generates once alone, which shows what memory it takes, and where its time goes.

    Args:
        ids: prompts of equal length, int64 [batch, tokens].
        new_tokens: after each prompt, at least 2.
        rows: how many rows share a single prompt once it is read; None where each has its own.
        warmup: rounds that are not recorded.
        tick: called `steps` times, for a progress bar.
    """
    ids = ids.to(model.device)
    race = Race(model, ids, new_tokens, wanted, rows)
    times = [Times() for _ in wanted]
    with torch.inference_mode():
        for one, found in zip(wanted, times, strict=True):
            found.peak = _peak(ids.device, lambda one=one, found=found: race.alone(one, found))  # type: ignore[misc]
            tick()
        for turn in range(-warmup, repeats):
            race.round(times if turn >= 0 else [Times() for _ in wanted], turn)
            tick()
    batch = rows or ids.shape[0]
    shape = {"batch": batch, "prompt_tokens": ids.shape[1], "new_tokens": new_tokens}
    return [
        measure.finite({"policy": one.policy, "budget": one.budget, **shape, **figures(found, times[0], batch)})
        for one, found in zip(wanted, times, strict=True)
    ]


def steps(wanted: Sequence[Contender], repeats: int, warmup: int) -> int:
    """How often `bench_generate` ticks."""
    return len(wanted) + repeats + warmup


@dataclass(frozen=True)
class Race:
    """What is run; see `bench_generate`."""

    model: Any
    ids: Tensor
    new_tokens: int
    wanted: Sequence[Contender]
    rows: int | None = None

    def alone(self, one: Contender, found: Times) -> Any:
        """One contender's text by itself: its shares; what it has cached."""
        text = one.begin(self.model)
        self._read_prompt(text)
        found.shares = shares(text.model, text.cache, lambda: sum(text.go_on() for _ in range(self.new_tokens - 1)))
        return text.cache

    def round(self, times: Sequence[Times], turn: int) -> None:
        """Every contender's prompt, then their tokens in turns."""
        texts = [one.begin(self.model) for one in self.wanted]
        for text, found in _turned(list(zip(texts, times, strict=True)), turn):
            found.first.append(self._read_prompt(text))
        for index in range(self.new_tokens - 1):
            for text, found in _turned(list(zip(texts, times, strict=True)), index):
                found.later.append(text.go_on())
        for text, found in zip(texts, times, strict=True):
            if text.cache is not None:
                found.cache, found.full_cache = cache_bytes(text.cache), full_cache_bytes(text.cache)
                found.usage.see(text.cache)

    def _read_prompt(self, text: Text) -> float:
        """Milliseconds; sharing it out is not among them."""
        ms = text.read(self.ids)
        if self.rows is not None:
            text.share(self.rows)
        return ms


def _turned(things: list[T], by: int) -> list[T]:
    """Beginning with another one each time, so that nobody always runs behind the same neighbour."""
    start = by % len(things)
    return things[start:] + things[:start]


def figures(found: Times, first: Times, batch: int) -> Row:
    """Medians and quartiles; `vs_first` is how many times as fast a token is as the first contender's, token by token; `ttft_vs_first`
    is the same of the first token, prompt by prompt.
    """
    tpot = measure.summary("tpot_ms", found.later)
    return {
        **measure.summary("ttft_ms", found.first),
        **measure.summary("ttft_vs_first", measure.ratios(first.first, found.first)),
        **tpot,
        "tokens_per_s": round(batch * 1e3 / tpot["tpot_ms"], 2),
        **measure.summary("vs_first", measure.ratios(first.later, found.later)),
        "shares": found.shares, "peak_bytes": found.peak, "cache_bytes": found.cache, "full_cache_bytes": found.full_cache,
        **found.usage.row(),
    }  # fmt: skip
