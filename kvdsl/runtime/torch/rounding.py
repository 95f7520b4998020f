"""Arithmetic that is rounded correctly, as IEEE 754 and every other backend have it, where torch's own is not."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def sqrt(x: Tensor) -> Tensor:
    """The root of float32 or float64 numbers, rounded correctly.

    On CPUs torch takes that of a vector library, which may be off by one unit in the last place: two tokens that tie elsewhere would
    not tie here. A float32's root is never so near to the middle between two that a double's error would count.
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    if x.device.type != "cpu":
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):  # below zero there is none, which is nothing to warn of
        return torch.from_numpy(numpy.sqrt(x.detach().numpy()))
