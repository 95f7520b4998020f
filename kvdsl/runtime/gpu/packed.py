"""Device functions that load and store keys and values as the cache's `kv_dtype` says.

`kvdsl.interp.rounding` defines the rounding; `kvdsl.runtime.state.packed` defines a row's bytes: codes, then scales of two bytes each.

Legend:
    KV: the storage type of the vectors, keys or values. `model`: a row is a vector in the model's dtype.
    D, D_PAD: dims of a vector, and D rounded up to a power of two. n: vectors.
    S: scales of D_PAD dims.
    mixed: multiplied by the Hadamard matrix, as codes of `int4` are. plain: not multiplied. In every other `kv_dtype` both are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.memory import GROUP as _GROUP

GROUP = tl.constexpr(_GROUP)
SMALLEST = tl.constexpr(2.0**-126)
LARGEST = tl.constexpr(3.4028234663852886e38)
HALVES = tl.constexpr(1.5 * 2**23)
"""Float32 numbers near it are integers: adding and then subtracting it rounds to the nearest integer, ties to even."""


@triton.jit
def row(D: tl.constexpr, KV: tl.constexpr):
    """Return the elements of a row: numbers in the model's dtype, or bytes."""
    if KV == "model":
        size = D
    elif KV == "int4":
        size = D // 2 + 2 * ((D + GROUP - 1) // GROUP)
    else:
        size = D + 2
    return size


