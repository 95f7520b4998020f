"""What the caller gives of tokens, in policies and traces that are compared."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdsl.ir.nodes import Given, Policy

GIVEN = (Given(name="gift"), Given(name="trust", default=0.1))
"""The second one's default is no float32."""

Array = NDArray[np.float64]


def drawn(policy: Policy, shape: tuple[int, int, int], random: np.random.Generator, *, wild: bool) -> Tensor | None:
    """Random values of new tokens, float32 [values, batch, kv_heads, tokens]; None where there are none, or now and then the defaults.

    Args:
        shape: [batch, kv_heads, tokens].
        wild: some are infinite or no numbers.
    """
    if not policy.given or (all(given.default is not None for given in policy.given) and random.random() < 0.3):
        return None
    values = random.standard_normal((len(policy.given), *shape)).astype(np.float32)
    if wild:
        places = random.random(values.shape)
        values[places < 0.1] = np.nan
        values[places > 0.95] = np.inf
    return torch.from_numpy(values)


def of_row(policy: Policy, supplied: Tensor | None, row: int, tokens: Tensor, shape: tuple[int, int]) -> dict[str, Array]:
    """What is given of a row's tokens, [kv_heads, tokens] by name: the defaults where nothing is."""
    if supplied is None:
        return {given.name: np.full(shape, given.default) for given in policy.given}
    return {
        given.name: values[row].cpu()[:, tokens].double().numpy()
        for given, values in zip(policy.given, supplied, strict=True)
    }
