"""Loops over slots in Triton: what gives a block's values the names that expressions read, and the reductions that other expressions need,
each in a loop of its own before theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvdsl.ir.nodes import Axis, Expr, Policy, Reduce
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
)
from kvdsl.lower.triton_expressions import (
    CAN,
    OF_VECTORS,
    BlockPrinter,
    Pass,
    TilePrinter,
    dims_there,
    of_every_slot,
    ring_name,
    ring_size,
)

INITIAL = {"max": 'float("-inf")', "min": 'float("inf")', "fold": 'float("nan")'}
"""What a fold begins with, where that is not 0."""
EXTREMES = {"max": "maximum", "min": "minimum"}
"""Of two numbers, in `ops.py`."""
_FOLDS = {"max": "ops.largest", "min": "ops.least"}
_WINDOW = Use("helper", "window")
_SLOTS = {
    "visible": Fragment("visible = (pos >= 0) & (now - pos < window)", uses=(_WINDOW,)),
    "cached": Fragment("cached = pos >= 0"),
}
Rows = Mapping[str, int]
"""Rows of `work` that hold a number for every slot, by its name."""


def values_of(policy: Policy, slots: str, uses: Iterable[Use], rows: Rows | None = None) -> list[Fragment]:
    """Statements that give a block's values the names that expressions read. Keys and values have theirs already.

    Args:
        slots: which count, by name.
        rows: where numbers of slots are to be found; None where keys and values cannot be read.
    """
    inputs = names_of(uses, "input")
    if {*inputs} & ({"q", "k", "v"} if rows is None else {"q"}):
        raise NotLowerable(OF_VECTORS)
    return [
        *([_SLOTS[slots]] if slots in _SLOTS else []),
        *(fragment(f"{name} = {{}}", value) for name, value in _from_queries(policy).items() if name in inputs),
        *(Fragment(f"{name} = tl.load({name}_at + i, mask=inside, other=0.0)") for name in names_of(uses, "column")),
        *(_ring_value(use) for use in dict.fromkeys(uses) if use.kind == "ring"),
        *(_from_work(name, rows or {}) for name in names_of(uses, "row")),
    ]


def _from_work(name: str, rows: Rows) -> Fragment:
    return Fragment(f"{name} = tl.load(work + {row_at(rows[name])}i, mask=inside, other=0.0)")


def _from_queries(policy: Policy) -> dict[str, Fragment]:
    """The inputs that a block computes, by name."""
    attn = f'ops.attn(logits, base, above, i, slots, G, G_PAD, "{policy.group}")'
    attn = attn if policy.select is None else f"ops.attended({attn}, taken, i, inside, SELECTS)"
    return {
        "attn": Fragment(attn),
        "logit": Fragment(f'ops.logit(logits, i, slots, G, G_PAD, "{policy.group}")'),
        "observed": Fragment("ops.observed(pos, now, window)", uses=(_WINDOW,)),
    }


def _ring_value(use: Use) -> Fragment:
    arguments = f"{use.name}_at, column_stride, {{}}, i, pos, now, window"
    return fragment(f"{ring_name(use)} = ops.ring_{use.op}({arguments})", ring_size(use.name), uses=[_WINDOW])


def hoisted_loops(
    policy: Policy, slots: str, exprs: list[Expr], rows: dict[str, int] | None = None
) -> tuple[list[Pass], dict[Expr, str]]:
    """Loops that compute every reduction over slots or dims, inner ones first, and the names these get.

    Args:
        rows: gets the rows of `work` in which numbers of slots are left; None where keys and values cannot be read.
    """

    def loop(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> Pass | None:
        if not isinstance(expr, Reduce):
            raise NotLowerable(missing(expr))
        if rows is None and (expr.axis is Axis.DIM or is_vector(expr)):
            raise NotLowerable(OF_VECTORS)
        CAN.check(expr.op, expr.over)
        if expr.axis is Axis.DIM:
            assert rows is not None
            return _over_dims(policy, slots, expr, name, names, rows)
        printer = TilePrinter(names) if is_vector(expr) else BlockPrinter(names)
        body = printer.value(expr.body)
        return _reduction(name, expr, body, slots, values_of(policy, slots, body.uses, rows))

    return hoist(exprs, loop)


def _over_dims(policy: Policy, slots: str, expr: Reduce, name: str, names: dict[Expr, str], rows: dict[str, int]) -> Pass:
    """What finds a reduction over dims: a loop that leaves it in a row of `work`, or one statement, if slots have it in common."""
    there = dims_there(expr.body)
    if not of_every_slot(expr):
        return Pass((fragment(f"{name} = ops.{expr.op}_over({{}}, {there}, 0)", BlockPrinter(names).value(expr.body)),), ())
    body = TilePrinter(names).value(expr.body)
    values = values_of(policy, slots, body.uses, rows)
    rows[name] = len(rows)
    found = fragment(f"{name} = ops.{expr.op}_over({{}}, ({there})[None, :], 1)", body)
    left = Fragment(f"tl.store(work + {row_at(rows[name])}i, {name}, mask=inside)")
    return Pass((), (*values, found, left), (Fragment("tl.debug_barrier()"),))


def _reduction(name: str, expr: Reduce, body: Fragment, slots: str, before: list[Fragment]) -> Pass:
    """The loop of one reduction over slots, of numbers or, dim by dim, of vectors."""
    zero, start, seen = "0.0", INITIAL.get(expr.op, ""), slots
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
    """Where a row of `work` begins, to be added to what stands behind it."""
    return {0: "", 1: "slots + "}.get(n, f"{n} * slots + ")
