"""SparCas: a KV cache for transformers.

Made by kvdsl 0.1.0 from sparcas.kv (e74ebb0af390). Do not edit: `kvdsl compile` rewrites it.
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
    tokens = given.number("tokens", 2048, low=1)
    dims = given.number("dims", 16, low=1)
    select = given.inside(given.count(tokens, low=1), low=2)
    return {"select": select, "sketch_dims": given.count(dims, low=1), "sketch_every": given.count(64, low=1)}


class SparCasCache(KVCache):
    """Keeps every token and attends to few: those that score best over the dims in which the query is large.

    The first two layers stay dense (section 4.1). The newest token has to compete.

    paper: "SparCas: A Dimension-First Cascade for Efficient Long-Context LLM Inference", algorithm 1 and equations 3 and 4
    year: 2025
    reach: exact
    checked: formula
    code: none released

    Usage: `model.generate(**inputs, cache=SparCasCache(model))`.

    Args:
        model: a transformers model; its attention is prepared to serve this cache.
        tokens: default 2048.
        dims: default 16.
        storage: how slots lie in memory, `in_place`, `blocks` or `blocks:16`; None: as the .kv file says, else in place.
        rope: how compact positions are served, `fused` or `cached`; None: as the .kv file says, else `fused`.
        kv_dtype: what keys and values are rounded to and stored in, `int8`, `int4` or `fp8`; None: as the model has them.
        backend: `auto`, or `cpu` (C++), `triton` or `torch` by force.
        seed: of `random()`.
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
