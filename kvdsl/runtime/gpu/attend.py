"""Attention of one new token over the slots, split over programs: the launch before the last of a decode step's two, or of
more where the query attends to a selection or a hard cap asks for room.

Legend:
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: size of a key, of a value.
    R: rows of the cache; B, unless the step is of some of them.
    S: splits: programs per KV head, each with its own range of slots. Constants with `_PAD` are sizes as powers of two.

Every program reads its keys and values once. The new token is in no slot yet: split 0 attends to it as well, and asks for it before
all others, so that nobody waits for it alone. The launch that
follows (`settle`, generated per policy) puts it into a slot. What the programs find is combined there, too.

Of a selection (see `kvdsl.runtime.gpu.select`) keys and values are read where they lie; the programs share what is chosen.

Under compact positions (TURNS) keys are turned as they are read, pairs of dims at a time; see `kvdsl.runtime.gpu.rotate`.

With SIZE, keys and values lie in blocks of so many slots; see `kvdsl.runtime.gpu.layout`.

KV is the cache's `kv_dtype`; see `kvdsl.runtime.gpu.packed`. In `int4` keys and values are mixed by a Hadamard matrix, so the query is
mixed once, and `settle` turns the weighted sum of the values back. A mixed query that is not finite would make every score NaN. It meets
plain keys instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops, packed, rotate


@triton.jit
def attend(
    which,  # [B] int32: if SOME, the row of the cache that each row is
    query,  # [B, H * G, D]
    new_key,  # [B, H, D]
    new_value,  # [B, H, E]
    keys,  # [R, H, N, D], or heads of other lengths one behind the other, or blocks of a pool
    values,  # [R, H, N, E], likewise
    first_rows,  # [R, H] int64: rows of `keys` and `values` before the head's
    table,  # [B, blocks of a row] int64: if SIZE, where each block of a row's slots lies behind the head's first row
    position,  # [R, H, N] int32, below 0: free
    seen,  # [R] int32: the new token's position
    newest,  # [B] int32: gets `seen`, for the second launch
    part,  # [B, H, S, G, E] float32: gets each split's sum of exp(logit - top) * value
    top,  # [B, H, S, G] float32: gets the largest logit
    total,  # [B, H, S, G] float32: gets the sum of exp(logit - top)
    first_free,  # [B, H, S] int32: gets the split's first free slot; N or more: none. Not written if SELECTS
    held,  # [B, H, S] int32: gets how many tokens the split holds, likewise
    chosen,  # [B, H, N] int32: if SELECTS, the slots to attend to
    found,  # [B, H] int32: how many those are
    joins,  # [B, H] int32: whether the new token is one
    logits,  # [B, H, G, N] float32: gets the logits; not written unless LOGITS
    new_logits,  # [B, H, G] float32: gets the new token's
    rank,  # [R, H, N] int32: if TURNS, how many live slots hold an earlier token
    length,  # [R, H] int32: how many tokens the head holds
    half_keys,  # [R, H, N, 2 * PAIRS]: if HALVES, the keys' rotated halves
    slopes,  # [H * G] float32: if BIASED, what each place that a token stands behind the query takes from its logit
    angles,  # float32: cosines and sines of turns, see `kvdsl.runtime.angles.digits`
    slots,
    scaling,
    softcap,  # 0: none
    window,  # queries see this many tokens; 2**30: all
    SOME: tl.constexpr,
    SIZE: tl.constexpr,  # slots of a block of the pool; 0: there are none
    KV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    BIASED: tl.constexpr,
    RANKED: tl.constexpr,  # whether such places are counted among the live tokens, not in the text
    SELECTS: tl.constexpr,
    DENSE: tl.constexpr,  # whether slots lie one after another and free ones are few, as they are for a query without a window
    TURNS: tl.constexpr,
    HALVES: tl.constexpr,
    PAIRS: tl.constexpr,  # that turn, from dim OFFSET on
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,  # dims that do not; 0 for none
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether a pair is (2j, 2j + 1), not (j, j + PAIRS)
    DOT: tl.constexpr,  # what matrices are multiplied in: the model's dtype, or float32 in the interpreter, which has no bfloat16
    PRECISION: tl.constexpr,  # of such products, where it is float32
):
    """One split of one KV head of one row; the grid is (S, H, B)."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    own_row = ops.row_of(which, row, SOME)
    pair, own_pair = (row * heads + head).to(tl.int64), (own_row * heads + head).to(tl.int64)
    begin = tl.load(first_rows + own_pair)
    keys += begin * packed.row(D, KV)
    values += begin * packed.row(E, KV)
    if SIZE > 0:
        table = layout.table_of(table, row, slots, SIZE)
    lane, g, d, e = tl.arange(0, BLOCK), tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    q = tl.load(query + (pair * G + g[:, None]) * D + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    now = tl.load(seen + own_row)
    if (split == 0) & (head == 0):
        tl.store(newest + row, now)
    if KV == "int4":
        mixed_q = packed.plain(q, D, D_PAD, KV)  # by 1 / block, which plain keys are multiplied by
        meets_plain = tl.min(tl.min((tl.abs(mixed_q) <= packed.LARGEST).to(tl.int32), 1), 0) == 0
    if TURNS:
        if KV == "model":
            q_first, q_second, q_other = rotate.parts(
                query, pair * G + g, g < G, D, PAIRS, P_PAD, R_PAD, OFFSET, INTERLEAVED
            )
        evicted = now - tl.load(length + own_pair)  # from before the new token

    if BIASED:
        slope = tl.load(slopes + head * G + g, mask=g < G, other=0.0)
    attends = (tl.load(joins + pair) if SELECTS else tl.full([], 1, tl.int32)) != 0
    now_key = tl.load(new_key + pair * D + d, mask=d < tl.where(split == 0, D, 0), other=0.0)
    now_value = tl.load(new_value + pair * E + e, mask=e < tl.where((split == 0) & attends, E, 0), other=0.0)

    best = tl.full([G_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, E_PAD], tl.float32)
    gap = tl.full([BLOCK], 2**31 - 1, tl.int32)
    live = tl.zeros([BLOCK], tl.int32)
    reach = tl.load(found + pair) if SELECTS else tl.minimum(slots, now)  # a token's slot is never above its position
    per_split = tl.cdiv(tl.cdiv(reach, splits), BLOCK) * BLOCK
    first = split * per_split
    for start in range(first, tl.minimum(first + per_split, reach), BLOCK):
        i = start + lane
        inside = i < reach
        if SELECTS:
            i = tl.load(chosen + pair * slots + i, mask=inside, other=0)
            pos = tl.load(position + own_pair * slots + i, mask=inside, other=-1)
            visible = inside
        else:
            pos = tl.load(position + own_pair * slots + i, mask=inside, other=-1)
            visible = (pos >= 0) & (now - pos < window)
            gap = tl.where(inside & (pos < 0), tl.minimum(gap, i), gap)
            live += (pos >= 0).to(tl.int32)
        # Where nearly all slots are taken, free ones are read too: then no load waits for positions, and they are rounds ahead.
        there = inside if DENSE else visible
        at = layout.rows(i, there, table, SIZE)
        if TURNS:
            by = rotate.turns(pos, tl.load(rank + own_pair * slots + i, mask=there, other=0), visible, evicted)
        if TURNS and KV == "model":
            k_first, k_second, k_other = rotate.parts(keys, at, there, D, PAIRS, P_PAD, R_PAD, OFFSET, INTERLEAVED)
            halves = half_keys
            if HALVES:
                halves += (own_pair * slots + i) * (2 * PAIRS)
            score = rotate.scores(
                q_first,
                q_second,
                q_other,
                k_first,
                k_second,
                k_other,
                halves,
                by,
                angles,
                PAIRS,
                P_PAD,
                R_PAD,
                INTERLEAVED,
                HALVES,
                DOT,
            )
        else:
            k = packed.load(keys, at, there, D, D_PAD, KV)
            meets = q
            if KV == "int4":
                needs_plain = meets_plain
                if TURNS:
                    needs_plain |= tl.max(by, 0) > 0
                if needs_plain:
                    k = packed.plain(k, D, D_PAD, KV)
                else:
                    meets = mixed_q
            if TURNS:
                k = rotate.nearer(k, by, angles, D_PAD, PAIRS, OFFSET, INTERLEAVED)
            score = tl.dot(meets.to(DOT), tl.trans(k.to(DOT)), input_precision=PRECISION)
        logit = _capped(score * scaling, softcap)
        if BIASED:  # the new token's own distance is 0
            behind = now - pos
            if RANKED:
                behind = tl.load(length + own_pair) - tl.load(rank + own_pair * slots + i, mask=there, other=0)
            logit -= slope[:, None] * behind[None, :].to(tl.float32)
        logit = tl.where(visible[None, :], logit, float("-inf"))
        if LOGITS:
            place = (pair * G + g[:, None]) * slots + i[None, :]
            tl.store(logits + place, logit, mask=(g[:, None] < G) & inside[None, :])
        best, weight, acc, p = _fold(best, weight, acc, logit)
        v = packed.load(values, at, there, E, E_PAD, KV)
        if DENSE:  # what free slots hold may not be finite, which a weight of 0 does not undo
            v = tl.where(visible[:, None], v, 0.0)
        acc += tl.dot(p.to(DOT), v.to(DOT), input_precision=PRECISION)

    if split == 0:  # the new token
        now_key = packed.plain_vector(packed.rounded(now_key, D, D_PAD, KV), D, D_PAD, KV)
        now_value = packed.rounded(now_value, E, E_PAD, KV)
        logit = _capped(tl.sum(q.to(tl.float32) * now_key.to(tl.float32)[None, :], 1) * scaling, softcap)
        logit = tl.where(attends, logit, float("-inf"))
        if LOGITS:
            tl.store(new_logits + pair * G + g, logit, mask=g < G)
        best, weight, acc, p = _fold(best, weight, acc, logit[:, None])
        acc += p * now_value.to(tl.float32)[None, :]

    if not SELECTS:
        nearest = tl.minimum(tl.min(gap, 0), tl.where((split == 0) & (now < slots), now, 2**31 - 1))
        tl.store(first_free + pair * splits + split, nearest)
        tl.store(held + pair * splits + split, tl.sum(live, 0))
    mine = (pair * splits + split) * G + g
    tl.store(top + mine, best, mask=g < G)
    tl.store(total + mine, weight, mask=g < G)
    tl.store(part + mine[:, None] * E + e[None, :], acc, mask=(g[:, None] < G) & (e[None, :] < E))


@triton.jit
def _capped(logit, softcap):
    """The capped logit, softcap * tanh(logit / softcap)."""
    if softcap > 0:
        logit = softcap * ops.tanh(logit / softcap)
    return logit


@triton.jit
def _fold(best, weight, acc, logit):
    """Take further logits, [G, n], into the running softmax; gives their weights, too."""
    higher = tl.maximum(best, tl.max(logit, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: exp(-inf - 0) = 0
    p = tl.exp(logit - base[:, None])
    shrink = tl.exp(best - base)
    return higher, weight * shrink + tl.sum(p, 1), acc * shrink[:, None], p
