"""H2O: a KV cache for transformers.

Made by kvdsl 0.1.0 from h2o.kv (0ae6c0ce7df6). Do not edit: run `kvdsl compile h2o.kv`.
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
    budget = given.tokens("budget", 512)
    capacity = given.count(budget)
    recent = given.number("recent", capacity / 2)
    given.check_fits(given.largest(), given.largest(recent), capacity, "keep last recent")
    return {"recent": recent, "capacity": capacity}


class H2OCache(KVCache):
    """Keeps the heavy hitters, to which the most attention was paid in all, and the most recent tokens.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023; equation 2 of
    "Attention Score is Not All You Need for Token Importance Indicator in KV Cache Reduction".

    Usage: `model.generate(**inputs, past_key_values=H2OCache(model))`.

    Args:
        model: a transformers model; its attention is prepared to serve this cache.
        budget: default 512; below 1 it is a rate of the prompt.
        recent: default budget / 2.
        backend: `auto`, or `cpu` (C++), `triton` or `torch` by force.
        seed: of `random()`.
    """

    spec = PolicySpec(
        name="H2O",
        stem="h2o",
        params=("budget", "recent"),
        numbers=("recent", "capacity"),
        resolve=resolve,
        columns=("sum_attn",),
        column_rules=("sum",),
        bounded=True,
        group="mean",
        reads_attention=True,
        torch_kernels=kernels_torch,
        cpu_source=Path(__file__).with_name("kernels_cpu.cpp"),
        triton_source=Path(__file__).with_name("kernels_triton.py"),
        abi=4,
    )

    def __init__(
        self,
        model: Any,
        *,
        budget: float = 512,
        recent: float | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"budget": budget, "recent": recent}, backend=backend, seed=seed)
