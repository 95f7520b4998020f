"""The stage `in_place`: EQUIP's tables. A token's time where it overwrites what leaves, beside caches that are shifted, by batch and size.

All of them run on the same weights, a model of Llama-3-8B's shape, and evict at every token. A policy's own cache is beside two that follow
its rule: `shift`, moved together as well as torch can, and `published`, as published code does it (`kvdsl_lab.bench.shifting`).
Either both are captured as a graph of a whole token (`ms`, `over_shift`, `over_published`), or neither is (the same with `eager_` before).
Published H2O picks what stays by a mask, for which the host waits, so that it has no graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scripts.gpu import model as whole
from scripts.gpu.setting import HAS_TRANSFORMERS, Held, Lines, Setting, cache_class
from scripts.gpu.timing import in_a_graph, median_ms
from scripts.gpu.whole import model_of, tiny

EAGER_REPEATS = 5


def run(setting: Setting, lines: Lines) -> int:
    """Every batch and size by itself, the paper's first; 1 if a way failed, which takes no other along."""
    lines.tell(**setting.environment(), missing=setting.missing())
    if not HAS_TRANSFORMERS:
        print("transformers is not installed")
        return 0
    from kvdsl_lab.bench.shifting import twin

    model = model_of(setting, torch.bfloat16, **whole.LLAMA) if setting.real else tiny(setting)
    shifted = twin(model)  # before any cache has the model call another attention
    failed = 0
    for held in setting.sizes.held:
        for name in setting.raced:
            row: dict[str, Any] = {}
            for prefix, way in ways(model, shifted, cache_class(name), held.tokens).items():
                found = _attempt(way, held, setting)
                failed += "error" in found
                row |= {f"{prefix}{key}": value for key, value in found.items()}
            row |= compared(row)
            lines.tell(policy=name, batch=held.batch, cache=held.tokens, **row)
            print(name, held, row, flush=True)
    return 1 if failed else 0


@dataclass(frozen=True)
class Way:
    """A model, how its cache is made, and whether a token of theirs can be captured."""

    model: Any
    make: Callable[[], Any]
    captures: bool = True


def ways(model: Any, shifted: Any, cls: Any, tokens: int) -> dict[str, Way]:
    """By what stands before the names of their figures."""
    from kvdsl_lab.bench.shifting import ShiftedCache

    given = {"budget": tokens}
    return {
        "": Way(model, partial(cls, model, backend="triton", **given)),
        "shift_": Way(shifted, partial(ShiftedCache, shifted, cls.spec, given, fresh=False)),
        "published_": Way(
            shifted, partial(ShiftedCache, shifted, cls.spec, given, fresh=True), not cls.spec.reads_attention
        ),
    }


def prompted(way: Way, held: Held, device: str) -> Callable[[], torch.Tensor]:
    """A token more of all rows, behind one prompt that they share and that fills the cache: from its second call on, one leaves."""
    from kvdsl.runtime.hf.versions import with_cache

    cache = way.make()
    forward = partial(way.model, **with_cache(cache), use_cache=True, logits_to_keep=1)
    prompt = torch.randint(1, 128, (1, held.tokens), device=device)
    newest = forward(input_ids=prompt).logits[0, -1].topk(held.batch).indices[:, None]
    cache.batch_repeat_interleave(held.batch)

    def step() -> torch.Tensor:
        return newest.copy_(forward(input_ids=newest).logits[:, -1].argmax(-1, keepdim=True))

    return step


def _attempt(way: Way, held: Held, setting: Setting) -> dict[str, Any]:
    """Its times, as far as it came, and what went wrong."""
    found: dict[str, Any] = {}
    try:
        for name, ms in _times(way, held, setting):
            found[name] = round(ms, 4)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    gc.collect()
    if setting.real:
        torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _times(way: Way, held: Held, setting: Setting) -> Iterator[tuple[str, float]]:
    """Milliseconds of a token, eager and in a graph."""
    step = prompted(way, held, setting.device)
    step()
    yield "eager_ms", median_ms(setting, step, EAGER_REPEATS)
    if way.captures:
        yield "ms", median_ms(setting, in_a_graph(setting, step))


def compared(row: dict[str, Any]) -> dict[str, float]:
    """How many times as fast in place is, both in graphs or both eager."""
    return {
        f"{how}over_{other}": round(row[f"{other}_{how}ms"] / row[f"{how}ms"], 3)
        for other in ("shift", "published")
        for how in ("", "eager_")
        if row.get(f"{how}ms") and row.get(f"{other}_{how}ms")
    }
