"""Inputs from outside in the interpreter: tensors of files, and the caller's values per token."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kvdsl.interp.evaluate import Array, as_float32
from kvdsl.ir.nodes import Policy, Tensor
from kvdsl.tensorfile import AXES, Stored

Supplied = Mapping[str, Array]
"""The policy's `given` values by name: [L] for a head's new tokens, [H, L] for a layer's."""

NOTHING: Supplied = MappingProxyType({})


def of_head(supplied: Supplied, head: int, tokens: slice = slice(None)) -> dict[str, Array]:
    """Return a head's part of a layer's values, for some tokens."""
    return {name: np.asarray(values, dtype=np.float64)[head, tokens] for name, values in supplied.items()}


def filled(policy: Policy, supplied: Supplied, tokens: int) -> dict[str, Array]:
    """Return all given values of `tokens` tokens, [tokens] each, rounded to float32 like everywhere; missing ones have their default.

    Raises:
        ValueError: if a missing value has no default.
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


Tensors = Mapping[str, Array]
"""The whole contents of each tensor by name, with the axes of its statement."""

NO_TENSORS: Tensors = MappingProxyType({})


def values(stored: Stored) -> Array:
    """Return a file's numbers, rounded to float32 like everywhere."""
    if stored.dtype == "BF16":
        bits = np.frombuffer(stored.data, "<u2").astype("<u4") << 16
        numbers = bits.view("<f4")
    else:
        numbers = np.frombuffer(stored.data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[stored.dtype])
    return numbers.astype(np.float32).astype(np.float64).reshape(stored.shape)


def rows_of(policy: Policy, tensors: Tensors, layer: int, head: int) -> dict[str, Array]:
    """Return each tensor's part for a KV head, [1, dims or 1], or a matrix [dims, rank]; with query heads [group, dims(, rank)]."""
    return {tensor.name: _row(tensor, tensors[tensor.name], layer, head) for tensor in policy.tensors}


def _row(tensor: Tensor, whole: Array, layer: int, head: int) -> Array:
    at: dict[str, Any] = {"layers": layer, "heads": head}
    row: Array = whole[tuple(at.get(axis, slice(None)) for axis in tensor.axes)]
    if "group" in tensor.axes:
        left = [axis for axis in tensor.axes if axis not in at]
        return np.transpose(row, [left.index(axis) for axis in AXES if axis in left])
    if "rank" in tensor.axes:
        return row if tensor.axes.index("dims") < tensor.axes.index("rank") else row.T
    return row.reshape(1, -1)
