"""EQUIPBlocks: a KV cache for transformers.

Made by kvdsl 0.1.0 from equip_blocks.kv (3b7000443c68). Do not edit: `kvdsl compile` rewrites it.
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
    recent = given.number("recent", capacity / 2, low=0)
    block_ = given.number("block", 16, low=1)
    given.check_fits(given.largest(), given.largest(recent), capacity, "keep last recent")
    return {"recent": recent, "capacity": capacity, "block": given.count(block_, low=1)}


class EQUIPBlocksCache(KVCache):
    """EQUIP_H2O as its paper has it in memory. Edition 1 states it: the two last lines are the defaults of the options of its caches.

    "EQUIP: EQUivariant preserving In-Place updates for Efficient Token Pruning", section 4.3 and figure 18: rotated halves
    are kept, and a new token is written at block and offset.

    Usage: `model.generate(**inputs, cache=EQUIPBlocksCache(model))`.

    Args:
        model: the transformers model that will use the cache.
        budget: default 512; 0.25 is a ratio of the prompt, 1.0 all of it.
        recent: default budget / 2.
        block: default 16.
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
        name="EQUIPBlocks",
        stem="equip_blocks",
        params=("budget", "recent", "block"),
        numbers=("recent", "capacity", "block"),
        resolve=resolve,
        columns=("sum_attn",),
        column_rules=("sum",),
        bounded=True,
        group="mean",
        reads_attention=True,
        torch_kernels=kernels_torch,
        cpu_source=Path(__file__).with_name("kernels_cpu.cpp"),
        triton_source=Path(__file__).with_name("kernels_triton.py"),
        compact=True,
        rope_cached=True,
        abi=15,
    )

    def __init__(
        self,
        model: Any,
        *,
        budget: float | None = None,
        recent: float | None = None,
        block: float = 16,
        ratio: float | None = None,
        storage: str | None = None,
        rope: str | None = None,
        kv_dtype: str | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {"budget": 512 if budget is None and ratio is None else budget, "recent": recent, "block": block, "ratio": ratio}, storage=storage, rope=rope, kv_dtype=kv_dtype, backend=backend, seed=seed)
