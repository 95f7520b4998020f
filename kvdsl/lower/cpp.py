"""A policy as C++: what a generated `kernels_cpu.cpp` holds. A reduction over slots is hoisted out of the loop and gets a name; so does
what a ring remembers, reduced for every slot at once. Expressions: `kvdsl/lower/cpp_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvdsl.ir.nodes import (
    Axis,
    Column,
    ColumnRef,
    Expr,
    Keep,
    Number,
    Policy,
    Reduce,
)
from kvdsl.ir.visitors import walk
from kvdsl.lower.cpp_expressions import (
    CAN,
    DIM,
    HEAD,
    SLOT,
    CountPrinter,
    DimPrinter,
    SlotPrinter,
    TokenPrinter,
    function_of,
    over_group,
    ring_name,
    size_of_dims,
)
from kvdsl.lower.expression import (
    Fragment,
    NotLowerable,
    Use,
    form_of_select,
    fragment,
    hoist,
    is_vector,
    names_of,
    reads,
    texts,
    uses_of,
)
from kvdsl.lower.refusals import refuse_select, refuse_statements
from kvdsl.lower.spelling import size_of
from kvdsl.passes.parts import in_parts

_INT_MAX = 2**31 - 1
_INITIAL = {"max": "-INFINITY", "min": "INFINITY"}


class _Settle(NamedTuple):
    """How it is found who leaves: `settle_before`, `settle`, `protect`, `scratch` and `settle_reads_keys` of a plan."""

    before: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    scratch: int = 0
    reads_keys: bool = False


_NOBODY_LEAVES = _Settle()


@dataclass(frozen=True)
class SelectPlan:
    """How a query chooses what it attends to.

    Attributes:
        by: which of `kvdsl::By`. `expression_before`, `expression`: for one of its own, statements before the
            loop over slots and the value.
        always: statements that protect what is attended to in any case.
        page, sketch: whether there are pages, and a sketch. `sketch_before`, `sketch_by`: as for the expression, over dims.
    """

    by: str
    expression_before: tuple[str, ...]
    expression: str
    always: tuple[str, ...]
    page: bool
    sketch: bool
    sketch_before: tuple[str, ...]
    sketch_by: str


@dataclass(frozen=True)
class CppPlan:
    """Bodies of the functions of the policy's struct, one statement a line.

    Attributes:
        place: the columns that a token has by itself, and those that do not begin at 0.
        observe_before, observe: before the loop over slots, and in it. `observe_reads_keys`: whether it needs k or v.
        settle_before: hoisted values. `settle`: in the loop. `protect`: after it. `overflow`: how many must leave.
            `settle_reads_keys`: whether it needs k or v, which a prompt's end does not hand over: there torch finds who leaves.
        forgets: whether decoded queries are not observed.
        settles: whether it is known who leaves. `prefill_only`: nobody does in a decode step. `hard_cap`: room is made before its token
            is placed, as well. `scratch`: how many work rows of floats that uses.
    """

    place: tuple[str, ...]
    observe_before: tuple[str, ...]
    observe: tuple[str, ...]
    observe_reads_keys: bool
    needs_attn: bool
    needs_logit: bool
    overflow: str
    settle_before: tuple[str, ...]
    settle: tuple[str, ...]
    settle_reads_keys: bool
    protect: tuple[str, ...]
    settles: bool
    prefill_only: bool
    hard_cap: bool
    forgets: bool
    scratch: int
    select: SelectPlan | None


def cpp_plan(policy: Policy, numbers: tuple[str, ...]) -> CppPlan:
    """The C++ of a decode step, for a policy whose state columns are known. Of a prompt it finds who leaves, too.

    Raises:
        NotLowerable: if it has no C++ form; the torch backend serves such a policy.
    """
    _refuse_statements(policy)
    policy = in_parts(policy, CAN.knows)
    CAN.check_columns(policy.columns)
    folded = [column for column in policy.columns if column.rule != "token"]
    before, hoisted = _hoist("row", [column.body for column in folded])
    row = SlotPrinter("row", hoisted)
    bodies = [row.body(column.body) for column in folded]
    uses = uses_of(*bodies, *before)
    settle = _settle_if_own(policy)
    return CppPlan(
        place=tuple(_place(column) for column in policy.columns if column.rule in ("token", *_INITIAL)),
        observe_before=(*_column_pointers("row", folded, uses), *texts(before)),
        observe=tuple(_fold(column, body.text) for column, body in zip(folded, bodies, strict=True)),
        observe_reads_keys=_needs_keys(uses),
        needs_attn="attn" in names_of(uses, "input"),
        needs_logit="logit" in names_of(uses, "input"),
        overflow=_overflow(numbers),
        settle_before=settle.before,
        settle=settle.loop,
        settle_reads_keys=settle.reads_keys,
        protect=settle.protect,
        settles=bool(settle.loop),
        prefill_only=bool(settle.loop) and policy.when == "prefill",
        hard_cap=policy.cap == "hard",
        forgets=policy.forgets,
        scratch=settle.scratch,
        select=_select(policy),
    )


def _refuse_statements(policy: Policy) -> None:
    """The statements that the C++ kernels do not know, which work on one head at a time, by its own positions."""
    # After a prompt nothing leaves, and nobody has to agree.
    shared = policy.victims != "own" and policy.when != "prefill"
    refuse_statements(policy, {f"`victims shared by {policy.victims}`": shared})


def _needs_keys(uses: Iterable[Use]) -> bool:
    return bool({"k", "v"} & {*names_of(uses, "input")})


def _place(column: Column) -> str:
    value = f"static_cast<float>({TokenPrinter().value(column.body)})" if column.rule == "token" else _INITIAL[column.rule]
    return f"slot.column(Column::{column.name}) = {value};"


def _fold(column: Column, body: str) -> str:
    old = f"{column.name}[i]"
    if column.decay is not None:
        decay = SlotPrinter("row", {}).value(column.decay)
        return f"{old} = seen ? kvdsl::ema({old}, {body}, {decay}, row.age(i)) : {old};"
    if column.rule == "sum":
        return f"{old} += seen ? {body} : 0.0f;"
    if column.rule == "squares":
        return f"{old} += seen ? kvdsl::square({body}) : 0.0f;"
    new = {"max": f"kvdsl::maximum({old}, {body})", "min": f"kvdsl::minimum({old}, {body})", "last": body, "ring": body}
    return f"{old} = seen ? {new[column.rule]} : {old};"


def _column_pointers(view: str, written: list[Column], uses: Iterable[Use]) -> list[str]:
    """Pointers to the columns that a loop writes or reads; of a ring, to the row that is the newest query's."""
    rings = {column.name for column in written if column.rule == "ring"}
    names = {column.name: "float*" for column in written}
    for name in names_of(uses, "column"):
        names.setdefault(name, "const float*")
    return [
        f"{kind} const {name} = {view}.{f'ring({_ring_arguments(view, name)})' if name in rings else f'column(Column::{name})'};"
        for name, kind in names.items()
    ]


