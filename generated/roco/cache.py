"""RoCo: a KV cache for transformers.

Made by kvdsl 0.1.0 from roco.kv (5994bd044d6d). Do not edit: `kvdsl compile` rewrites it.
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
    budget = given.tokens("budget", 512)
    capacity = given.count(budget, low=1)
    protect = given.number("protect", capacity / 2, low=0)
    given.check_fits(given.largest(), given.largest(1), capacity, "keep last 1")
    return {"protect": protect, "capacity": capacity}


class RoCoCache(KVCache):
    """Evicts the token with the lowest mean attention among those whose attention has settled; tokens whose attention varies most are kept.

    paper: "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference", section 4.3:
      mean attention score (MAS) and a scope by standard deviation
    year: 2024
    reach: exact
    checked: formula
    code: differs: squares underflow in float16, and scopes and budgets are others

    Usage: `model.generate(**inputs, cache=RoCoCache(model))`.

    Args:
        model: the transformers model that will use the cache.
        budget: default 512; 0.25 is a ratio of the prompt, 1.0 all of it.
        protect: default budget / 2.
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
        name="RoCo",
        stem="roco",
        params=("budget", "protect"),
        numbers=("protect", "capacity"),
        resolve=resolve,
        columns=("sum_attn", "sum_attn_squared"),
        column_rules=("sum", "squares"),
        bounded=True,
        group="mean",
        reads_attention=True,
        torch_kernels=kernels_torch,
        cpu_source=Path(__file__).with_name("kernels_cpu.cpp"),
        triton_source=Path(__file__).with_name("kernels_triton.py"),
        overprotects=True,
        abi=15,
    )

    def __init__(
        self,
        model: Any,
        *,
        budget: float | None = None,
        protect: float | None = None,
        ratio: float | None = None,
        storage: str | None = None,
        rope: str | None = None,
        kv_dtype: str | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"budget": 512 if budget is None and ratio is None else budget, "protect": protect, "ratio": ratio}, storage=storage, rope=rope, kv_dtype=kv_dtype, backend=backend, seed=seed)
