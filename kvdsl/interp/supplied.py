"""What the caller gives of tokens, in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from kvdsl.interp.evaluate import Array, as_float32
from kvdsl.ir.nodes import Policy

Supplied = Mapping[str, Array]
"""The policy's `given` values by name: [L] of a head's new tokens, [H, L] of a layer's."""

NOTHING: Supplied = MappingProxyType({})


def of_head(supplied: Supplied, head: int, tokens: slice = slice(None)) -> dict[str, Array]:
    """What a layer's is for some tokens of a head."""
    return {name: np.asarray(values, dtype=np.float64)[head, tokens] for name, values in supplied.items()}


def filled(policy: Policy, supplied: Supplied, tokens: int) -> dict[str, Array]:
    """The values of so many tokens, [tokens] each, rounded to float32 as everywhere; where nothing is given, the default.

    Raises:
        ValueError: if there is none.
    """
    found = {}
    for given in policy.given:
        if given.name in supplied:
            found[given.name] = as_float32(np.asarray(supplied[given.name]))
        elif given.default is not None:
            found[given.name] = as_float32(np.full(tokens, given.default))
        else:
            raise ValueError(
                f"`{given.name}` of {policy.name} is given by the caller and has no default, and nothing was given"
            )
    return found