def _ring_arguments(view: str, ring: str) -> str:
    return f"Ring::{ring}, kvdsl::count({view}.param(Number::{size_of(ring)}))"


def _hoist(view: str, exprs: list[Expr]) -> tuple[list[Fragment], dict[Expr, str]]:
    """Statements that compute every reduction over slots, inner ones first, and the names they get."""

    def statement(expr: Reduce, name: str, names: dict[Expr, str]) -> Fragment | None:
        if expr.axis is Axis.DIM:
            return _over_dims(view, expr, name, names)
        if expr.axis is not Axis.SLOT:
            return None
        if expr.within in ("page", "next"):
            raise NotLowerable("`over page` in anything but a bound of dot(q, k)")
        if reads(expr, "q"):
            raise NotLowerable("a reduction over slots of what a query is compared with")
        CAN.check(expr)
        body = SlotPrinter(view, names, over_dims=is_vector(expr)).value(expr.body)
        if is_vector(expr):
            size = size_of_dims(view, expr.body)
            return fragment(f"const auto {name} = {view}.{expr.op}_of_dims({size}, {{}});", function_of(body, SLOT, DIM))
        return fragment(f"const float {name} = {view}.{expr.op}({{}});", function_of(body, SLOT))

    return hoist(exprs, statement)


def _over_dims(view: str, expr: Reduce, name: str, names: dict[Expr, str]) -> Fragment | None:
    """The statement of a reduction over dims that is the same for every slot; None where it is not."""
    made = SlotPrinter(view, names)(expr) if expr.within == "all" else None
    if made is None or SLOT in made.uses or HEAD in made.uses:
        return None
    return fragment(f"const float {name} = {{}};", made)


def _overflow(numbers: tuple[str, ...]) -> str:
    """The arguments of the call that says how many tokens must leave."""
    if "capacity" not in numbers:
        return ""
    stated = [name for name in ("capacity", "trigger", "slack", "max_drop") if name in numbers]
    if stated == ["capacity"]:
        return "kvdsl::count(head.param(Number::capacity))"
    defaults = {"trigger": "1", "slack": "0", "max_drop": "0"}
    return ", ".join(
        f"kvdsl::count(head.param(Number::{name}))" if name in stated else defaults[name] for name in ("capacity", *defaults)
    )


