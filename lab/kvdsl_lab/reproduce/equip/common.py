"""What the experiments share: names, and layers of a known shape with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvdsl_lab.reproduce.experiment import Row, Setup

VARIANTS = Path(__file__).parents[1] / "variants"

NAMES = {
    "h2o": "H2O", "equip_h2o": "H2O", "streaming_llm": "StreamingLLM", "equip_streaming": "StreamingLLM",
    "transformers": "growing cache",
}  # fmt: skip


def memory(policy: str) -> dict[str, str]:
    """How a policy's cache lies in memory in the paper: EQUIP's own keep every key's rotated half."""
    return {"rope": "cached"} if policy.startswith("equip_") else {}


def named(rows: Sequence[Row]) -> list[Row]:
    """Rows with the names that the paper has for policies."""
    return [{**row, "policy": NAMES[row["policy"]]} for row in rows]


ROTATED, NO_POSITIONS, BIASED = "rotated", "no positions", "a bias by distance"
"""How a model tells where a token stands."""


@lru_cache(1)
def layers(setup: Setup, shape: str, kind: str = ROTATED) -> Any:
    """Decoder layers of that shape, as `kvdsl_lab.bench.shapes` reads it; in bfloat16, unless the user asks for another dtype."""
    from kvdsl_lab.bench.shapes import shaped_model

    dtype = setup.dtype or "bf16"
    return shaped_model(shape, dtype, setup.seed) if kind == ROTATED else unrotated(setup, shape, dtype, kind)


def unrotated(setup: Setup, shape: str, dtype: str, kind: str) -> Any:
    """A Llama of that shape that turns no keys."""
    from kvdsl_lab.bench.shapes import shaped_model
    from kvdsl_lab.bench.unrotated import without_rotation

    return without_rotation(shaped_model(shape, dtype, setup.seed), biased=kind == BIASED)


def prompt(setup: Setup, model: Any, length: int) -> Any:
    """Random tokens, int64 [1, length]."""
    import torch

    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(setup.seed))
