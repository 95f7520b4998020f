"""StreamingLLM: a KV cache for transformers.

Made by kvdsl 0.1.0 from streaming_llm.kv (0d35b9aad75b). Do not edit: `kvdsl compile` rewrites it.
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
    """The numbers that the kernels read, float64 [batch] each."""
    sinks = given.number("sinks", 4, low=0)
    budget = given.tokens("budget", 512)
    capacity = given.count(budget, low=1)
    given.check_fits(given.largest(sinks), given.largest(1), capacity, "keep first sinks, keep last 1")
    return {"sinks": sinks, "capacity": capacity}


class StreamingLLMCache(KVCache):
    """Keeps the first tokens, which attention sinks into, and the most recent ones, at positions counted inside of the cache.

    A text may be longer than any that the model was trained on: the newest token always stands at position `live - 1`.

    paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2
    year: 2023, arXiv 2309.17453
    reach: exact
    checked: formula

    Usage: `model.generate(**inputs, cache=StreamingLLMCache(model))`.

    Args:
        model: a transformers model; its attention is prepared to serve this cache.
        sinks: default 4.
        budget: default 512; 0.25 is a ratio of the prompt, 1.0 all of it.
        ratio: the budget as a ratio of the prompt, in place of `budget`: 0.25 is a quarter of it, 1 all.
        storage: how slots lie in memory, `in_place`, `blocks` or `blocks:16`; None: as the .kv file says, else in place.
        rope: how compact positions are served, `fused` or `cached`; None: as the .kv file says, else `fused`.
        kv_dtype: what keys and values are rounded to and stored in, `int8`, `int4` or `fp8`; None: as the model has them.
        backend: `auto`, or `cpu` (C++), `triton` or `torch` by force.
        seed: of `random()`.
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
