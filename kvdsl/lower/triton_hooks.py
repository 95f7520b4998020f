"""The functions of a generated `kernels_triton.py`, which kernels call; `kvdsl/runtime/gpu/kernels/hooks.py` describes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvdsl.lower.triton_expressions import Loop

Indexed = tuple[tuple[str, int], ...]
"""Names, each with its index in a table."""

ARGUMENTS = {
    "read_numbers": "numbers, constants, own_row, own_pair, head, heads, D: tl.constexpr",
    "find_columns": "columns, ring_rows, column_stride, at",
    "place": (
        "own_numbers, own_columns, constants, supplied, slot, key, value, d, e, pair, head, heads, D: tl.constexpr, "
        "E: tl.constexpr"
    ),
    "update": (
        "own_numbers, own_columns, column_stride, position, logits, base, above, taken, begin, end, slots, now, live, "
        "window, random_key, G: tl.constexpr, G_PAD: tl.constexpr, SELECTS: tl.constexpr, BLOCK: tl.constexpr"
    ),
    "overflow": "own_numbers, now, live",
    "ends": "own_numbers, now, live",
    "tops": "own_numbers, now, live",
    "rank_slots": (
        "own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants, "
        "own_row, own_pair, head, heads, logits, base, above, taken, begin, end, slots, now, live, first, last, window, "
        "random_key, OBSERVES: tl.constexpr, STORES: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, "
        "SELECTS: tl.constexpr, SIZE: tl.constexpr, K_AS: tl.constexpr, V_AS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, "
        "E: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ROW_TILE: tl.constexpr, BLOCK: tl.constexpr"
    ),
    "page_size": "numbers, own_row, own_pair",
    "selected": "own_numbers",
    "find_sketch": (
        "query, sketch, prompt, numbers, own_pair, own_row, now, width, G: tl.constexpr, G_PAD: tl.constexpr, "
        "D: tl.constexpr, D_PAD: tl.constexpr, W_PAD: tl.constexpr"
    ),
    "reduce_queries": (
        "own_numbers, own_columns, column_stride, query, keys, position, lse, live_slots, reduced, reduced_stride, "
        "start, stop, now, asked, t, tokens, scaling, softcap, window, random_key, query_head, query_token, key_slot, "
        "G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, "
        "CAPPED: tl.constexpr, DOT: tl.constexpr"
    ),
    "fold_queries": (
        "own_numbers, own_columns, column_stride, query, lse, live_slots, reduced, reduced_stride, order, i, inside, "
        "pos, since, until, k, first, end, tokens, scaling, softcap, window, random_key, query_head, query_token, "
        "G: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, "
        "CAPPED: tl.constexpr"
    ),
}
"""By function, as `hooks.py` has them; this module also runs where `kvdsl.runtime` is absent."""

_VECTORS = {
    "k": "keys, {}, {}, {}, own_table, SIZE, D, D_PAD, K_AS",
    "v": "values, {}, {}, {}, own_table, SIZE, E, E_PAD, V_AS",
}


@dataclass(frozen=True)
class Hook:
    """A function of the policy, one statement a line of `body`."""

    name: str
    body: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The text between the parentheses of its definition."""
        return ARGUMENTS[self.name]


