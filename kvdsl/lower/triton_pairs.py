"""Print comparisons of slots with each other: reductions over the other slots, in scores and protections of an eviction.

Rows of `work` hold the operands that vary over one slot, `own` or `other`. A loop over blocks of slots contains a loop over all slots. Its
tiles, [slots, other slots], are reduced after the inner loop. Keys and values are compared by products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Reduce, parts_of
from kvdsl.ir.visitors import axes_of
from kvdsl.lower.expression import (
    Fragment,
    NotLowerable,
    Use,
    dims_of,
    fragment,
    is_condition,
    names_of,
    of_slot_and_other,
    uses_of,
)
from kvdsl.lower.triton_expressions import BlockPrinter, Pass, TilePrinter, dims_there

POSITION = "position"
"""The operand without a row of `work`: loops load positions in any case."""
_OF_VECTORS = "what slots have of each other dim by dim, except products of keys, or of values"
_NOTHING = {"max": 'float("-inf")', "min": 'float("inf")'}

Row = Callable[[Expr], str]
"""Maps an operand of one slot to the name of its row of `work`, or to `POSITION`."""


def over_others(expr: Reduce, names: dict[Expr, str], row: Row, address: Callable[[str], str]) -> Pass:
    """Return the loops of a reduction, which store it in `compared`, [slots of a block].

    Args:
        names: names of results that earlier loops compute.
        row: returns the row of an operand of one slot. address: prints the offset of a row of `work`, as the left side of a sum.
    """
    if Axis.DIM in axes_of(expr):
        raise NotLowerable(_OF_VECTORS)
    of_dims = (part for part in dict.fromkeys(parts_of(expr.body, Reduce, axis=Axis.DIM)) if Axis.OTHER in axes_of(part))
    products = {product: f"product_{n}" for n, product in enumerate(of_dims)}
    joined = _joined(expr, _PairPrinter(names, row, products).value(expr.body))
    size = "ROW_TILE" if products else "TILE"
    mine, theirs = [], []
    for product, called in products.items():
        own, other = _vectors(product, names, row)
        mine.append(fragment(f"own_of_{called} = {{}}", own))
        theirs.append(fragment(f'{called} = tl.dot(own_of_{called}, tl.trans({{}}), input_precision="ieee")', other))
    among = "there[None, :]" if expr.within == "self" else "there[None, :] & (pos[:, None] != other_pos[None, :])"
    uses = uses_of(*mine, *theirs, joined)
    start = f"tl.full([{size}, {size}], {_NOTHING.get(expr.op, '0.0')}, tl.float32)"
    return Pass(
        before=(),
        body=(*_loads(uses, "own", address), *mine, Fragment(f"compared = {start}")),
        inner=(*_loads(uses, "other", address), *theirs, Fragment(f"among = {among}"), joined),
        behind=(Fragment(f"compared = {_reduced(expr, size)}"),),
    )


def _vectors(product: Reduce, names: dict[Expr, str], row: Row) -> tuple[Fragment, Fragment]:
    """Print both sides of a product, the slots' vectors and the other slots', padded with zeros."""
    sides = of_slot_and_other(product)
    if sides is None or dims_of(sides[0]) != dims_of(sides[1].body):
        raise NotLowerable(_OF_VECTORS)
    there = f"({dims_there(sides[0])})[None, :]"
    own, other = _VectorPrinter(names, row, "own").value(sides[0]), _VectorPrinter(names, row, "other").value(sides[1].body)
    return fragment(f"tl.where({there}, {{}}, 0.0)", own), fragment(f"tl.where({there}, {{}}, 0.0)", other)


def _joined(expr: Reduce, body: Fragment) -> Fragment:
    """Print the statement that accumulates a tile in `compared`."""
    if expr.op in _NOTHING:
        return fragment(f"compared = ops.{expr.op}imum(compared, tl.where(among, {{}}, {_NOTHING[expr.op]}))", body)
    return fragment("compared += tl.where(among, {}, 0.0)", body)


def _reduced(expr: Reduce, size: str) -> str:
    """Print the reduction of `compared` over the other slots."""
    if expr.op == "max":
        return "ops.largest(compared, (pos >= 0)[:, None], 1)"
    if expr.op == "min":
        return "-ops.largest(-compared, (pos >= 0)[:, None], 1)"
    if expr.op == "sum":
        return "tl.sum(compared, 1)"
    count = "live" if expr.within == "self" else "(live - 1)"
    return f"tl.div_rn(tl.sum(compared, 1), tl.zeros([{size}], tl.float32) + {count})"


# -- what belongs to one slot ------------------------------------------------------------------------------------------


def _held(row: Row, expr: Expr, whose: str, along: str) -> Fragment:
    """Print an operand of one slot, `own` or `other`, along its side of a tile."""
    name = row(expr)
    text = f"{whose}_{name}{along}"
    return Fragment(f"({text} != 0)" if is_condition(expr) else text, uses=(Use(whose, name),))


def _loads(uses: Iterable[Use], whose: str, address: Callable[[str], str]) -> Iterator[Fragment]:
    """Yield statements that load the operands in use."""
    i, pos, inside = ("i", "pos", "inside") if whose == "own" else ("j", "other_pos", "there")
    for name in names_of(uses, whose):
        if name == POSITION:
            yield Fragment(f"{whose}_{name} = {pos}.to(tl.float32)")
        else:
            yield Fragment(f"{whose}_{name} = tl.load(work + {address(name)}{i}, mask={inside}, other=0.0)")


def _of_one_slot(expr: Expr) -> bool:
    return axes_of(expr) == {Axis.SLOT}


@dataclass(frozen=True)
class _PairPrinter(BlockPrinter):
    """Print float32 tiles [slots, other slots]. `products`: names of the products of vectors."""

    row: Row
    products: dict[Reduce, str]

    def __call__(self, expr: Expr, at_least: int = 0) -> Fragment:
        if expr.kind == "other":
            if _of_one_slot(expr.body):
                return _held(self.row, expr.body, "other", "[None, :]")
            if axes_of(expr.body):
                raise NotLowerable(_OF_VECTORS)
            return self(expr.body, at_least)
        return _held(self.row, expr, "own", "[:, None]") if _of_one_slot(expr) else super().__call__(expr, at_least)

    def reduce(self, expr: Reduce) -> Fragment:
        if Axis.OTHER not in axes_of(expr):
            return super().reduce(expr)
        if expr not in self.products:
            raise NotLowerable("a reduction of what a slot is compared with, inside another one")
        return Fragment(self.products[expr])

    def operand(self, side: Expr, whole: Call) -> Fragment:
        return super().operand(side, whole) if axes_of(side) else fragment("ops.truth({})", self.truth(side))


@dataclass(frozen=True)
class _VectorPrinter(TilePrinter):
    """Print float32 tiles [slots, dims of keys or values], for the slots or the other ones."""

    row: Row
    whose: str

    def __call__(self, expr: Expr, at_least: int = 0) -> Fragment:
        if _of_one_slot(expr):
            return _held(self.row, expr, self.whose, "[:, None]")
        return super().__call__(expr, at_least)

    def parts(self, expr: Expr) -> Fragment:
        made = super().parts(expr)
        other = self.whose == "other" and expr in (Input(name="k"), Input(name="v"))
        return Fragment(f"other_{made.text}", uses=made.uses) if other else made
