"""Device functions of the second launch of a decode step, `settle`: what every policy's has in common.

One program serves one KV head of one row and goes over its N slots in blocks. Values that all slots depend on (a threshold, a
count) are scalars between two such passes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine(out, part, top, total, sinks, pair, head, splits, G: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, S_PAD: tl.constexpr, g: tl.constexpr, SINKS: tl.constexpr):
    """Query head g's attention from what the splits found, stored at out [B, H * G, E]; gives the log-sum-exp of its logits."""
    s, e = tl.arange(0, S_PAD), tl.arange(0, E_PAD)
    at = (pair * splits + s) * G + g
    tops = tl.load(top + at, mask=s < splits, other=float("-inf"))
    highest = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head * G + g).to(tl.float32)
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp(tops - base)
    weight = tl.sum(share * tl.load(total + at, mask=s < splits, other=0.0), 0)
    if SINKS:
        weight += tl.exp(sink - base)
    parts = tl.load(part + at[:, None] * E + e[None, :], mask=(s[:, None] < splits) & (e[None, :] < E), other=0.0)
    mixed = tl.sum(share[:, None] * parts, 0) / weight
    tl.store(out + (pair * G + g) * E + e, mixed.to(out.dtype.element_ty), mask=e < E)
    return base + tl.log(weight)
