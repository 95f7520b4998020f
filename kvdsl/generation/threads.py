"""How many threads torch and the kernels use."""

from __future__ import annotations

import torch

from kvdsl.busy import threads


def use_threads(asked: int | None) -> str | None:
    """Use as many as were asked for; where nobody asked, fewer than torch would on a busy machine. What to say of that, if anything."""
    count, told = (asked, None) if asked else threads(torch.get_num_threads())
    torch.set_num_threads(count)
    return told