def _settle_if_own(policy: Policy) -> _Settle:
    """Nothing for a policy of which torch finds who leaves: at the end of a prompt only, where a kernel alone cannot."""
    if policy.when != "prefill":
        return _settle(policy)
    agrees = policy.victims != "own" or policy.heads_share or policy.across_layers is not None
    if agrees or policy.measured is not None:
        return _NOBODY_LEAVES
    try:
        found = _settle(policy)
    except NotLowerable:
        return _NOBODY_LEAVES
    return _NOBODY_LEAVES if found.reads_keys else found


def _settle(policy: Policy) -> _Settle:
    if policy.budget is None or policy.score is None:
        return _NOBODY_LEAVES
    tops = [keep for keep in policy.keeps if keep.scope == "top"]
    conditions = [keep.by for keep in policy.keeps if keep.scope == "where" and keep.by is not None]
    scores = [policy.score, *(keep.by for keep in tops if keep.by is not None)]
    before, hoisted = _hoist("head", [*scores, *conditions])
    printer = SlotPrinter("head", hoisted)
    values = [printer.value(expr) for expr in scores]
    protect = _protect(policy, printer)
    uses = uses_of(*values, *protect, *before)
    names = ["score", *(f"top_{n}" for n in range(1, len(tops) + 1))]
    pointers = [f"float* const {name} = head.scratch({n});" for n, name in enumerate(names)]
    columns = _column_pointers("head", [], uses)
    rings = _ring_reductions(uses, len(names))
    loop = tuple(f"{name}[i] = {value};" for name, value in zip(names, values, strict=True))
    before_loop = (*columns, *rings, *texts(before), *pointers)
    return _Settle(before_loop, loop, texts(protect), len(names) + len(rings), _needs_keys(uses))


def _ring_reductions(uses: Iterable[Use], scratch: int) -> list[str]:
    """Statements that reduce rings, each into a work row of its own, from the row `scratch` on."""
    wanted: dict[Use, None] = {}  # in order
    for use in uses:
        if use.kind == "ring":
            if use.op in ("var", "std"):
                wanted[use._replace(op="mean")] = None
            wanted[use] = None
    lines = []
    for n, use in enumerate(wanted, start=scratch):
        around = f"{ring_name(use._replace(op='mean'))}, " if use.op in ("var", "std") else ""
        call = f"head.ring_{use.op}({_ring_arguments('head', use.name)}, {around}head.scratch({n}))"
        lines.append(f"const float* const {ring_name(use)} = {call};")
    return lines


def _protect(policy: Policy, printer: SlotPrinter) -> list[Fragment]:
    lines, tops = [], 0
    for keep in policy.keeps:
        tops += keep.scope == "top"
        lines.append(_protect_line(keep, printer, f"top_{tops}"))
    return lines


def _protect_line(keep: Keep, printer: SlotPrinter, row: str) -> Fragment:
    if keep.scope == "where":
        assert keep.by is not None
        return fragment("head.protect_where({});", function_of(printer.truth(keep.by), SLOT))
    assert keep.count is not None
    if isinstance(keep.count, Number):
        count = Fragment(str(min(int(keep.count.value), _INT_MAX)))
    else:
        count = fragment("kvdsl::count({})", CountPrinter()(keep.count))
    by = f"{row}, " if keep.scope == "top" else ""
    return fragment(f"head.protect_{keep.scope}({by}{{}});", count)


# -- select ------------------------------------------------------------------------------------------------------------


def _select(policy: Policy) -> SelectPlan | None:
    if policy.select is None:
        return None
    refuse_select(policy, policy.select)
    by = form_of_select(policy.select.by)
    before: list[str] = []
    value = ""
    if by == "expression":
        reductions, hoisted = _hoist("row", [policy.select.by])
        body = SlotPrinter("row", hoisted).body(policy.select.by)
        before = [*_column_pointers("row", [], uses_of(body, *reductions)), *texts(reductions)]
        value = body.text
    sketch_before, sketch_by = _sketch(policy)
    places = [keep for keep in policy.keeps if keep.scope in ("first", "last")]
    return SelectPlan(
        by=by,
        expression_before=tuple(before),
        expression=value,
        always=texts(_protect_line(keep, SlotPrinter("head", {}), "") for keep in places),
        page=policy.pages is not None,
        sketch=policy.sketch is not None,
        sketch_before=sketch_before,
        sketch_by=sketch_by,
    )


def _sketch(policy: Policy) -> tuple[tuple[str, ...], str]:
    """What the dims rank by: statements before the loop over them, and the value."""
    if policy.sketch is None:
        return (), ""
    if any(isinstance(part, ColumnRef) for part in walk(policy.sketch.by)):
        raise NotLowerable("a sketch by what the caller gives")
    before, hoisted = _hoist("row", [policy.sketch.by])
    value = DimPrinter(hoisted).value(policy.sketch.by)
    if reads(policy.sketch.by, "v"):
        raise NotLowerable("values over a sketch's dims")
    return texts(before), over_group(value).text
