"""Quantized keys and values (option `kv_dtype`). `kvdsl.interp.rounding` defines the numbers.

A vector becomes a row of bytes: codes, then scales of two bytes each. Layouts move these rows like vectors.

    int8, fp8: [D] codes, one scale.
    int4: for each group of 32 dims, 16 bytes of two codes each: dim i in the lower four bits, dim i + 16 in the upper. A last group of
    fewer dims has half as many bytes as dims. Four bits store a code plus 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.memory import GROUP, dtypes_of
from kvdsl.runtime.state.tensors import PACKED

_SMALLEST = 2.0**-126


class Format:
    """How a cache stores keys and values: as the model gives them, or as rows of bytes.

    Attributes:
        key, value: the storage types of keys and of values, see `kvdsl.memory.KV_DTYPES`.
        packed: whether they are rows of bytes. Computations with them are then in float32.
    """

    def __init__(self, kv_dtype: str) -> None:
        self.key, self.value = dtypes_of(kv_dtype)
        self.packed = kv_dtype != "model"

    def rows(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Convert keys and values, [..., dim], to the storage format."""
        return (pack(key, self.key), pack(value, self.value)) if self.packed else (key, value)

    def rows_by_name(self, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Return both in the storage format, under the names in `PACKED`; empty if they are not packed."""
        return dict(zip(PACKED, self.rows(key, value), strict=True)) if self.packed else {}

    def keys(self, rows: Tensor) -> Tensor:
        """Convert stored rows to keys, [..., dim]."""
        return unpack(rows, self.key) if self.packed else rows

    def values(self, rows: Tensor) -> Tensor:
        """Convert stored rows to values, [..., dim]."""
        return unpack(rows, self.value) if self.packed else rows

    def dims(self, key: int, value: int) -> tuple[int, int]:
        """Return the dims of a key and of a value from the lengths of their rows."""
        return (dims_of(key, self.key), dims_of(value, self.value)) if self.packed else (key, value)


def pack(x: Tensor, kv_dtype: str) -> Tensor:
    """Quantize vectors, [..., D], to rows of bytes, uint8 [..., bytes].

    Raises:
        KvdslError: for `int4` and an odd number of dims.
    """
    exact = x.float()
    if kv_dtype == "int4" and x.shape[-1] % 2:
        raise KvdslError(
            f"`kv_dtype` is `int4`, which packs dims in pairs, and the model's vectors have {x.shape[-1]}; give `int8`"
        )
    if kv_dtype == "int4":
        return _pack_nibbles(turned(exact))
    scale, ratio = _scaled(exact, exact.abs().amax(-1, keepdim=True), 127.0 if kv_dtype == "int8" else 448.0)
    codes = ratio.round().to(torch.int8) if kv_dtype == "int8" else ratio.to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8), _bytes_of(scale)], -1)


def unpack(rows: Tensor, kv_dtype: str) -> Tensor:
    """Dequantize rows of bytes to vectors, float32 [..., D]."""
    if kv_dtype == "int4":
        found = _unpack_nibbles(rows)
        return turned(found) * (1 / _block(found.shape[-1]))
    codes, scale = rows[..., :-2], _scale_of(rows[..., -2:])
    return codes.view(torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn).float() * scale


def dims_of(row_bytes: int, kv_dtype: str) -> int:
    """Return the number of dims of a vector whose row has `row_bytes` bytes."""
    if kv_dtype != "int4":
        return row_bytes - 2
    groups = -(-row_bytes // (GROUP // 2 + 2))
    return 2 * (row_bytes - 2 * groups)


def turned(x: Tensor) -> Tensor:
    """Multiply blocks of float32 vectors, [..., D], by a Hadamard matrix, in butterflies."""
    size, apart = _block(x.shape[-1]), 1
    shape = x.shape
    while apart < size:
        first, second = x.reshape(*shape[:-1], -1, 2, apart).unbind(-2)
        x = torch.stack([first + second, first - second], -2)
        apart *= 2
    return x.reshape(shape)


def _block(dims: int) -> int:
    """Return the largest power of two that divides `dims`."""
    return dims & -dims


def _scaled(x: Tensor, size: Tensor, largest: float, sign: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scales, [..., 1], and x, [..., n], divided by them; NaN and 0 if a number is not finite.

    Args:
        size: the largest magnitude, [..., 1], which is coded as `largest`.
    """
    bits = ((size / largest).view(torch.int32) + 0xFFFF) & -0x10000
    scale = bits.view(torch.float32).clamp(min=_SMALLEST) * sign
    finite = size.isfinite()
    return torch.where(finite, scale, torch.nan), torch.where(finite, x / scale, 0.0)


def _bytes_of(scale: Tensor) -> Tensor:
    """Return scales, float32 [..., 1], as bytes, uint8 [..., 2]: the upper half of each. `Tensor.bfloat16` has several NaNs."""
    return scale.view(torch.uint8)[..., 2:]


def _scale_of(pairs: Tensor) -> Tensor:
    """Undo `_bytes_of`. The bytes are the upper half of a float32; their address may be unaligned, so they cannot be viewed as a number."""
    low, high = pairs.int().unbind(-1)
    return (low << 16 | high << 24).view(torch.float32).unsqueeze(-1)


def _pack_nibbles(x: Tensor) -> Tensor:
    dims, codes, scales = x.shape[-1], [], []
    for at in range(0, dims, GROUP):
        group = x[..., at : at + GROUP]
        low, high = group.aminmax(dim=-1, keepdim=True)
        sign = torch.where(-low >= high, 1.0, -1.0)
        scale, ratio = _scaled(group, torch.maximum(-low, high), 8.0, sign)
        code = (ratio.round().clamp(-8, 7) + 8).to(torch.uint8)
        half = code.shape[-1] // 2
        codes.append(code[..., :half] | code[..., half:] << 4)
        scales.append(_bytes_of(scale))
    return torch.cat([*codes, *scales], -1)


def _unpack_nibbles(rows: Tensor) -> Tensor:
    dims = dims_of(rows.shape[-1], "int4")
    parts = []
    for at in range(0, dims, GROUP):
        half = min(GROUP, dims - at) // 2
        codes = rows[..., at // 2 : at // 2 + half]
        scale = _scale_of(rows[..., dims // 2 + at // GROUP * 2 :][..., :2])
        parts.append((torch.cat([codes & 15, codes >> 4], -1).float() - 8) * scale)
    return torch.cat(parts, -1)
