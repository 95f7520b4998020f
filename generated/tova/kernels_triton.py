"""TOVA on GPUs: the second launch of a decode step. The first is `kvdsl.runtime.gpu.attend`.

Made by kvdsl 0.1.0 from tova.kv (c7607d628662). Do not edit: run `kvdsl compile tova.kv`.

Evicts what the newest token attends to least, the newest token itself not excepted.

Oren et al., "Transformers are Multi-State RNNs", 2024; "On the Efficacy of Eviction Policy for Key-Value Constrained Generative
Language Model Inference", section 4.1 (LTAS).

The lowest leaves first: last(attn)

Legend:
    One program serves one KV head of one row. It combines what `attend` found,
    puts the new token into a free slot, lets its query be observed, and frees the slots of those that must leave.
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: size of a key, of a value. S: splits of `attend`.
    now: the new token's position in the text. pos: those of the tokens in slots i, below 0 where a slot is free.
    last_attn: last of attn
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops

SCORES = 1  # rows of `work`


@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def settle(
    out,  # [B, H * G, E]: gets the attention's output
    part,  # [B, H, S, G, E] float32, with `top` and `total`: what each split of `attend` found
    top,  # [B, H, S, G] float32
    total,  # [B, H, S, G] float32
    sinks,  # [H * G]: logits that join the softmax; not read unless SINKS
    first_free,  # [B, H, S] int32: the split's first free slot
    held,  # [B, H, S] int32: how many tokens it holds
    logits,  # [B, H, G, N] float32: scores before softmax
    new_logits,  # [B, H, G] float32: the new token's
    new_key,  # [B, H, D]
    new_value,  # [B, H, E]
    keys,  # [B, H, N, D]
    values,  # [B, H, N, E]
    position,  # [B, H, N] int32
    columns,  # [1, B, H, N] float32: the state columns
    work,  # [B, H, SCORES, N] float32: gets what slots are ranked by
    kept,  # [B, H, N] int8: gets what is protected
    newest,  # [B] int32: the new token's position
    seen,  # [B] int32: gets the next token's
    real,  # [B] bool: False for padding, of which nothing comes but zeros
    numbers,  # [B, 1] float64
    slots,
    splits,
    window,  # queries see this many tokens; 2**30: all
    G: tl.constexpr,
    G_PAD: tl.constexpr,  # sizes as powers of two
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine, place, observe, settle; the grid is (H, B)."""
    head, row = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    if tl.load(real + row) == 0:
        ops.nothing(out, pair, G, G_PAD, E, E_PAD)
        return
    now = tl.load(newest + row)
    if head == 0:
        tl.store(seen + row, now + 1)
    position += pair * slots
    logits += pair * G * slots
    work += pair * slots
    kept += pair * slots
    column_stride = tl.num_programs(1).to(tl.int64) * heads * slots
    last_attn_at = columns + pair * slots
    number_capacity = tl.load(numbers + row * 1)

    # What the new token attended to.
    lse = ops.combine(out, part, top, total, sinks, pair, head, splits, G, G_PAD, E, E_PAD, S_PAD, SINKS)

    # Its place.
    slot, live = ops.free_slot(first_free, held, pair, slots, splits, S_PAD)
    live += 1
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    key = tl.load(new_key + pair * D + d, mask=d < D, other=0.0)
    value = tl.load(new_value + pair * E + e, mask=e < E, other=0.0)
    tl.store(keys + (pair * slots + slot) * D + d, key, mask=d < D)
    tl.store(values + (pair * slots + slot) * E + e, value, mask=e < E)
    tl.store(position + slot, now)
    ops.place_logits(logits, new_logits + pair * G, slot, slots, G, G_PAD)
    tl.store(last_attn_at + slot, 0.0)
    tl.debug_barrier()

    # What its query says of the slots that it saw.
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        visible = (pos >= 0) & (now - pos < window)
        attn = ops.attn(logits, lse, i, slots, G, G_PAD, "mean")
        tl.store(last_attn_at + i, attn, mask=visible)
    tl.debug_barrier()

    # Who leaves.
    leaving = ops.overflow(live, ops.count(number_capacity), 1, 0, 0)
    if leaving == 0:
        return
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        last_attn = tl.load(last_attn_at + i, mask=inside, other=0.0)
        tl.store(work + i, last_attn, mask=inside)
        tl.store(kept + i, 0, mask=inside)
    tl.debug_barrier()
    ops.evict(position, work, kept, slots, now, leaving, (), 0, BLOCK)
