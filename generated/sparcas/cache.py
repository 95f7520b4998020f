"""SparCas: a KV cache for transformers.

Made by kvdsl 0.1.0 from sparcas.kv (7aefa5e84f82). Do not edit: `kvdsl compile` rewrites it.
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
    tokens = given.number("tokens", 2048, low=1)
    dims = given.number("dims", 16, low=1)
    select = given.inside(given.count(tokens, low=1), low=2)
    return {"select": select, "sketch_dims": given.count(dims, low=1), "sketch_every": given.count(64, low=1)}


class SparCasCache(KVCache):
    """Keeps every token and attends to few: those with the best scores over the dims in which the query is large.

    The first two layers attend to everything (section 4.1). The newest token has to compete.

    paper: "SparCas: A Dimension-First Cascade for Efficient Long-Context LLM Inference", algorithm 1 and equations 3 and 4
    year: 2025
    reach: exact
    checked: formula
    code: none released

    Usage: `model.generate(**inputs, cache=SparCasCache(model))`.

    Args:
        model: the transformers model that will use the cache.
        tokens: default 2048.
        dims: default 16.
        storage: memory layout of slots, `in_place`, `blocks` or `blocks:16`. Default: as in the .kv file, else `in_place`.
        rope: under compact positions, rotate keys when they are read (`fused`), or cache rotated halves (`cached`). Default: as in the .kv
            file, else `fused`.
        kv_dtype: storage dtype of keys and values, `int8`, `int4` or `fp8`, or two for keys and values: `int8/int4`. Default:
            the model's dtype.
        backend: `auto`, `cpu` (C++), `triton` or `torch`.
        seed: for `random()`.
    """

    spec = PolicySpec(
        name="SparCas",
        stem="sparcas",
        params=("tokens", "dims"),
        numbers=("select", "sketch_dims", "sketch_every"),
        resolve=resolve,
        columns=(),
        column_rules=(),
        bounded=False,
        group="mean",
        reads_attention=False,
        torch_kernels=kernels_torch,
        cpu_source=Path(__file__).with_name("kernels_cpu.cpp"),
        triton_source=Path(__file__).with_name("kernels_triton.py"),
        selects=True,
        sketches=True,
        abi=15,
    )

    def __init__(
        self,
        model: Any,
        *,
        tokens: float = 2048,
        dims: float = 16,
        storage: str | None = None,
        rope: str | None = None,
        kv_dtype: str | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"tokens": tokens, "dims": dims}, storage=storage, rope=rope, kv_dtype=kv_dtype, backend=backend, seed=seed)
