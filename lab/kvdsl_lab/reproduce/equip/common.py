"""What the experiments share: names, and layers of a known shape with random weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvdsl_lab.reproduce.experiment import Setup

NAMES = {
    "h2o": "H2O", "equip_h2o": "H2O", "streaming_llm": "StreamingLLM", "equip_streaming": "StreamingLLM",
    "transformers": "growing cache",
}  # fmt: skip


@lru_cache(1)
def layers(setup: Setup, shape: str) -> Any:
    """Decoder layers of that shape, as `kvdsl_lab.bench.shapes` reads it; in bfloat16, unless the user asks for another dtype."""
    from kvdsl_lab.bench.shapes import shaped_model

    return shaped_model(shape, setup.dtype or "bf16", setup.seed)


def prompt(setup: Setup, model: Any, length: int) -> Any:
    """Random tokens, int64 [1, length]."""
    import torch

    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(setup.seed))
