"""SparCas on GPUs: what the kernels of `kvdsl.runtime.gpu.kernels` call.

Made by kvdsl 0.1.0 from sparcas.kv (7aefa5e84f82). Do not edit: `kvdsl compile` rewrites it.

Keeps every token and attends to few: those with the best scores over the dims in which the query is large.

The first two layers attend to everything (section 4.1). The newest token has to compete.

paper: "SparCas: A Dimension-First Cascade for Efficient Long-Context LLM Inference", algorithm 1 and equations 3 and 4
year: 2025
reach: exact
checked: formula
code: none released

Attends only to the highest: sum(q * k over sketch)
Reads only the highest dims: abs(q)
In layers where the query attends to everything, `attend` and `settle` are the only launches.

Legend: `kvdsl.runtime.gpu.kernels.hooks` says what each function does, and what it is given.
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops, packed, select

KERNELS = ("look", "choose", "settle")
CONSTANTS = {
    "COMPACT": False,
    "SKETCHES": True,
    "BOUNDS": False,
    "LOGITS": False,
    "OBSERVES": False,
    "OBSERVED": False,
    "DRAWS": False,
    "SHARES": False,
    "AGREES": False,
    "POOLS": False,
    "SCORES": 0,
    "TOPS": 0,
    "ENDS": 0,
}
SPREADS = False  # whether several programs of `settle` share a KV head's slots


@triton.jit
def find_sketch(query, sketch, prompt, numbers, own_pair, own_row, now, width, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, W_PAD: tl.constexpr):
    number_sketch_dims = tl.load(numbers + own_row * 3 + 1)
    number_sketch_every = tl.load(numbers + own_row * 3 + 2)
    j = tl.arange(0, W_PAD)
    dims = tl.load(sketch + own_pair * width + j, mask=j < width, other=-1)
    due = select.is_due(prompt, own_row, now, ops.count(number_sketch_every))
    if due:
        g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
        q = tl.load(query + g[:, None] * D + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0).to(tl.float32)
        by = ops.over_group(tl.abs(q), g, G, "mean")
        dims = select.highest_dims(by, d, ops.count(number_sketch_dims), width, D, D_PAD, W_PAD)
    return dims, due

@triton.jit
def look(
    which,  # [B] int32: with SOME, each row's index in the cache
    query,  # [B, H * G, D]
    new_key,  # [B, H, D]
    keys,  # [R, H, N, D]; with SIZE > 0 [H, blocks, SIZE, D]
    first_rows,  # [R, H] int64: index of the KV head's first row in `keys` and `values`
    table,  # [R, blocks of a row] int64: with SIZE > 0, index in the pool of each block of slots
    position,  # [R, H, N] int32
    sketch,  # [R, H, W] int32: dims in ascending order, padded with -1
    sketch_keys,  # [R, H, N, W]: keys restricted to these dims
    prompt,  # [R] int32: prompt length in tokens
    grades,  # [B, H, N + 16] int32, output: scores of the slots and of the new token, in an order-preserving encoding
    levels,  # [B, H, S, LEVELS] int32, output: number of the split's slots per level
    first_free,  # [B, H, S] int32, output: first free slot of the split; N or more: none
    held,  # [B, H, S] int32, output: tokens in the split
    seen,  # [R] int32: position of the new token
    real,  # [B] bool: False for padding
    numbers,  # [R, 3] float64
    copied,  # [R] int32: whether the sketched keys are valid; otherwise they are rebuilt from the keys
    slots,
    per_split,  # slots per split
    width,  # W
    window,  # tokens that a query sees; 2**30: all
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    SIZE: tl.constexpr,  # slots per block of the pool; 0 without blocks
    KV: tl.constexpr,  # the cache's `kv_dtype`
    G: tl.constexpr,
    G_PAD: tl.constexpr,  # sizes rounded up to powers of two
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Score one split's slots; the grid is (S, H, B)."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(seen + own_row)
    query += pair * G * D
    new_key += pair * D
    keys += layout.first_row(first_rows, own_pair, slots, SIZE > 0) * packed.row(D, KV)
    table = layout.table_of(table, own_row, slots, SIZE)
    grades += pair * (slots + 16)
    mine = pair * splits + split
    position += own_pair * slots
    g, j = tl.arange(0, G_PAD), tl.arange(0, W_PAD)
    sketch_keys += own_pair * slots * width
    dims, due = find_sketch(query, sketch, prompt, numbers, own_pair, own_row, now, width, G, G_PAD, D, D_PAD, W_PAD)
    tl.store(sketch + own_pair * width + j, dims, mask=j < tl.where((split == 0) & due, width, 0))
    due_again = (tl.load(copied + own_row) == 0) | due
    q = tl.load(query + g[:, None] * D + dims[None, :], mask=(g[:, None] < G) & (dims[None, :] >= 0), other=0.0)

    gap = tl.full([BLOCK], ops.INT_MAX, tl.int32)
    live = tl.zeros([BLOCK], tl.int32)
    first = split * per_split
    end = tl.minimum(first + per_split, slots)
    if due_again:
        select.gather_keys(keys, sketch_keys, position, first, end, dims, j, width, D, D_PAD, BLOCK, table, SIZE, KV)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        pos = tl.load(position + i, mask=inside, other=-1)
        gap = tl.where(inside & (pos < 0), tl.minimum(gap, i), gap)
        live += (pos >= 0).to(tl.int32)
        k = select.sketched_keys(sketch_keys, i.to(tl.int64), inside & (i < now), pos >= 0, dims, j, width)
        by = select.product(q, k, g, G, "mean", DOT)
        select.grade_slots(grades, i, inside, pos, now, window, by)
    if split == 0:
        select.grade_new(grades, slots, q, packed.over_new(new_key, dims, D, D_PAD, KV), g, G, "mean")
    tl.store(first_free + mine, tl.min(gap, 0))
    tl.store(held + mine, tl.sum(live, 0))
    select.count_levels(levels + mine * select.LEVELS, grades, first, end)


@triton.jit
def choose(
    which,  # [B] int32: with SOME, each row's index in the cache
    position,  # [R, H, N] int32
    grades,  # [B, H, N + 16] int32: scores
    levels,  # [B, H, S, LEVELS] int32: number of scores per level
    candidates,  # [B, H, N + 16] int32, output: candidates of each program's share, in order
    listed,  # [B, H, PIECES] int32, output: number of these candidates
    arrived,  # [B, H] int32: number of the KV head's programs that have finished; 0 before and after the launch
    chosen,  # [B, H, N] int32, output: selected slots, in order
    found,  # [B, H] int32, output: number of selected slots
    joins,  # [B, H] int32, output: whether the new token is selected
    taken,  # [B, H, N] int8, output: 1 for selected slots, if requested
    seen,  # [R] int32: position of the new token
    real,  # [B] bool: False for padding
    numbers,  # [R, 3] float64
    slots,
    splits,
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    S_PAD: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select the slots with the highest scores; the grid is (PIECES, H, B)."""
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces, heads = tl.num_programs(0), tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    found += pair
    joins += pair
    if tl.load(real + row) == 0:
        tl.store(found, 0)
        tl.store(joins, 0)
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(seen + own_row)
    number_select = tl.load(numbers + own_row * 3)
    position += own_pair * slots
    grades += pair * (slots + 16)
    candidates += pair * (slots + 16)
    chosen += pair * slots
    taken += pair * slots
    units, wanted = tl.minimum(slots, now), ops.count(number_select)  # a token's slot is never above its position

    # Collect the candidates of this program's share.
    lowest = select.lowest_level(levels, pair, splits, wanted, S_PAD)
    per_piece, begin, end = select.share(units, piece, pieces, BLOCK)
    count = select.narrow(position, grades, candidates, begin, end, lowest, slots, units, 1, now, 0, -1, ops.INT_MAX, False, BLOCK)
    listed += pair * pieces
    tl.store(listed + piece, count)

    # The last program to finish selects among the candidates.
    if ops.last_to_arrive(arrived, pair, pieces):
        total, certain = select.gather(grades, candidates, listed, pieces, per_piece, PIECES_PAD, BLOCK)
        total, certain = select.add_new(grades, candidates, total, certain, slots, now, -1, ops.INT_MAX)
        select.pick(position, grades, candidates, chosen, found, joins, taken, total, certain, slots, units, 1, now, 0, wanted, False, False, BLOCK)
