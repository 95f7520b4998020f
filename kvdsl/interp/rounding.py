"""What a cache with fewer bits a number keeps of keys and values: the option `kv_dtype`.

A vector is stored as small numbers, its codes, and scales, and from then on it is what codes times scales give. Arithmetic is float32
in a fixed order, so that every backend finds the same codes and scales to the bit. A scale is a bfloat16 number, so that a code times
a scale is exact in float32; its size is rounded up.

`int8`: codes are integers from -127 to 127, and a vector has one scale.
`fp8`: codes are float8 numbers (e4m3, at most 448), and a vector has one scale.
`int4`: codes are integers from -8 to 7, and 32 dims that lie together have a scale, with the sign that makes -8 of the largest of
    them. Before that a vector is turned by a Hadamard matrix, which spreads what a few large dims hold over all of them, and
    afterwards it is turned back. Where the number of dims is no power of two, blocks of the largest power of two that divides it are
    turned.

Where a number that shares a scale is not finite, all that share it become NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvdsl.interp.evaluate import Array
from kvdsl.memory import GROUP

Single = NDArray[np.float32]

_SMALLEST = np.float32(2.0**-126)
"""No scale is below it: all that is computed with one stays a normal number."""


def rounded(x: Array, kv_dtype: str) -> Array:
    """Vectors, [..., D], as a cache keeps them; at `model` as they are."""
    if kv_dtype == "model":
        return x
    with np.errstate(all="ignore"):
        exact = x.astype(np.float32)
        if kv_dtype == "int4":
            parts = [_nibbles(_turned(exact)[..., at : at + GROUP]) for at in range(0, x.shape[-1], GROUP)]
            found = _turned(np.concatenate(parts, axis=-1)) * np.float32(1 / _block(x.shape[-1]))
        else:
            found = _bytes(exact, np.rint, 127.0) if kv_dtype == "int8" else _bytes(exact, _float8, 448.0)
        return cast("Array", found.astype(np.float64))


def _bytes(x: Single, code: Callable[[Single], Single], largest: float) -> Single:
    """Vectors, [..., D], with a scale each."""
    top = np.abs(x).max(axis=-1, keepdims=True)
    scale = _scale(top / np.float32(largest))
    return cast("Single", np.where(np.isfinite(top), code(x / scale) * scale, np.float32(np.nan)))


def _nibbles(x: Single) -> Single:
    """Groups of vectors that are turned, [..., at most 32], with a scale each."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    size = np.maximum(-low, high)
    scale = np.where(-low >= high, np.float32(1), np.float32(-1)) * _scale(size / np.float32(8))
    return cast("Single", np.where(np.isfinite(size), np.clip(np.rint(x / scale), -8, 7) * scale, np.float32(np.nan)))


def _scale(x: Single) -> Single:
    """Float32 numbers that are not negative, rounded up to bfloat16."""
    bits = (x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return cast("Single", np.maximum(bits.view(np.float32), _SMALLEST))


def _float8(x: Single) -> Single:
    """The nearest e4m3 numbers: 4 bits of precision, down to steps of 2^-9."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 4, -9))
    return cast("Single", np.rint(x / step) * step)


def _block(dims: int) -> int:
    """The largest power of two that divides the number of dims."""
    return dims & -dims


def _turned(x: Single) -> Single:
    """Blocks of vectors times a Hadamard matrix of ones and minus ones, in float32 by butterflies; twice is the block's size as often."""
    shape, size = x.shape, _block(x.shape[-1])
    apart = 1
    while apart < size:
        pairs = x.reshape(*shape[:-1], -1, 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2)
        apart *= 2
    return x.reshape(shape)
