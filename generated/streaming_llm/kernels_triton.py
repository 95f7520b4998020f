"""StreamingLLM on GPUs: what the kernels of `kvdsl.runtime.gpu.kernels` call.

Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.

Keeps the first tokens, which are attention sinks, and the most recent ones, at positions counted inside the cache.

A text can be longer than the model was trained on: the newest token is always at position `live - 1`.

paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2
year: 2023, arXiv 2309.17453
reach: exact
checked: formula

Evicts the lowest first: position
keep first sinks
keep last 1

Legend: `kvdsl.runtime.gpu.kernels.hooks` says what each function does, and what it is given.
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, ops

KERNELS = ("settle", "at_once", "settle_prompt")
CONSTANTS = {
    "SPREADS": True,
    "LOGITS": False,
    "SLIDES": True,
    "OBSERVES": False,
    "MERGES": False,
    "LAZY": True,
    "DRAWS": False,
    "COUNTS": False,
    "REDUCTIONS": 0,
    "COMPACT": True,
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
    "SCORES": 1,
    "TOPS": 0,
    "ENDS": 1,
}


@triton.jit
def read_numbers(numbers, constants, own_row, own_pair, head, heads, D: tl.constexpr):
    number_sinks = tl.load(numbers + own_row * 2)
    number_capacity = tl.load(numbers + own_row * 2 + 1)
    return number_sinks, number_capacity


@triton.jit
def ends(own_numbers, now, live):
    number_sinks, number_capacity = own_numbers
    return ops.count(number_sinks), 1


@triton.jit
def overflow(own_numbers, now, live):
    number_sinks, number_capacity = own_numbers
    return ops.count(number_capacity), 1, 0, 0


@triton.jit
def rank_slots(own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants, own_row, own_pair, head, heads, logits, base, above, taken, begin, end, slots, now, live, first, last, window, random_key, OBSERVES: tl.constexpr, STORES: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, SELECTS: tl.constexpr, SIZE: tl.constexpr, K_AS: tl.constexpr, V_AS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ROW_TILE: tl.constexpr, BLOCK: tl.constexpr):
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        pos = tl.load(position + i, mask=inside, other=-1)
        score = pos.to(tl.float32)
        keep = (pos <= first) | (pos >= last)
        if STORES:
            tl.store(work + i, score, mask=inside)
            tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    return lowest, where, certain
