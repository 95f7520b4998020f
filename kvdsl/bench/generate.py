"""How fast whole models generate under policies: the prompt, then token by token, and what memory it takes.

All contenders run the same prompts on the same weights, and take turns: prompt by prompt, then token by token, so that a noisy
machine disturbs all of them alike. Every one goes on with its own likeliest token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvdsl.bench import measure
from kvdsl.eval.caches import Policies
from kvdsl.eval.generate import cache_bytes, full_cache_bytes

Row = dict[str, Any]
T = TypeVar("T")

NATIVE = "transformers"
"""The name of transformers' own growing cache, with the model's own attention."""

RECOMPUTE = "recompute"
"""The name of a window of `budget` tokens that is computed anew for every token, without a cache."""


@dataclass(frozen=True)
class Contender:
    """Something that generates: `make` gives it a fresh cache, or None where a `window` of tokens is computed anew."""

    policy: str
    budget: float | None
    make: Callable[[], Any] = lambda: None
    window: int | None = None

    def begin(self, model: Any) -> Text:
        """A text of which nothing has been read."""
        return Text(model, self.make()) if self.window is None else Recomputed(model, None, window=self.window)


def contenders(
    names: Sequence[str], settings: Mapping[str, str], budgets: Sequence[float], model: Any, backend: str
) -> list[Contender]:
    """Every policy, and `recompute`, with every budget, in the order of the names; those without a budget, and `transformers`, come once.

    Raises:
        DiagnosticError: if there is no such policy.
    """
    policies = Policies([name for name in names if name not in (NATIVE, RECOMPUTE)], settings, backend)
    found: dict[str, list[Contender]] = {
        NATIVE: [Contender(NATIVE, None, lambda: _native_cache(model))],
        RECOMPUTE: [Contender(RECOMPUTE, budget, window=max(1, int(budget))) for budget in budgets],
    }
    for name, budget in policies.pairs(budgets):
        found.setdefault(name, []).append(Contender(name, budget, partial(policies.make, name, model, budget)))
    return [one for name in names for one in found[name]]


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

    def read(self, ids: Tensor) -> float:
        """Feed the prompt, or the newest token; milliseconds until the next is there."""
        _finish(ids.device)
        begun = time.perf_counter()
        logits = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=self.cache is not None, logits_to_keep=1
        ).logits
        self.newest = logits[:, -1].argmax(-1, keepdim=True)
        _finish(ids.device)
        return (time.perf_counter() - begun) * 1e3

    def go_on(self) -> float:
        """One token more."""
        return self.read(self.newest)


@dataclass
class Recomputed(Text):
    """The same without a cache: every token is computed from the `window` tokens before it, of which all are run."""

    window: int = 1
    seen: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, ids: Tensor) -> float:
        """See `Text.read`."""
        self.seen = torch.cat([self.seen, ids], 1) if self.seen.numel() else ids
        return super().read(self.seen[:, -self.window :])


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
    """Milliseconds of one contender's prompts and of its tokens after the first; what its memory came to."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    peak: int | None = None
    cache: int = 0
    full_cache: int = 0


def bench_generate(
    model: Any,
    ids: Tensor,
    new_tokens: int,
    wanted: Sequence[Contender],
    *,
    repeats: int = 3,
    warmup: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for each contender: `policy, budget, ttft_ms, tpot_ms, tokens_per_s, peak_bytes, cache_bytes` and more.

    Before anything is timed every contender generates once alone, which shows what memory it takes.

    Args:
        ids: prompts of equal length, int64 [batch, tokens].
        new_tokens: after each prompt, at least 2.
        warmup: rounds that are not recorded.
        tick: called `steps` times, for a progress bar.
    """
    ids = ids.to(model.device)
    times = [Times() for _ in wanted]
    with torch.inference_mode():
        for one, found in zip(wanted, times, strict=True):
            found.peak = _peak(ids.device, lambda one=one: _alone(model, ids, new_tokens, one))  # type: ignore[misc]
            tick()
        for turn in range(-warmup, repeats):
            _round(model, ids, new_tokens, wanted, times if turn >= 0 else [Times() for _ in wanted], turn)
            tick()
    shape = {"batch": ids.shape[0], "prompt_tokens": ids.shape[1], "new_tokens": new_tokens}
    return [
        measure.finite({"policy": one.policy, "budget": one.budget, **shape, **figures(found, times[0], ids.shape[0])})
        for one, found in zip(wanted, times, strict=True)
    ]


def steps(wanted: Sequence[Contender], repeats: int, warmup: int) -> int:
    """How often `bench_generate` ticks."""
    return len(wanted) + repeats + warmup


def _alone(model: Any, ids: Tensor, new_tokens: int, one: Contender) -> Any:
    text = one.begin(model)
    text.read(ids)
    for _ in range(new_tokens - 1):
        text.go_on()
    return text.cache


def _round(model: Any, ids: Tensor, new_tokens: int, wanted: Sequence[Contender], times: Sequence[Times], turn: int) -> None:
    """Every contender's prompt, then their tokens in turns."""
    texts = [one.begin(model) for one in wanted]
    for text, found in _turned(list(zip(texts, times, strict=True)), turn):
        found.first.append(text.read(ids))
    for index in range(new_tokens - 1):
        for text, found in _turned(list(zip(texts, times, strict=True)), index):
            found.later.append(text.go_on())
    for text, found in zip(texts, times, strict=True):
        if text.cache is not None:
            found.cache, found.full_cache = cache_bytes(text.cache), full_cache_bytes(text.cache)


def _turned(things: list[T], by: int) -> list[T]:
    """Beginning with another one each time, so that nobody always runs behind the same neighbour."""
    start = by % len(things)
    return things[start:] + things[:start]


def figures(found: Times, first: Times, batch: int) -> Row:
    """Medians and quartiles; `vs_first` is how many times as fast a token is as the first contender's, token by token."""
    tpot = measure.summary("tpot_ms", found.later)
    return {
        **measure.summary("ttft_ms", found.first),
        **tpot,
        "tokens_per_s": round(batch * 1e3 / tpot["tpot_ms"], 2),
        **measure.summary("vs_first", measure.ratios(first.later, found.later)),
        "peak_bytes": found.peak, "cache_bytes": found.cache, "full_cache_bytes": found.full_cache,
    }  # fmt: skip