@dataclass(frozen=True)
class Tables:
    """Where kernels find what the policy's expressions name.

    Attributes:
        numbers: number of entries per row of the table `numbers`. row: the index of the head's row in it.
        own: names in `own_numbers`: the entries and the constants that the kernels of this module read. columns, rings: names in
            `own_columns`; a ring's index is its index among the rings.
    """

    numbers: int
    row: str
    own: Indexed
    constants: Indexed
    columns: Indexed
    rings: Indexed

    def number(self, index: int) -> str:
        """Print the load of a number."""
        return f"tl.load(numbers + {self.row} * {self.numbers}{_plus(index)})"

    def hooks(self) -> Iterator[Hook]:
        """Yield the functions that load numbers and find columns."""
        loads = [f"number_{name} = {self.number(n)}" for name, n in self.own]
        loads += [f"constant_{name} = tl.load(constants + {constant_row(n)})" for name, n in self.constants]
        if loads:
            yield Hook("read_numbers", (*loads, f"return {_tuple(self._numbers)}"))
        found = [f"{name}_at = columns + {times(n, 'column_stride')}at" for name, n in self.columns]
        found += [f"{name}_at = columns + tl.load(ring_rows{_plus(n)}) * column_stride + at" for name, n in self.rings]
        if found:
            yield Hook("find_columns", (*found, f"return {_tuple(self._columns)}"))

    @property
    def _numbers(self) -> list[str]:
        return [f"number_{name}" for name, _ in self.own] + [f"constant_{name}" for name, _ in self.constants]

    @property
    def _columns(self) -> list[str]:
        return [f"{name}_at" for name, _ in (*self.columns, *self.rings)]

    def hook(self, name: str, body: Iterable[str]) -> Hook:
        """Return a function that begins by naming what of the tuples its statements read."""
        lines = tuple(body)
        words = {*re.findall(r"\w+", "\n".join(lines))}
        tuples = {"own_numbers": self._numbers, "own_columns": self._columns}
        unpacked = [f"{_tuple(names)} = {given}" for given, names in tuples.items() if words & {*names}]
        return Hook(name, (*unpacked, *lines))


def constant_row(n: int) -> str:
    """Print the offset of a KV head's row of the n-th tensor."""
    row = {0: "head", 1: "(heads + head)"}.get(n, f"({n} * heads + head)")
    return f"{row} * D"


def load_vectors(wanted: Indexed) -> Iterator[str]:
    """Yield loads of the tensors with a number per dim."""
    for name, n in wanted:
        yield f"constant_{name} = tl.load(constants + {constant_row(n)} + d, mask=d < D, other=0.0)"


def load_supplied(wanted: Indexed) -> Iterator[str]:
    """Yield loads of the caller's values for the new token."""
    for name, n in wanted:
        yield f"supplied_{name} = tl.load(supplied + {times(n, 'tl.num_programs(2) * heads')}pair)"


def over_slots(loop: Loop, begin: str = "begin", end: str = "end") -> Iterator[str]:
    """Yield the lines of a loop over slots, with what it needs of each block of slots."""
    yield from loop.before
    if loop.body:
        size = ("ROW_TILE" if loop.reads else "TILE") if loop.inner else "ROWS" if loop.reads else "BLOCK"
        yield f"for start in range({begin}, {end}, {size}):"
        yield from indented(_block(loop, size, end))
    yield from loop.after


def _block(loop: Loop, size: str, end: str) -> Iterator[str]:
    yield f"i = start + tl.arange(0, {size})"
    yield f"inside = i < {end}"
    yield "pos = tl.load(position + i, mask=inside, other=-1)"
    yield from (f"{name} = layout.vectors({_VECTORS[name].format('first_row', 'i', 'pos >= 0')})" for name in loop.reads)
    yield from loop.body
    if loop.inner:
        yield f"for opposite in range(0, slots, {size}):"
        yield from indented(_opposite(loop, size))
        yield from loop.behind


def _opposite(loop: Loop, size: str) -> Iterator[str]:
    yield f"j = opposite + tl.arange(0, {size})"
    yield "other_pos = tl.load(position + j, mask=j < slots, other=-1)"
    yield "there = other_pos >= 0"
    yield from (f"other_{name} = layout.vectors({_VECTORS[name].format('first_row', 'j', 'there')})" for name in loop.reads)
    yield from loop.inner


def indented(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a block."""
    return (f"    {line}" for line in lines)


def _tuple(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return text if "," in text else f"({text},)"


def _plus(n: int) -> str:
    return f" + {n}" if n else ""


def times(n: int, stride: str) -> str:
    """Print n strides, as the left side of a sum."""
    return {0: "", 1: f"{stride} + "}.get(n, f"{n} * {stride} + ")
