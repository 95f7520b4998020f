"""Attention of one new token over the slots, split over programs. `settle` follows it in every decode step.

Legend:
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: size of a key, of a value.
    R: rows of the cache; B, unless the step serves only some of them.
    S: splits: programs per KV head, each with its own range of slots. Constants with `_PAD` are sizes rounded up to powers of two.

Every program reads its keys and values once. The new token has no slot yet, so split 0 attends to it as well; it loads that key and
value first, which hides their latency. The next launch, `settle`, places the token and combines the splits.

If the query attends to a selection (see `kvdsl.runtime.gpu.select`), the programs share the chosen slots and read them in place.

Under compact positions (TURNS) the kernel rotates keys as it reads them, in pairs of dims; see `kvdsl.runtime.gpu.rotate`. With FEW
it rotates only a few of them, in a second phase.

With SIZE, keys and values lie in blocks of SIZE slots; see `kvdsl.runtime.gpu.layout`.

With BESIDE, the last split attends to nothing: it takes over attention to tokens without slots; see `kvdsl.runtime.gpu.lent`.

K_AS and V_AS are the storage types of keys and values; see `kvdsl.runtime.gpu.packed`. A Hadamard matrix mixes vectors in `int4`: the
kernel mixes the query once, and `settle` unmixes the weighted sum of values. A mixed query that is not finite would make every score
NaN, so such a query is multiplied by plain keys instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops, packed, rotate

TURNED = tl.constexpr(16)
"""Slots per block of the second phase."""


@triton.jit
def attend(
    which,  # [B] int32: if SOME, each row's row of the cache
    query,  # [B, H * G, D]
    new_key,  # [B, H, D]
    new_value,  # [B, H, E]
    keys,  # [R, H, N, D], or heads of different lengths in sequence, or blocks of a pool
    values,  # [R, H, N, E], in the same layout
    first_rows,  # [R, H] int64: rows of `keys` and `values` before the head's
    table,  # [B, blocks of a row] int64: if SIZE, each block's offset from the head's first row, in blocks
    position,  # [R, H, N] int32; negative: free
    seen,  # [R] int32: the new token's position
    newest,  # [B, H] int32: receives `seen`, for `settle`
    part,  # [B, H, S, G, E] float32: receives each split's sum of exp(logit - top) * value
    top,  # [B, H, S, G] float32: receives the largest logit
    total,  # [B, H, S, G] float32: receives the sum of exp(logit - top)
    first_free,  # [B, H, S] int32: receives the split's first free slot; N or more: none. Not written if SELECTS
    held,  # [B, H, S] int32: receives the split's number of tokens. Not written if SELECTS
    chosen,  # [B, H, N] int32: if SELECTS, the slots to attend to
    found,  # [B, H] int32: the number of chosen slots
    joins,  # [B, H] int32: whether the new token is chosen
    logits,  # [B, H, G, N] float32: receives the logits if LOGITS
    new_logits,  # [B, H, G] float32: receives the new token's if LOGITS
    rank,  # [R, H, N] int32: if TURNS, how many live slots hold an earlier token
    length,  # [R, H] int32: the head's number of tokens
    slopes,  # [H * G] float32: if BIASED, subtracted from a logit per position between token and query
    angles,  # float32: cosines and sines of rotations, see `kvdsl.runtime.angles.digits`
    beside,  # [B, H * G, E]: if BESIDE, attention to tokens that have no slots
    beside_lse,  # [B, H * G] float32: the log-sum-exp of their logits
    slots,
    scaling,
    softcap,  # 0: none
    window,  # tokens that a query sees; 2**30: all
    SOME: tl.constexpr,
    SIZE: tl.constexpr,  # slots per block of the pool; 0: no blocks
    K_AS: tl.constexpr,
    V_AS: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    BIASED: tl.constexpr,
    RANKED: tl.constexpr,  # whether that distance counts live tokens instead of text positions
    SELECTS: tl.constexpr,
    DENSE: tl.constexpr,  # whether slots are contiguous and few are free or outside the window
    TURNS: tl.constexpr,
    FEW: tl.constexpr,  # whether only a few keys have to be rotated
    PAIRS: tl.constexpr,  # rotated pairs of dims, from dim OFFSET on
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,  # dims that are not rotated; 0: none
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether a pair is (2j, 2j + 1), not (j, j + PAIRS)
    DOT: tl.constexpr,  # dtype of matrix products: the model's, or float32 in the interpreter, which lacks bfloat16
    PRECISION: tl.constexpr,  # input precision of float32 matrix products
    BESIDE: tl.constexpr,  # whether the last split is attention that is known already
    KEEPS: tl.constexpr,  # blocks per split, if the caller is a kernel that wants the logits instead of `logits`; 0: none does
    KEPT: tl.constexpr,  # query heads of these logits: G rounded up to a power of two
):
    """Attend over one split of one KV head of one row. The grid is (S, H, B).

    Returns:
        with KEEPS and LOGITS, the logits of the split's slots, [KEPT, KEEPS * BLOCK].
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    own_row = ops.row_of(which, row, SOME)
    pair, own_pair = (row * heads + head).to(tl.int64), (own_row * heads + head).to(tl.int64)
    sharing = splits  # programs that share the slots
    if BESIDE:
        sharing -= 1
        if split == sharing:
            _take_known(beside, beside_lse, part, top, total, first_free, held, pair, split, splits, G, G_PAD, E, E_PAD)
            return
    begin = tl.load(first_rows + own_pair)
    keys += begin * packed.row(D, K_AS)
    values += begin * packed.row(E, V_AS)
    if SIZE > 0:
        table = layout.table_of(table, row, slots, SIZE)
    lane, g, d, e = tl.arange(0, BLOCK), tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    q = tl.load(query + (pair * G + g[:, None]) * D + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    now = tl.load(seen + own_row)
    if split == 0:
        tl.store(newest + pair, now)
    if K_AS == "int4":
        mixed_q = packed.plain(q, D, D_PAD, K_AS)  # by 1 / block: mixed_q · mixed key = q · plain key
        meets_plain = tl.min(tl.min((tl.abs(mixed_q) <= packed.LARGEST).to(tl.int32), 1), 0) == 0
    if TURNS:
        evicted = now - tl.load(length + own_pair)  # among the tokens before the new one
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
    if LOGITS and KEEPS > 0:
        kept = tl.zeros([KEPT, KEEPS, BLOCK], tl.int32)
    reach = tl.load(found + pair) if SELECTS else ops.reach(slots, now)
    first, end = ops.share(reach, split, sharing, BLOCK)
    # With FEW, phase 0 attends to keys that are not rotated, and finds the last of the others for phase 1.
    LAST: tl.constexpr = 1 if TURNS and FEW else 0
    if LAST > 0:
        turned = tl.full([BLOCK], -1, tl.int32)
    for phase in tl.static_range(1 + LAST):
        if phase == 1:
            lane = tl.arange(0, TURNED)
            end = tl.max(turned, 0) + 1
        if TURNS and phase == LAST and K_AS == "model":
            q_first, q_second, q_other = rotate.parts(
                query, pair * G + g, g < tl.where(first < end, G, 0), D, PAIRS, P_PAD, R_PAD, OFFSET, INTERLEAVED
            )
        for start in range(first, end, BLOCK if phase == 0 else TURNED):
            i = start + lane
            inside = i < reach
            if SELECTS:
                i = tl.load(chosen + pair * slots + i, mask=inside, other=0)
                pos = tl.load(position + own_pair * slots + i, mask=inside, other=-1)
                visible = inside
            else:
                pos = tl.load(position + own_pair * slots + i, mask=inside, other=-1)
                visible = (pos >= 0) & (now - pos < window)
                if phase == 0:
                    gap = tl.where(inside & (pos < 0), tl.minimum(gap, i), gap)
                    live += (pos >= 0).to(tl.int32)
            mine = visible
            if TURNS:
                by = rotate.turns(pos, tl.load(rank + own_pair * slots + i, mask=inside, other=0), visible, evicted)
                if LAST > 0:
                    mine = visible & ((by == 0) if phase == 0 else (by > 0))
                    if phase == 0:
                        turned = tl.where(by > 0, start + lane, turned)
            # DENSE reads the few other slots too: then loads do not depend on positions, and the compiler prefetches them.
            there = inside if DENSE and phase == 0 else mine
            at = layout.rows(i, there, table, SIZE)
            if TURNS and phase == LAST and K_AS == "model":
                k_first, k_second, k_other = rotate.parts(keys, at, there, D, PAIRS, P_PAD, R_PAD, OFFSET, INTERLEAVED)
                score = rotate.scores(
                    q_first, q_second, q_other, k_first, k_second, k_other, by, angles, PAIRS, P_PAD, R_PAD, INTERLEAVED, DOT,
                )  # fmt: skip
            else:
                k = packed.load(keys, at, there, D, D_PAD, K_AS)
                meets = q
                if K_AS == "int4":
                    needs_plain = meets_plain
                    if TURNS:
                        needs_plain |= tl.max(by, 0) > 0
                    if needs_plain:
                        k = packed.plain(k, D, D_PAD, K_AS)
                    else:
                        meets = mixed_q
                if TURNS and phase == LAST:
                    k = rotate.nearer(k, by, angles, D_PAD, PAIRS, OFFSET, INTERLEAVED)
                score = tl.dot(meets.to(DOT), tl.trans(k.to(DOT)), input_precision=PRECISION)
            logit = _capped(score * scaling, softcap)
            if BIASED:  # the new token's own distance is 0
                behind = now - pos
                if RANKED:
                    behind = tl.load(length + own_pair) - tl.load(rank + own_pair * slots + i, mask=there, other=0)
                logit -= slope[:, None] * behind[None, :].to(tl.float32)
            logit = tl.where(mine[None, :], logit, float("-inf"))
            if LOGITS and KEEPS > 0:
                own = ops.first_rows(logit, KEPT).to(tl.int32, bitcast=True)
                kept = tl.where((tl.arange(0, KEEPS) == (start - first) // BLOCK)[None, :, None], own[:, None, :], kept)
            elif LOGITS:
                place = (pair * G + g[:, None]) * slots + i[None, :]
                tl.store(logits + place, logit, mask=(g[:, None] < G) & inside[None, :])
            best, weight, acc, p = _fold(best, weight, acc, logit)
            v = packed.load(values, at, there, E, E_PAD, V_AS)
            if DENSE and phase == 0:  # the other slots may hold NaN or inf, and 0 * NaN is NaN
                v = tl.where(mine[:, None], v, 0.0)
            acc += tl.dot(p.to(DOT), v.to(DOT), input_precision=PRECISION)

    if split == 0:  # the new token
        now_key = packed.plain_vector(packed.rounded(now_key, D, D_PAD, K_AS), D, D_PAD, K_AS)
        now_value = packed.rounded(now_value, E, E_PAD, V_AS)
        logit = _capped(tl.sum(q.to(tl.float32) * now_key.to(tl.float32)[None, :], 1) * scaling, softcap)
        logit = tl.where(attends, logit, float("-inf"))
        if LOGITS:
            tl.store(new_logits + pair * G + g, logit, mask=g < G)
        best, weight, acc, p = _fold(best, weight, acc, logit[:, None])
        acc += p * now_value.to(tl.float32)[None, :]

    if not SELECTS:
        tl.store(first_free + pair * splits + split, tl.min(gap, 0))
        tl.store(held + pair * splits + split, tl.sum(live, 0))
    mine = (pair * splits + split) * G + g
    tl.store(top + mine, best, mask=g < G)
    tl.store(total + mine, weight, mask=g < G)
    tl.store(part + mine[:, None] * E + e[None, :], acc, mask=(g[:, None] < G) & (e[None, :] < E))
    if KEEPS > 0:
        return tl.reshape(kept, [KEPT, KEEPS * BLOCK]).to(tl.float32, bitcast=True) if LOGITS else new_logits


@triton.jit
def _take_known(
    beside,
    beside_lse,
    part,
    top,
    total,
    first_free,
    held,
    pair,
    split,
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """Make a split of attention that is known already. It has no slots."""
    g, e = tl.arange(0, G_PAD), tl.arange(0, E_PAD)
    tl.store(first_free + pair * splits + split, ops.INT_MAX)
    tl.store(held + pair * splits + split, 0)
    mine = (pair * splits + split) * G + g
    tl.store(top + mine, tl.load(beside_lse + pair * G + g, mask=g < G, other=0.0), mask=g < G)
    tl.store(total + mine, tl.full([G_PAD], 1.0, tl.float32), mask=g < G)
    there = (g[:, None] < G) & (e[None, :] < E)
    known = tl.load(beside + (pair * G + g[:, None]) * E + e[None, :], mask=there, other=0.0)
    tl.store(part + mine[:, None] * E + e[None, :], known.to(tl.float32), mask=there)


@triton.jit
def _capped(logit, softcap):
    """Return softcap * tanh(logit / softcap), or the logit itself if softcap is 0."""
    if softcap > 0:
        logit = softcap * ops.tanh(logit / softcap)
    return logit


@triton.jit
def _fold(best, weight, acc, logit):
    """Add logits, [G, n], to the running softmax. Return its updated state and their weights, [G, n]."""
    higher = tl.maximum(best, tl.max(logit, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible token so far: exp(-inf - 0) = 0
    p = tl.exp(logit - base[:, None])
    shrink = tl.exp(best - base)
    return higher, weight * shrink + tl.sum(p, 1), acc * shrink[:, None], p
