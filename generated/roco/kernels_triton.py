"""RoCo on GPUs: what the kernels of `kvdsl.runtime.gpu.kernels` call.

Made by kvdsl 0.1.0 from roco.kv (5994bd044d6d). Do not edit: `kvdsl compile` rewrites it.

Evicts the token with the lowest mean attention among those whose attention has settled; tokens whose attention varies most are kept.

paper: "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference", section 4.3:
  mean attention score (MAS) and a scope by standard deviation
year: 2024
reach: exact
checked: formula
code: differs: squares underflow in float16, and scopes and budgets are others

Evicts the lowest first: mean(attn)
keep top protect by std(attn)
keep last 1

Legend: `kvdsl.runtime.gpu.kernels.hooks` says what each function does, and what it is given.
    sum_attn: sum of attn
    sum_attn_squared: squares of attn
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, observing, ops

KERNELS = ("settle", "at_once", "observe", "settle_prompt")
CONSTANTS = {
    "SPREADS": True,
    "LOGITS": True,
    "SLIDES": False,
    "OBSERVES": True,
    "MERGES": True,
    "LAZY": True,
    "DRAWS": False,
    "COUNTS": False,
    "REDUCTIONS": 0,
    "COMPACT": False,
    "SKETCHES": False,
    "BOUNDS": False,
    "BY": '',
    "GROUP": 'mean',
    "VOTE": '',
    "PROTECTS": False,
    "OBSERVED": False,
    "SHARES": False,
    "AGREES": False,
    "POOLS": False,
    "SCORES": 2,
    "TOPS": 1,
    "ENDS": 2,
}


@triton.jit
def read_numbers(numbers, constants, own_row, own_pair, head, heads, D: tl.constexpr):
    number_protect = tl.load(numbers + own_row * 2)
    number_capacity = tl.load(numbers + own_row * 2 + 1)
    return number_protect, number_capacity


@triton.jit
def find_columns(columns, ring_rows, column_stride, at):
    sum_attn_at = columns + at
    sum_attn_squared_at = columns + column_stride + at
    return sum_attn_at, sum_attn_squared_at


@triton.jit
def place(own_numbers, own_columns, constants, supplied, slot, key, value, d, e, pair, head, heads, D: tl.constexpr, E: tl.constexpr):
    sum_attn_at, sum_attn_squared_at = own_columns
    tl.store(sum_attn_at + slot, 0.0)
    tl.store(sum_attn_squared_at + slot, 0.0)


@triton.jit
def ends(own_numbers, now, live):
    return 0, 1


@triton.jit
def overflow(own_numbers, now, live):
    number_protect, number_capacity = own_numbers
    return ops.count(number_capacity), 1, 0, 0


@triton.jit
def tops(own_numbers, now, live):
    number_protect, number_capacity = own_numbers
    return ops.count(number_protect),


@triton.jit
def rank_slots(own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants, own_row, own_pair, head, heads, logits, base, above, taken, begin, end, slots, now, live, first, last, window, random_key, OBSERVES: tl.constexpr, STORES: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, SELECTS: tl.constexpr, SIZE: tl.constexpr, K_AS: tl.constexpr, V_AS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ROW_TILE: tl.constexpr, BLOCK: tl.constexpr):
    sum_attn_at, sum_attn_squared_at = own_columns
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        pos = tl.load(position + i, mask=inside, other=-1)
        sum_attn = tl.load(sum_attn_at + i, mask=inside, other=0.0)
        sum_attn_squared = tl.load(sum_attn_squared_at + i, mask=inside, other=0.0)
        if OBSERVES:
            visible = (pos >= 0) & (now - pos < window)
            attn = ops.attn(logits, base, above, i, slots, G, G_PAD, "mean")
            new_sum_attn = sum_attn + attn
            new_sum_attn_squared = sum_attn_squared + ops.square(attn)
            tl.store(sum_attn_at + i, new_sum_attn, mask=visible)
            tl.store(sum_attn_squared_at + i, new_sum_attn_squared, mask=visible)
            sum_attn = tl.where(visible, new_sum_attn, sum_attn)
            sum_attn_squared = tl.where(visible, new_sum_attn_squared, sum_attn_squared)
        observed = ops.observed(pos, now, window)
        score = tl.div_rn(sum_attn, observed)
        keep = tl.where(pos >= last, 2, 0)
        tl.store(work + slots + i, tl.sqrt_rn(ops.maximum(tl.div_rn(sum_attn_squared, observed) - ops.square(tl.div_rn(sum_attn, observed)), 0.0)), mask=inside)
        if STORES:
            tl.store(work + i, score, mask=inside)
            tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    return lowest, where, certain


@triton.jit
def fold_queries(own_numbers, own_columns, column_stride, query, lse, live_slots, reduced, reduced_stride, order, i, inside, pos, since, until, k, first, end, tokens, scaling, softcap, window, random_key, query_head, query_token, G: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr):
    sum_attn_at, sum_attn_squared_at = own_columns
    seen = since <= until
    sum_attn = tl.zeros([SLOTS, 1], tl.float32)
    sum_attn_squared = tl.zeros([SLOTS, 1], tl.float32)
    low, high = tl.min(since), tl.max(until)
    for back in range(0, high - low + 1, QUERIES):
        now = high - back - tl.arange(0, QUERIES)
        asked = now >= first
        t = observing.place(order, now, first, asked, PADDED)
        now = now[None, :]
        visible = (since <= now) & (now <= until)
        attn, logit = observing.weights(query, lse, k, t, asked, tokens, scaling, softcap, query_head, query_token, ATTN=True, LOGIT=False, HOW="mean", G=G, D=D, CAPPED=CAPPED)
        sum_attn += observing.total(attn, visible)
        sum_attn_squared += observing.total(ops.square(attn), visible)
    tl.store(sum_attn_at + i, tl.load(sum_attn_at + i, mask=seen, other=0.0) + sum_attn, mask=seen)
    tl.store(sum_attn_squared_at + i, tl.load(sum_attn_squared_at + i, mask=seen, other=0.0) + sum_attn_squared, mask=seen)
