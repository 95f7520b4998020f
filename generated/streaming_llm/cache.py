"""StreamingLLM: a KV cache for transformers.

Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kvdsl.runtime.given import Given
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.spec import PolicySpec

from . import kernels_torch


def resolve(given: Given) -> dict[str, Tensor]:
    """Compute the numbers that kernels read, float64 [batch] each."""
    sinks = given.number("sinks", 4, low=0)
    budget = given.tokens("budget", 512)
    capacity = given.count(budget, low=1)
    given.check_fits(given.largest(sinks), given.largest(1), capacity, "keep first sinks, keep last 1")
    return {"sinks": sinks, "capacity": capacity}


class StreamingLLMCache(KVCache):
    """Keeps the first tokens, which are attention sinks, and the most recent ones, at positions counted inside the cache.

    A text can be longer than the model was trained on: the newest token is always at position `live - 1`.

    paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2
    year: 2023, arXiv 2309.17453
    reach: exact
    checked: formula

    Usage: `model.generate(**inputs, cache=StreamingLLMCache(model))`.

    Args:
        model: the transformers model that will use the cache.
        sinks: default 4.
        budget: default 512; 0.25 is a ratio of the prompt, 1.0 all of it.
        ratio: the budget as a ratio of the prompt (0.25, 1), in place of `budget`.
        storage: memory layout of slots, `in_place`, `blocks` or `blocks:16`. Default: as in the .kv file, else `in_place`.
        rope: under compact positions, rotate keys when they are read (`fused`), or cache rotated halves (`cached`). Default: as in the .kv
            file, else `fused`.
        kv_dtype: storage dtype of keys and values, `int8`, `int4` or `fp8`, or two for keys and values: `int8/int4`. Default:
            the model's dtype.
        backend: `auto`, `cpu` (C++), `triton` or `torch`.
        seed: for `random()`.
    """

    spec = PolicySpec(
        name="StreamingLLM",
        stem="streaming_llm",
        params=("sinks", "budget"),
        numbers=("sinks", "capacity"),
        resolve=resolve,
        columns=(),
        column_rules=(),
        bounded=True,
        group="mean",
        reads_attention=False,
        torch_kernels=kernels_torch,
        cpu_source=Path(__file__).with_name("kernels_cpu.cpp"),
        triton_source=Path(__file__).with_name("kernels_triton.py"),
        compact=True,
        abi=15,
    )

    def __init__(
        self,
        model: Any,
        *,
        sinks: float = 4,
        budget: float | None = None,
        ratio: float | None = None,
        storage: str | None = None,
        rope: str | None = None,
        kv_dtype: str | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"sinks": sinks, "budget": 512 if budget is None and ratio is None else budget, "ratio": ratio}, storage=storage, rope=rope, kv_dtype=kv_dtype, backend=backend, seed=seed)
