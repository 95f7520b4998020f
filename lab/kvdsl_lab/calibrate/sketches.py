"""Random directions in which keys are measured: they need to know nothing of the text but the sizes of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl_lab.eval.recording import Recording


def seen(found: Recording, count: int) -> Tensor:
    """Of the size of one layer's, [kv_heads, dims, count]."""
    heads, dims = found.key.shape[1], found.key.shape[3]
    return torch.zeros(heads, dims, count)


def result(sizes: Tensor) -> Tensor:
    """The same."""
    return sizes


def drawn(sizes: Tensor) -> Tensor:
    """Normal numbers for all layers, [layers, kv_heads, dims, count]: always the same."""
    generator = torch.Generator().manual_seed(0)
    made: Tensor = torch.randn(sizes.shape, generator=generator) / sizes.shape[-1] ** 0.5
    return made
