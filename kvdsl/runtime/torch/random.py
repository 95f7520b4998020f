"""Random numbers of slots: the same wherever and in whatever order they are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def counter_random(seed: int, layer: int, head: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """A 24-bit random number in [0, 1) for every (layer, head, position, step): murmur3's finaliser over the words."""
    state = torch.full((), seed & _WORD, dtype=torch.int64, device=position.device)
    for word in (torch.full_like(state, layer), head.long(), position, step):
        state = _mix(state ^ (word * 0x9E3779B9 & _WORD))
    return (state >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _WORD
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)
