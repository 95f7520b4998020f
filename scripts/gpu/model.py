"""The stage `model`: a model of Llama-3-8B's shape with random weights in bf16, transformers' static cache beside policies."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from scripts.gpu.setting import HAS_TRANSFORMERS, Lines, Setting, Whole, cache_class
from scripts.gpu.whole import model_of, tiny

LLAMA = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 65_536,
}  # fmt: skip
EVICTING = ("roco", "h2o", "tova", "streaming_llm")
SELECTING = ("sparcas",)
FEW = 16


def run(setting: Setting, lines: Lines) -> int:
    """Every run by itself: one that fails, for want of memory perhaps, is told, and the others go on. First tokens before all others, for
    which the model is compiled with every cache.
    """
    lines.tell(**setting.environment(), missing=setting.missing())
    if not HAS_TRANSFORMERS:
        print("transformers is not installed")
        return 0
    model = model_of(setting, torch.bfloat16, **LLAMA) if setting.real else tiny(setting)
    failed = 0
    for timed, whole in product((_first, _others), setting.sizes.whole):
        ids = torch.randint(1, 128, (whole.batch, whole.context), device=setting.device)
        for name, make in _caches(model, whole, setting):
            try:
                row = timed(model, ids, make, whole, setting)
            except Exception as error:
                row, failed = {"error": f"{type(error).__name__}: {error}"[:500]}, failed + 1
            lines.tell(cache=name, **asdict(whole), **row)
            print(name, whole, row, flush=True)
            gc.collect()
            if setting.real:
                torch.cuda.empty_cache()
    return 1 if failed else 0


def _caches(model: Any, whole: Whole, setting: Setting) -> list[tuple[str, Callable[[], Any]]]:
    """How each cache is made, transformers' own first."""
    from transformers import DynamicCache, StaticCache

    found: list[tuple[str, Callable[[], Any]]] = [
        ("static", lambda: StaticCache(config=model.config, max_cache_len=whole.context + whole.new_tokens)),
        ("dynamic", lambda: DynamicCache(config=model.config)),
    ]
    for name in (*EVICTING, *(SELECTING if whole.context >= 32_768 else ())):
        if name in setting.names:
            cls: Any = cache_class(name)
            given = {"budget": whole.budget} if "budget" in cls.spec.params else {"tokens": 512}
            found.append((name, lambda cls=cls, given=given: cls(model, backend="triton", **given)))  # type: ignore[misc]
    return found


def _first(model: Any, ids: torch.Tensor, make: Callable[[], Any], whole: Whole, setting: Setting) -> dict[str, Any]:
    """Seconds to the first token, the second time."""
    _generate(model, ids, make(), 1, setting)
    return {"ttft_s": round(_generate(model, ids, make(), 1, setting), 4)}


def _others(model: Any, ids: torch.Tensor, make: Callable[[], Any], whole: Whole, setting: Setting) -> dict[str, Any]:
    """Seconds to the first token, milliseconds a token behind the first few, with which a graph is captured for a new cache, and peak
    bytes. The first run of a kind, which compiles, is not timed.
    """
    few = min(whole.new_tokens - 1, FEW)
    _generate(model, ids, make(), few, setting)
    if setting.real:
        torch.cuda.reset_peak_memory_stats()
    first, begun, all_of_it = (_generate(model, ids, make(), count, setting) for count in (1, few, whole.new_tokens))
    token = (all_of_it - begun) / (whole.new_tokens - few)
    peak = torch.cuda.max_memory_allocated() if setting.real else None
    return {
        "ttft_s": round(first, 4), "token_ms": round(token * 1e3, 3), "tokens_per_s": round(whole.batch / max(token, 1e-9), 1),
        "peak_bytes": peak,
    }  # fmt: skip


def _generate(model: Any, ids: torch.Tensor, cache: Any, count: int, setting: Setting) -> float:
    from kvdsl.runtime.hf.versions import with_cache

    begun = time.perf_counter()
    model.generate(ids, **with_cache(cache), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    if setting.real:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
