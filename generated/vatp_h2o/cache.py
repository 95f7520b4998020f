"""VATP_H2O: a KV cache for transformers.

Made by kvdsl 0.1.0 from vatp_h2o.kv (53b6ebffc25c). Do not edit: run `kvdsl compile vatp_h2o.kv`.
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
    sinks = given.number("sinks", 20)
    given.check_fits(given.largest(sinks), given.largest(recent), capacity, "keep last recent, keep first sinks")
    return {"recent": recent, "sinks": sinks, "capacity": capacity}


class VATP_H2OCache(KVCache):
    """H2O with the attention weighted by the norm of the value that it brings; the first tokens, whose values are small, stay.

    Guo et al., "Attention Score is Not All You Need for Token Importance Indicator in KV Cache Reduction: Value Also Matters",
    equations 2 and 4.

    Usage: `model.generate(**inputs, past_key_values=VATP_H2OCache(model))`.

    Args:
        model: a transformers model; its attention is prepared to serve this cache.
        budget: default 512; below 1 it is a rate of the prompt.
        recent: default budget / 2.
        sinks: default 20.
        backend: `auto`, or `cpu` (C++), `triton` or `torch` by force.
        seed: of `random()`.
    """

    spec = PolicySpec(
        name="VATP_H2O",
        stem="vatp_h2o",
        params=("budget", "recent", "sinks"),
        numbers=("recent", "sinks", "capacity"),
        resolve=resolve,
        columns=("norm1_v", "sum_attn"),
        column_rules=("token", "sum"),
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
        sinks: float = 20,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"budget": budget, "recent": recent, "sinks": sinks}, backend=backend, seed=seed)
