"""Device functions of prompt statistics, shared by the policies' kernels `observe` and `over_slots`.

Legend:
    B, H, T, N: rows, KV heads, new tokens, slots per KV head. G: query heads per KV head. D: size of a key.
    A tile covers a block of slots by a block of queries, [SLOTS, QUERIES]; an axis over which a value is constant has size 1.
    pos: the positions of the tokens in slots i, [SLOTS, 1]; negative where a slot is free. now: the queries' positions, [1, QUERIES].
    since, until: the first and the last query that see a slot, [SLOTS, 1]; since > until if none does.
    first, begin, end: text positions of a row's first new token, of the first query that counts, and one past the last one.

A row's new tokens have consecutive positions, even with padding between them. Three facts follow: the queries that see a slot form an
interval, its last query is known in advance, and the number of decay steps is a difference of positions. So the result does not depend
on the order in which the kernel processes queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops

LOG2_E = tl.constexpr(1.4426950408889634)

# -- visibility --------------------------------------------------------------------------------------------------------


@triton.jit
def interval(pos, begin, end, window):
    """Return the first and the last query that see each slot, `since` and `until`."""
    since = tl.where(pos >= 0, tl.maximum(pos, begin), ops.INT_MAX)
    until = tl.where(pos >= 0, tl.minimum(pos + (window - 1), end - 1), -1)
    return since, until


@triton.jit
def place(order, now, first, inside, PADDED: tl.constexpr):
    """Return the indices, among the row's new tokens, of the tokens at positions `now`."""
    t = now - first
    if PADDED:
        t = tl.load(order + t, mask=inside, other=0)
    return t


@triton.jit
def reach(order, low, high, first, cached, window, PADDED: tl.constexpr):
    """Return the range of slots that the queries from `low` to `high` can see: its first slot and one past its last."""
    start = 0
    oldest = low - (window - 1)
    if oldest > first:  # the window excludes all previously cached tokens too
        start = cached + place(order, oldest, first, True, PADDED)
    return start, cached + place(order, high, first, True, PADDED) + 1


# -- attention per query -----------------------------------------------------------------------------------------------


@triton.jit
def weights(
    query,  # one KV head's queries in one row: G heads of [T, D]
    lse,  # [G, T]: log-sum-exp of their logits, if ATTN
    k,  # [SLOTS, D_PAD]
    t,  # [QUERIES]
    asked,  # [QUERIES]: the queries to load
    tokens,
    scaling,
    softcap,
    query_head,  # strides
    query_token,
    ATTN: tl.constexpr,
    LOGIT: tl.constexpr,
    HOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Return a tile of probabilities and one of logits, reduced over the group; undefined where a query does not see the slot."""
    d = tl.arange(0, k.shape[1])[None, :]
    attn = tl.full([k.shape[0], t.shape[0]], float("-inf") if HOW == "max" else 0.0, tl.float32)
    logit = attn
    rows = query + t[:, None].to(tl.int64) * query_token + d
    for g in range(G):
        q = tl.load(rows + g * query_head, mask=asked[:, None] & (d < D), other=0.0).to(k.dtype)
        x = tl.dot(k, tl.trans(q), input_precision="ieee")
        unit = scaling  # of x
        if CAPPED:
            x, unit = softcap * ops.tanh(x * scaling / softcap), 1.0
        if LOGIT:
            logit = ops.maximum(logit, x * unit) if HOW == "max" else logit + x * unit
        if ATTN:  # exp2 needs one fused multiply-add per score
            base = tl.load(lse + g * tokens + t, mask=asked, other=0.0) * -LOG2_E
            p = tl.exp2(tl.fma(x, unit * LOG2_E, base[None, :]))
            attn = ops.maximum(attn, p) if HOW == "max" else attn + p
    if HOW == "mean":
        attn, logit = attn * (1.0 / G), logit * (1.0 / G)
    return attn, logit


# -- reductions over the queries of a tile, [SLOTS, 1] -----------------------------------------------------------------


@triton.jit
def total(x, visible):
    """Return the sum over the queries that see the slot."""
    return tl.sum(tl.where(visible, x, 0.0), 1, keep_dims=True)


@triton.jit
def largest(x, visible):
    """Return the maximum over the queries that see the slot; NaN if any value is NaN."""
    return ops.largest(x, visible, 1)[:, None]


@triton.jit
def least(x, visible):
    """Return the minimum over the queries that see the slot; NaN if any value is NaN."""
    return -largest(-x, visible)


@triton.jit
def remaining(now, pos, until, decay):
    """Return a query's weight in the moving average after the last query. A token's own query starts with 1, others with 1 - decay."""
    return tl.where(now == pos, 1.0, _share(decay)) * _decayed(until - now, decay)


@triton.jit
def averaged(old, x, pos, since, until, decay):
    """Return the moving average `old` updated with the weighted sum `x`. A slot whose own query is new has no `old`."""
    return tl.where(since == pos, x, old * _decayed(until - since + 1, decay) + x)


@triton.jit
def _share(decay):
    return (1.0 - (tl.zeros([], tl.float64) + decay)).to(tl.float32)


@triton.jit
def _decayed(steps, decay):
    """Return decay ** steps. Over thousands of steps only a logarithm in double precision is accurate enough."""
    rate = tl.log2(tl.zeros([], tl.float64) + decay).to(tl.float32)
    return tl.where(steps == 0, 1.0, tl.exp2(steps.to(tl.float32) * rate))
