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

Legend: `kvdsl.runtime.gpu.kernels.hooks` says what each function does, and what it is given.
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops, select

KERNELS = ("look", "choose", "settle")
CONSTANTS = {
    "SPREADS": False,
    "LOGITS": False,
    "SLIDES": False,
    "OBSERVES": False,
    "MERGES": False,
    "LAZY": False,
    "DRAWS": False,
    "COUNTS": False,
    "REDUCTIONS": 0,
    "COMPACT": False,
    "SKETCHES": True,
    "BOUNDS": False,
    "BY": 'sketch_dot',
    "GROUP": 'mean',
    "VOTE": '',
    "PROTECTS": False,
    "OBSERVED": False,
    "SHARES": False,
    "AGREES": False,
    "POOLS": False,
    "SCORES": 0,
    "TOPS": 0,
    "ENDS": 0,
}


@triton.jit
def read_numbers(numbers, constants, own_row, own_pair, head, heads, D: tl.constexpr):
    number_select = tl.load(numbers + own_row * 3)
    return (number_select,)


@triton.jit
def selected(own_numbers):
    (number_select,) = own_numbers
    return ops.count(number_select)


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
