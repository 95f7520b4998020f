"""Print loops over slots in Triton.

The statements of a loop name the values that expressions read. Each reduction runs in a loop of its own, before the loops that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Reduce, is_call
from kvdsl.ir.ops import POOLS
from kvdsl.ir.visitors import axes_of
from kvdsl.lower.expression import (
    Fragment,
    NotLowerable,
    OfAllSlots,
    Use,
    dims_of,
    fragment,
    hoist,
    is_vector,
    missing,
    names_of,
    uses_of,
    whole,
)
from kvdsl.lower.step import START, Step
from kvdsl.lower.triton_expressions import (
    CAN,
    OF_VECTORS,
    BlockPrinter,
    CountPrinter,
    Pass,
    TilePrinter,
    dims_there,
    number,
    of_every_slot,
    ring_name,
    ring_size,
)
from kvdsl.lower.triton_pairs import POSITION, over_others

PAGE = "page"
"""The page number of a slot, which expressions read like a column."""
BARRIER = Fragment("tl.debug_barrier()")

EXTREMES = {"max": "maximum", "min": "minimum"}
"""Functions of two numbers in `ops.py`."""
_FOLDS = {"max": "ops.largest", "min": "ops.least"}
_WINDOW = Use("helper", "window")
_SLOTS = {
    "visible": Fragment("visible = (pos >= 0) & (now - pos < window)", uses=(_WINDOW,)),
    "cached": Fragment("cached = pos >= 0"),
}
Rows = Mapping[str, int]
"""Index in `work` of each row, by the name of its value; a row has a number per slot."""


def values_of(step: Step, slots: str, uses: Iterable[Use], rows: Rows | None = None) -> list[Fragment]:
    """Return statements that name the values which expressions read. The template loads keys and values.

    Args:
        slots: the name of the mask of slots that count.
        rows: rows of `work` to load from; None if the loop cannot read keys and values.
    """
    inputs, columns = names_of(uses, "input"), names_of(uses, "column")
    if {*inputs} & ({"q", "k", "v"} if rows is None else {"q"}):
        raise NotLowerable(OF_VECTORS)
    return [
        *([_SLOTS[slots]] if slots in _SLOTS else []),
        *(fragment(f"{name} = {{}}", value) for name, value in _from_queries(step).items() if name in inputs),
        *(load_column(name) for name in columns if name != PAGE),
        *([_page(step)] if PAGE in columns else []),
        *(_ring_value(use) for use in dict.fromkeys(uses) if use.kind == "ring"),
        *(_from_work(name, rows or {}) for name in names_of(uses, "row")),
    ]


def load_column(name: str) -> Fragment:
    """Print the statement that names a column's values."""
    return Fragment(f"{name} = tl.load({name}_at + i, mask=inside, other=0.0)")


def _page(step: Step) -> Fragment:
    after = fragment("ops.count({})", number("page_after")) if step.pages_after else Fragment("0")
    return fragment(f"{PAGE} = ops.page_of(pos, ops.count({{}}), {{}})", number("page"), after)


def _from_work(name: str, rows: Rows) -> Fragment:
    return Fragment(f"{name} = tl.load(work + {row_at(rows[name])}i, mask=inside, other=0.0)")


def _from_queries(step: Step) -> dict[str, Fragment]:
    """Print the inputs that a block computes from its query, by name."""
    attn = f'ops.attn(logits, base, above, i, slots, G, G_PAD, "{step.group}")'
    attn = attn if step.select is None else f"ops.attended({attn}, taken, i, inside, SELECTS)"
    return {
        "attn": Fragment(attn),
        "logit": Fragment(f'ops.logit(logits, i, slots, G, G_PAD, "{step.group}")'),
        "observed": Fragment("ops.observed(pos, now, window)", uses=(_WINDOW,)),
    }


def _ring_value(use: Use) -> Fragment:
    arguments = f"{use.name}_at, column_stride, {{}}, i, pos, now, window"
    return fragment(f"{ring_name(use)} = ops.ring_{use.op}({arguments})", ring_size(use.name), uses=[_WINDOW])


