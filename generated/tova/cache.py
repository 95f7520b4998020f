"""TOVA: a KV cache for transformers.

Made by kvdsl 0.1.0 from tova.kv (c7607d628662). Do not edit: run `kvdsl compile tova.kv`.
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
    return {"capacity": capacity}


class TOVACache(KVCache):
    """Evicts what the newest token attends to least, the newest token itself not excepted.

    Oren et al., "Transformers are Multi-State RNNs", 2024; "On the Efficacy of Eviction Policy for Key-Value Constrained Generative
    Language Model Inference", section 4.1 (LTAS).

    Usage: `model.generate(**inputs, past_key_values=TOVACache(model))`.

    Args:
        model: a transformers model; its attention is prepared to serve this cache.
        budget: default 512; below 1 it is a rate of the prompt.
        backend: `auto`, or `cpu` (C++), `triton` or `torch` by force.
        seed: of `random()`.
    """

    spec = PolicySpec(
        name="TOVA",
        stem="tova",
        params=("budget",),
        numbers=("capacity",),
        resolve=resolve,
        columns=("last_attn",),
        column_rules=("last",),
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
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"budget": budget}, backend=backend, seed=seed)