@triton.jit
def load(of, at, held, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Load rows `at`, [n]: mixed vectors [n, D_PAD], in the model's dtype or float32; zeros where `held` is false."""
    d = tl.arange(0, D_PAD)[None, :]
    there = held[:, None] & (d < D)
    start = of + at[:, None] * row(D, KV)
    if KV == "model":
        x = tl.load(start + d, mask=there, other=0.0)
    else:
        byte, shift = _byte(d, D, KV)
        code = tl.load(start + byte, mask=there, other=0).to(tl.int32) >> shift
        S: tl.constexpr = D_PAD // GROUP if KV == "int4" and D_PAD > GROUP else 1
        s = tl.arange(0, S)[None, :]
        pair, scaled = _scale_of(start, s, D, KV), held[:, None] & (s < _scales(D, KV))
        low = tl.load(pair, mask=scaled, other=0).to(tl.int32)
        high = tl.load(pair + 1, mask=scaled, other=0).to(tl.int32)
        x = _decoded(_number(code, KV), ((high << 24) | (low << 16)).to(tl.float32, bitcast=True))
        x = tl.where(there, x, 0.0)
    return x


@triton.jit
def over(of, at, held, dims, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Load dims `dims`, [W], of rows `at`: plain, [n, W]; zeros where `held` is false or a dim is negative."""
    there = held[:, None] & (dims >= 0)[None, :]
    if KV == "model":
        x = tl.load(of + at[:, None] * D + dims[None, :], mask=there, other=0.0)
    else:
        x = plain(load(of, at, held, D, D_PAD, KV), D, D_PAD, KV)
        x = tl.gather(x, tl.broadcast_to(tl.maximum(dims, 0)[None, :], [at.shape[0], dims.shape[0]]), 1)
        x = tl.where(there, x, 0.0)
    return x


@triton.jit
def over_new(new, dims, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Load dims, [W], of a new vector in the model's dtype, as `over` returns them after `place`."""
    if KV == "model":
        x = tl.load(new + dims, mask=dims >= 0, other=0.0)
    else:
        d = tl.arange(0, D_PAD)
        x = plain_vector(rounded(tl.load(new + d, mask=d < D, other=0.0), D, D_PAD, KV), D, D_PAD, KV)
        x = tl.where(dims >= 0, tl.gather(x, tl.maximum(dims, 0), 0), 0.0)
    return x


@triton.jit
def place(to, at, x, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Store a plain vector, [D_PAD], in row `at`. Return the rounded vector, plain."""
    d = tl.arange(0, D_PAD)
    if KV == "model":
        tl.store(to + at * D + d, x, mask=d < D)
    else:
        code, scale = _encoded(x[None, :].to(tl.float32), D, D_PAD, KV)
        start = to + at * row(D, KV)
        if KV == "int4":
            b = tl.arange(0, D_PAD // 2 if D_PAD > 2 else 1)[None, :]
            half = tl.minimum(GROUP, D - b * 2 // GROUP * GROUP) // 2
            low = b * 2 // GROUP * GROUP + b % (GROUP // 2)
            nibble = (code + 8).to(tl.int32)
            both = tl.gather(nibble, low, 1) | (tl.gather(nibble, tl.minimum(low + half, D_PAD - 1), 1) << 4)
            tl.store(start + b, both.to(tl.uint8), mask=b < D // 2)
        elif KV == "int8":
            tl.store(start + d[None, :], code.to(tl.int32).to(tl.uint8), mask=d[None, :] < D)
        else:
            tl.store(start + d[None, :], _float8(code).to(tl.uint8), mask=d[None, :] < D)
        s = tl.arange(0, scale.shape[1])[None, :]
        pair, there = _scale_of(start, s, D, KV), s < _scales(D, KV)
        bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True) >> 16, 0x7FC0)
        tl.store(pair, bits.to(tl.uint8), mask=there)
        tl.store(pair + 1, (bits >> 8).to(tl.uint8), mask=there)
        x = plain_vector(tl.reshape(_decoded(code, scale), [D_PAD]), D, D_PAD, KV)
    return x


@triton.jit
def rounded(x, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Round a plain vector, [D_PAD]: return the mixed vector that `load` returns after `place`."""
    if KV != "model":
        code, scale = _encoded(x[None, :].to(tl.float32), D, D_PAD, KV)
        x = tl.reshape(_decoded(code, scale), [D_PAD])
    return x


# -- the Hadamard matrix -----------------------------------------------------------------------------------------------


@triton.jit
def hadamard(x, D: tl.constexpr, D_PAD: tl.constexpr):
    """Multiply the blocks of vectors, float32 [n, D_PAD], by the Hadamard matrix of entries 1 and -1.

    Sums follow the order of `kvdsl.interp.rounding`, so all backends compute the same codes.
    """
    d = tl.arange(0, D_PAD)[None, :]
    for n in tl.static_range(0, 16):
        if (1 << n) < (D & -D):
            other = tl.gather(x, tl.broadcast_to(d ^ (1 << n), x.shape), 1)
            x = tl.where((d & (1 << n)) == 0, x + other, other - x)
    return x


@triton.jit
def plain(x, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Convert mixed vectors, [n, D_PAD], to plain ones. The matrix times itself is the block size times the identity."""
    if KV == "int4":
        x = hadamard(x, D, D_PAD) * (1.0 / (D & -D))
    return x


@triton.jit
def plain_vector(x, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Convert one mixed vector, [D_PAD], to a plain one."""
    if KV == "int4":
        x = tl.reshape(plain(x[None, :], D, D_PAD, KV), [D_PAD])
    return x


# -- codes and scales --------------------------------------------------------------------------------------------------


@triton.jit
def _scales(D: tl.constexpr, KV: tl.constexpr):
    """Return the number of scales per row."""
    if KV == "int4":
        count = (D + GROUP - 1) // GROUP
    else:
        count = 1
    return count


@triton.jit
def _scale_of(start, s, D: tl.constexpr, KV: tl.constexpr):
    """Return pointers to the first bytes of scales s. Rows may be unaligned, so callers load each scale as two bytes."""
    return start + (row(D, KV) - 2 * _scales(D, KV)) + 2 * s


@triton.jit
def _byte(d, D: tl.constexpr, KV: tl.constexpr):
    """Return the byte that holds each dim's code, and the code's shift in bits within it."""
    if KV == "int4":
        first, i = d // GROUP * GROUP, d % GROUP
        half = GROUP // 2
        if D // GROUP * GROUP != D:  # the last scale covers fewer dims
            half = tl.maximum(tl.minimum(GROUP, D - first) // 2, 1)
        byte, shift = first // 2 + i % half, tl.where(i < half, 0, 4)
    else:
        byte, shift = d, 0
    return byte, shift


@triton.jit
def _number(code, KV: tl.constexpr):
    """Return the numbers that codes, int32, represent, without their scales."""
    if KV == "int4":
        x = ((code & 15) - 8).to(tl.float32)
    elif KV == "int8":
        x = (code << 24 >> 24).to(tl.float32)
    else:  # e4m3: the least normal number is 2**-6; subnormals have steps of 2**-9
        size = code & 127
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        x = tl.where(size < 8, size.to(tl.float32) * 2.0**-9, normal)
        x = tl.where(code < 128, x, -x)
    return x


@triton.jit
def _decoded(x, scale):
    """Multiply numbers, [n, D_PAD], by their scales, [n, S]."""
    n: tl.constexpr = x.shape[0]
    S: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.reshape(x, [n, S, x.shape[1] // S]) * scale[:, :, None], x.shape)


@triton.jit
def _encoded(x, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Return a plain vector's codes as numbers, [1, D_PAD], and its scales, [1, S]. `x`: float32 [1, D_PAD].

    If any number under a scale is not finite, its codes are 0 and the scale is NaN.
    """
    S: tl.constexpr = D_PAD // GROUP if KV == "int4" and D_PAD > GROUP else 1
    if KV == "int4":
        x = hadamard(x, D, D_PAD)
    x = tl.reshape(x, [S, D_PAD // S])
    finite = tl.min((tl.abs(x) <= LARGEST).to(tl.int32), 1, keep_dims=True) != 0
    x = tl.where(finite, x, 0.0)
    if KV == "int4":
        low, high = tl.min(x, 1, keep_dims=True), tl.max(x, 1, keep_dims=True)
        scale = tl.where(-low >= high, 1.0, -1.0) * _scale(tl.maximum(-low, high) * 0.125)
        code = tl.minimum(tl.maximum(_nearest(tl.div_rn(x, scale + tl.zeros_like(x))), -8.0), 7.0)
    else:
        scale = _scale(tl.div_rn(tl.max(tl.abs(x), 1, keep_dims=True), 127.0 if KV == "int8" else 448.0))
        ratio = tl.div_rn(x, scale + tl.zeros_like(x))
        code = _nearest(ratio) if KV == "int8" else _number(_float8(ratio), KV)
    scale = tl.where(finite, scale, float("nan"))
    return tl.reshape(code, [1, D_PAD]), tl.reshape(scale, [1, S])


@triton.jit
def _scale(x):
    """Round positive float32 numbers up to bfloat16, and to 2**-126 at least."""
    bits = (x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.maximum(bits.to(tl.float32, bitcast=True), SMALLEST)


@triton.jit
def _nearest(x):
    """Round numbers of size below 2**22 to the nearest integer, ties to even."""
    return (x + HALVES) - HALVES


@triton.jit
def _float8(x):
    """Round float32 numbers of size up to 448 to e4m3. Return the codes."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    small = _nearest(tl.abs(x) * 512.0).to(tl.int32)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(tl.abs(x) < 2.0**-6, small, normal) | ((bits >> 24) & 0x80)