def hoisted_loops(
    step: Step,
    slots: str,
    exprs: list[Expr],
    rows: dict[str, int] | None = None,
    known: Mapping[Expr, str] = MappingProxyType({}),
) -> tuple[list[Pass], dict[Expr, str]]:
    """Return loops that compute every reduction over slots, others or dims, and every pool, innermost first, and the names of the results.

    Args:
        rows: receives the rows of `work` that the loops store; None if they cannot read keys and values.
        known: names of results that earlier loops compute.
    """
    held: dict[Expr, str] = {Input(name="position"): POSITION}

    def loops(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> list[Pass] | None:
        if is_call(expr, *POOLS):
            assert rows is not None, "only a score pools"
            return [_pool(step, expr, name, names, rows)]
        if expr.kind != "reduce":
            raise NotLowerable(missing(expr))
        if rows is None and (expr.axis is Axis.DIM or is_vector(expr)):
            raise NotLowerable(OF_VECTORS)
        CAN.check(expr.op, expr.over)
        if expr.axis is Axis.OTHER:
            assert rows is not None, "slots are compared in a settle alone"
            return _over_others(step, expr, name, names, held, rows)
        if expr.axis is Axis.DIM:
            assert rows is not None
            return None if Axis.OTHER in axes_of(expr) else [_over_dims(step, slots, expr, name, names, rows)]
        printer = TilePrinter(names) if is_vector(expr) else BlockPrinter(names)
        body = printer.value(expr.body)
        return [_reduction(name, expr, body, slots, values_of(step, slots, body.uses, rows))]

    found, names = hoist(exprs, loops, known)
    return [one for several in found for one in several], names


def _over_others(
    step: Step, expr: Reduce, name: str, names: dict[Expr, str], held: dict[Expr, str], rows: dict[str, int]
) -> list[Pass]:
    """Return a loop that stores the operands of the comparison in `work`, if they are missing there, and the loop that compares them.

    Args:
        held: names of the rows of `work` that hold an operand; receives the new ones.
    """
    new: list[Fragment] = []

    def row(of_one: Expr) -> str:
        if of_one in names:
            return names[of_one]
        if of_one not in held:
            called = held[of_one] = f"value_{len(rows)}"
            rows[called] = len(rows)
            new.append(_left(called, BlockPrinter(names).value(of_one), rows))
        return held[of_one]

    pairs = over_others(expr, names, row, lambda called: row_at(rows[called]))
    rows[name] = len(rows)
    compared = replace(pairs, behind=(*pairs.behind, _left(name, Fragment("compared"), rows)), after=(BARRIER,))
    return [*([Pass((), (*values_of(step, "", uses_of(*new), rows), *new), (BARRIER,))] if new else []), compared]


def _pool(step: Step, expr: Call, name: str, names: dict[Expr, str], rows: dict[str, int]) -> Pass:
    """Return the loop that stores the pool's operand in a row of `work`, and the call that pools it in place."""
    x, places_wide = expr.args
    body = BlockPrinter(names).value(x)
    values = values_of(step, "", body.uses, rows)
    first = len(rows)
    rows |= {of: first + n for n, of in enumerate((name, f"places_of_{name}", f"order_of_{name}"))}
    at, places, order = (f"work + {first + n} * slots" for n in range(3))
    if places_wide.kind == "number":
        size = Fragment(str(max(1, whole(places_wide.value))))
    else:
        size = fragment("ops.count(ops.at_least_one({}))", CountPrinter().value(places_wide))
    mean = expr.op == "mean_pool"
    pooled = fragment(f"neighbours.pool(position, kept, {at}, {places}, {order}, slots, {{}}, {mean}, TILE, BLOCK)", size)
    return Pass((), (*values, _left(name, body, rows)), (BARRIER, pooled, BARRIER))


def _left(name: str, value: Fragment, rows: Rows) -> Fragment:
    """Print the store of a value in its row of `work`."""
    return fragment(f"tl.store(work + {row_at(rows[name])}i, {{}}, mask=inside)", value)


def _over_dims(step: Step, slots: str, expr: Reduce, name: str, names: dict[Expr, str], rows: dict[str, int]) -> Pass:
    """Return a reduction over dims: a loop that stores it in a row of `work`, or one statement if it does not vary over slots."""
    there = dims_there(expr.body)
    if not of_every_slot(expr):
        return Pass((fragment(f"{name} = ops.{expr.op}_over({{}}, {there}, 0)", BlockPrinter(names).value(expr.body)),), ())
    body = TilePrinter(names).value(expr.body)
    values = values_of(step, slots, body.uses, rows)
    rows[name] = len(rows)
    found = fragment(f"{name} = ops.{expr.op}_over({{}}, ({there})[None, :], 1)", body)
    return Pass((), (*values, found, _left(name, Fragment(name), rows)), (BARRIER,))


def _reduction(name: str, expr: Reduce, body: Fragment, slots: str, before: list[Fragment]) -> Pass:
    """Return the loop of one reduction over slots, of numbers or, per dim, of vectors."""
    zero, start, seen = "0.0", BlockPrinter({}).number(START.get(expr.op, 0.0)).text, slots
    if is_vector(expr):
        size = "E_PAD" if dims_of(expr.body) == "v" else "D_PAD"
        zero, start, seen = f"tl.zeros([{size}], tl.float32)", f"tl.full([{size}], {start}, tl.float32)", f"{slots}[:, None]"
    if expr.op in EXTREMES:
        fold = f"{name} = ops.{EXTREMES[expr.op]}({name}, {_FOLDS[expr.op]}({{}}, {seen}))"
        return Pass((Fragment(f"{name} = {start}"),), (*before, fragment(fold, body)))
    added = fragment(f"{name} += ops.total({{}}, {seen})", body)
    if expr.op == "sum":
        return Pass((Fragment(f"{name} = {zero}"),), (*before, added))
    assert expr.op == "mean", expr.op
    return Pass(
        (Fragment(f"{name}, {name}_count = {zero}, 0.0"),),
        (*before, added, Fragment(f"{name}_count += tl.sum({slots}.to(tl.float32), 0)")),
        (Fragment(f"{name} = tl.div_rn({name}, {name}_count)"),),
    )


def row_at(n: int) -> str:
    """Print the offset of a row of `work`, as the left side of a sum."""
    return {0: "", 1: "slots + "}.get(n, f"{n} * slots + ")
