"""The functions of a policy that the kernels call, here those of a policy that keeps every token and observes nothing.

A generated `kernels_triton.py` defines the ones that its policy needs otherwise; `kvdsl.runtime.gpu.kernels.kernels_of` puts them into the
kernels' modules. `kvdsl.lower.triton_hooks` prints them with these arguments.

Legend, in addition to the kernels':
    own_numbers: the policy's numbers and constants for one KV head of one row, a tuple of scalars, as `read_numbers` returns it.
    own_columns: pointers to the head's N values of each column and ring, a tuple, as `find_columns` returns it.
    column_stride: number of elements between two columns.
    random_key: key of the head's random numbers, if the policy draws any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops


@triton.jit
def read_numbers(numbers, constants, own_row, own_pair, head, heads, D: tl.constexpr):
    """Return `own_numbers`. Never empty: not every Triton returns empty tuples."""
    return (0,)


@triton.jit
def find_columns(columns, ring_rows, column_stride, at):
    """Return `own_columns`; `at`: offset of the head's slots in a column."""
    return (0,)


@triton.jit
def place(
    own_numbers,
    own_columns,
    constants,
    supplied,
    slot,
    key,
    value,
    d,
    e,
    pair,
    head,
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Store the new token's value of each column; `key`, `value`: as the cache holds them, [D_PAD] and [E_PAD], with dims d and e."""


@triton.jit
def update(
    own_numbers,
    own_columns,
    column_stride,
    position,
    logits,
    base,
    above,
    taken,
    begin,
    end,
    slots,
    now,
    live,
    window,
    random_key,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    SELECTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold the query into the columns of the slots from `begin` to `end` that it sees. Only called if queries change columns and the policy
    does not MERGE.
    """


@triton.jit
def overflow(own_numbers, now, live):
    """Return budget, trigger, slack and most tokens that leave at once; see `evicting.overflow`."""
    return 0, 0, 0, 0


@triton.jit
def ends(own_numbers, now, live):
    """Return how many first and last tokens are protected."""
    return 0, 0


@triton.jit
def tops(own_numbers, now, live):
    """Return how many slots each `keep top` protects, a tuple of TOPS numbers. Not called if that is 0."""
    return (0,)


@triton.jit
def rank_slots(
    own_numbers,
    own_columns,
    column_stride,
    position,
    work,
    kept,
    keys,
    values,
    first_rows,
    table,
    constants,
    own_row,
    own_pair,
    head,
    heads,
    logits,
    base,
    above,
    taken,
    begin,
    end,
    slots,
    now,
    live,
    first,
    last,
    window,
    random_key,
    OBSERVES: tl.constexpr,
    STORES: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    SELECTS: tl.constexpr,
    SIZE: tl.constexpr,
    K_AS: tl.constexpr,
    V_AS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rank the slots; only those from `begin` to `end` if the policy SPREADS.

    Store what each `keep top` ranks by in `work`, and with STORES scores there and protection classes in `kept`. With OBSERVES, only if the
    policy MERGES, fold the query into the columns first, as `update` does.

    Returns:
        what `evicting.lower` has found, [BLOCK] each: the lowest keys, their slots, and counts of tokens at an end.
    """
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    return lowest, where, tl.zeros([BLOCK], tl.int32)


@triton.jit
def page_size(numbers, own_row, own_pair):
    """Return the number of tokens in a page, if the policy selects pages."""
    return 1


@triton.jit
def selected(own_numbers):
    """Return how many tokens a query selects, if it attends to a selection."""
    return 0


@triton.jit
def find_sketch(
    query,
    sketch,
    prompt,
    numbers,
    own_pair,
    own_row,
    now,
    width,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
):
    """Return the sketch's dims, [W_PAD], and whether this query selects them again; `query`: the G queries of one KV head."""
    return tl.full([W_PAD], -1, tl.int32), False


@triton.jit
def reduce_queries(
    own_numbers,
    own_columns,
    column_stride,
    query,
    keys,
    position,
    lse,
    live_slots,
    reduced,
    reduced_stride,
    start,
    stop,
    now,
    asked,
    t,
    tokens,
    scaling,
    softcap,
    window,
    random_key,
    query_head,
    query_token,
    key_slot,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Store the reductions of some queries of a prompt over the slots from `start` to `stop`; see `kvdsl.runtime.gpu.observing`."""


@triton.jit
def fold_queries(
    own_numbers,
    own_columns,
    column_stride,
    query,
    lse,
    live_slots,
    reduced,
    reduced_stride,
    order,
    i,
    inside,
    pos,
    since,
    until,
    k,
    first,
    end,
    tokens,
    scaling,
    softcap,
    window,
    random_key,
    query_head,
    query_token,
    G: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Fold the queries of a prompt into the columns of slots i, [SLOTS, 1]; see `kvdsl.runtime.gpu.observing`."""
