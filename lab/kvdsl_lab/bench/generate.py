"""How fast whole models generate under policies: the prompt, then token by token, and what memory it takes.

All contenders run the same prompts on the same weights, and take turns: prompt by prompt, then token by token, so that a noisy
machine disturbs all of them alike. Every one goes on with its own likeliest token. Where a token's time goes is looked at
beforehand, while each generates alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvdsl.generation.generate import cache_bytes, full_cache_bytes
from kvdsl_lab.bench import measure
from kvdsl_lab.bench.contenders import Contender
from kvdsl_lab.bench.shares import Shares, shares
from kvdsl_lab.bench.texts import Text
from kvdsl_lab.eval.usage import Usage

Row = dict[str, Any]
T = TypeVar("T")


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

    `tokens_per_s` is by the median token: of a policy that evicts many tokens at once now and then it leaves those steps out.

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
        model(input_ids=ids[:1, :1], use_cache=False)  # weights that lie in a file come into memory when they are first read
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
