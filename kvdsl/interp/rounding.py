"""Rounding of keys and values in a cache with fewer bits: the option `kv_dtype`.

A vector is stored as small numbers, its codes, with scales, and reads back as codes times scales. Arithmetic is float32 in a fixed
order, so every backend computes the same codes and scales to the bit. A scale is a bfloat16 number, rounded up, so that a code times
a scale is exact in float32.

`int8`: codes are integers from -127 to 127, and a vector has one scale.
`fp8`: codes are float8 numbers (e4m3, at most 448), and a vector has one scale.
`int4`: codes are integers from -8 to 7, and every 32 adjacent dims have a scale, with the sign that gives the largest of them code
  -8. A Hadamard matrix rotates the vector before that, which spreads large dims over all of them, and back afterwards. If the
  number of dims is not a power of two, it rotates blocks of the largest power of two that divides it.

If a number that shares a scale is not finite, all that share it become NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvdsl.interp.evaluate import Array
from kvdsl.memory import GROUP, dtypes_of

Single = NDArray[np.float32]

_SMALLEST = np.float32(2.0**-126)
"""The smallest scale: results with it stay normal numbers."""


def placed(key: Array, value: Array, kv_dtype: str) -> tuple[Array, Array]:
    """Return keys and values, [..., D] and [..., E], as a cache of this `kv_dtype` stores them: `int8/int4` rounds each its own way."""
    key_dtype, value_dtype = dtypes_of(kv_dtype)
    return rounded(key, key_dtype), rounded(value, value_dtype)


def rounded(x: Array, kv_dtype: str) -> Array:
    """Return vectors, [..., D], rounded to one of `KV_DTYPES`; at `model` unchanged."""
    if kv_dtype == "model":
        return x
    with np.errstate(all="ignore"):
        exact = x.astype(np.float32)
        if kv_dtype == "int4":
            parts = [_nibbles(_rotated(exact)[..., at : at + GROUP]) for at in range(0, x.shape[-1], GROUP)]
            found = _rotated(np.concatenate(parts, axis=-1)) * np.float32(1 / _block(x.shape[-1]))
        else:
            found = _bytes(exact, np.rint, 127.0) if kv_dtype == "int8" else _bytes(exact, _float8, 448.0)
        return cast("Array", found.astype(np.float64))


def _bytes(x: Single, code: Callable[[Single], Single], largest: float) -> Single:
    """Round vectors, [..., D], with one scale each."""
    top = np.abs(x).max(axis=-1, keepdims=True)
    scale = _scale(top / np.float32(largest))
    return cast("Single", np.where(np.isfinite(top), code(x / scale) * scale, np.float32(np.nan)))


def _nibbles(x: Single) -> Single:
    """Round groups of rotated vectors, [..., at most 32], with one scale each."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    size = np.maximum(-low, high)
    scale = np.where(-low >= high, np.float32(1), np.float32(-1)) * _scale(size / np.float32(8))
    return cast("Single", np.where(np.isfinite(size), np.clip(np.rint(x / scale), -8, 7) * scale, np.float32(np.nan)))


def _scale(x: Single) -> Single:
    """Round nonnegative float32 numbers up to bfloat16."""
    bits = (x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return cast("Single", np.maximum(bits.view(np.float32), _SMALLEST))


def _float8(x: Single) -> Single:
    """Round to e4m3: 4 bits of precision, down to steps of 2^-9."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 4, -9))
    return cast("Single", np.rint(x / step) * step)


def _block(dims: int) -> int:
    """Return the largest power of two that divides the number of dims."""
    return dims & -dims


def _rotated(x: Single) -> Single:
    """Multiply blocks of vectors by a Hadamard matrix of ones and minus ones, in float32 by butterflies.

    Applied twice it multiplies by the size of a block.
    """
    shape, size = x.shape, _block(x.shape[-1])
    apart = 1
    while apart < size:
        pairs = x.reshape(*shape[:-1], -1, 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2)
        apart *= 2
    return x.reshape(shape)
