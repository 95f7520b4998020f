"""Tensors that outlive the forward that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_tensors() -> Iterator[None]:
    """What is allocated in this block belongs to no graph and to no inference mode: written in one mode, it can be updated in any other."""
    with torch.inference_mode(False), torch.no_grad():
        yield
