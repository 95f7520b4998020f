"""Linear layers of a model in bfloat16, for processors that have no instructions for it.

There torch multiplies matrices of bfloat16 several times as slowly as those of float32. So the weights are widened once, and what is
multiplied each time: products and sums are then float32's, as in hardware for bfloat16, and what comes out is rounded as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Widened(nn.Module):
    """A linear layer of bfloat16 with its weights in float32."""

    def __init__(self, narrow: nn.Linear) -> None:
        super().__init__()
        self._weight = narrow.weight.detach().float()  # no parameter: the model's dtype is still what its parameters say
        self._bias = None if narrow.bias is None else narrow.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self._weight, self._bias).to(x.dtype)


def _multiplies_bfloat16() -> bool:
    """Whether torch's library for matrices, which some builds do without, has instructions for it here."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_in(model: Any) -> str:
    """What the linear layers of a model multiply in: float32 where they were `widened`, else its dtype."""
    wide = any(isinstance(module, _Widened) for module in model.modules())
    return "float32" if wide else str(model.dtype).removeprefix("torch.")


def widened(model: Any) -> Any:
    """A model whose linear layers multiply in float32, if it is in bfloat16 on a CPU that cannot; changed in place."""
    if model.dtype == torch.bfloat16 and model.device.type == "cpu" and not _multiplies_bfloat16():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, _Widened(child))
    return model
