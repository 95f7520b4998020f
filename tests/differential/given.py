"""What the caller gives of tokens, in policies and traces that are compared."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdsl.ir.nodes import Expr, Given, GivenRef, Number, Policy, call

GIVEN = (
    Given(name="gift"),
    Given(name="trust", default=0.1),
    Given(name="tool", default=0, source="spans"),
    Given(name="turn", default=0, source="turn"),
    Given(name="token", default=0, source="token"),
)
"""The second one's default is no float32."""


def read(given: Given) -> Expr:
    """How an expression reads it."""
    ref = GivenRef(name=given.name, marked=given.source == "spans")
    return call("!=", ref, Number(value=0)) if ref.marked else ref


Array = NDArray[np.float64]


def drawn(
    policy: Policy, shape: tuple[int, int, int], random: np.random.Generator, *, wild: bool, turns: int = 0
) -> Tensor | None:
    """Random values of new tokens, float32 [values, batch, kv_heads, tokens]; None where there are none, or now and then the defaults.

    Args:
        shape: [batch, kv_heads, tokens].
        wild: some are infinite or no numbers.
        turns: how many turns have ended.
    """
    hears = any(given.source == given.name for given in policy.given)
    defaults = not hears and all(given.default is not None for given in policy.given)
    if not policy.given or (defaults and random.random() < 0.3):
        return None
    values = random.standard_normal((len(policy.given), *shape)).astype(np.float32)
    if wild:
        places = random.random(values.shape)
        values[places < 0.1] = np.nan
        values[places > 0.95] = np.inf
    for row, given in zip(values, policy.given, strict=True):
        if given.source == "spans":
            row[:] = random.random((shape[0], 1, shape[2])) < 0.4
        elif given.source == "turn":
            row[:] = turns
        elif given.source == "token":
            row[:] = random.integers(0, 4, (shape[0], 1, shape[2]))
    return torch.from_numpy(values)


def of_row(policy: Policy, supplied: Tensor | None, row: int, tokens: Tensor, shape: tuple[int, int]) -> dict[str, Array]:
    """What is given of a row's tokens, [kv_heads, tokens] by name: the defaults where nothing is."""
    if supplied is None:
        return {given.name: np.full(shape, given.default) for given in policy.given}
    return {
        given.name: values[row].cpu()[:, tokens].double().numpy()
        for given, values in zip(policy.given, supplied, strict=True)
    }
