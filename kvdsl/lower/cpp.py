"""A policy as C++: what a generated `kernels_cpu.cpp` holds. A reduction over slots is hoisted out of the loop and gets a name; so does
what a ring remembers, reduced for every slot at once. Expressions: `kvdsl/lower/cpp_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from kvdsl.ir.nodes import (
    Axis,
    Call,
    Column,
    ColumnRef,
    Expr,
    Keep,
    LayerRange,
    Number,
    Policy,
    Rank,
    Reduce,
    Select,
    is_call,
)
from kvdsl.ir.ops import POOLS
from kvdsl.ir.visitors import children, of_query_heads, rewrite, walk
from kvdsl.lower.cpp_expressions import (
    CAN,
    DIM,
    HEAD,
    OTHER,
    PAGES,
    SLOT,
    CountPrinter,
    DimPrinter,
    SlotPrinter,
    TokenPrinter,
    function_of,
    over_group,
    ring_name,
    size_of_dims,
    varies,
)
from kvdsl.lower.expression import (
    Fragment,
    NotLowerable,
    OfAllSlots,
    Use,
    bounds_pages,
    dims_of,
    form_of_select,
    fragment,
    hoist,
    in_layers,
    is_vector,
    names_of,
    of_slot_and_other,
    reads,
    texts,
    uses_of,
)
from kvdsl.lower.spelling import size_of
from kvdsl.passes.parts import in_parts

_INT_MAX = 2**31 - 1
_INITIAL = {"max": "-INFINITY", "min": "INFINITY", "fold": "NAN", "prune": "NAN"}


@dataclass(frozen=True)
class CountPlan:
    """A number of tokens that reads the data, as the body of a function: statements before it, and the value, a double.

    `reads_keys`: whether it needs k or v. `asks`: whether it needs these, or a query head's own. `scratch`: work rows that it uses.
    """

    before: tuple[str, ...]
    value: str
    reads_keys: bool
    asks: bool
    scratch: int


class _Settle(NamedTuple):
    """How it is found who leaves: `settle_before`, `settle`, `protect`, `settle_last`, `budget`, `scratch` and `settle_reads_keys` of a
    plan.
    """

    before: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    budget: CountPlan | None = None
    scratch: int = 0
    reads_keys: bool = False


_NOBODY_LEAVES = _Settle()


@dataclass(frozen=True)
class SelectPlan:
    """How a query chooses what it attends to.

    Attributes:
        by: which of `kvdsl::By`. `expression_before`, `expression`: for one of its own, statements before the
            loop over slots and the value. `alone`: whether they see one query head at a time.
        vote: how what the KV heads of a layer find at a slot is reduced; empty where each chooses by itself. `voted_before`, `voted`:
            what a head makes of that, likewise.
        count: how many tokens are chosen, where that reads the data.
        always: statements that protect what is attended to in any case.
        page, sketch: whether there are pages, and a sketch. `sketch_before`, `sketch_by`: as for the expression, over dims.
    """

    by: str
    expression_before: tuple[str, ...]
    expression: str
    alone: bool
    vote: str
    voted_before: tuple[str, ...]
    voted: str
    count: CountPlan | None
    always: tuple[str, ...]
    page: bool
    page_after: bool
    sketch: bool
    sketch_before: tuple[str, ...]
    sketch_by: str


@dataclass(frozen=True)
class CppPlan:
    """Bodies of the functions of the policy's struct, one statement a line.

    Attributes:
        place: the columns that a token has by itself, and those that do not begin at 0.
        observe_before, observe: before the loop over slots, and in it. `observe_reads_keys`: whether it needs k or v.
        settle_before: hoisted values. `settle`: in the loop. `protect`: after it. `settle_last`: in another loop after that.
            `overflow`: how many must leave; `budget`: down to how many, where that reads the data.
            `ends_last`: whether the first and last tokens that are kept leave only when nothing else is left.
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
    budget: CountPlan | None
    settle_before: tuple[str, ...]
    settle: tuple[str, ...]
    settle_reads_keys: bool
    protect: tuple[str, ...]
    settle_last: tuple[str, ...]
    ends_last: bool
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
    folded = [column for column in policy.columns if column.rule not in ("token", "prune")]
    before, hoisted = _hoist("row", [column.body for column in folded])
    row = SlotPrinter("row", hoisted)
    bodies = [row.body(column.body) for column in folded]
    uses = uses_of(*bodies, *before)
    settle = _settle_if_own(policy)
    return CppPlan(
        place=tuple(_place(column) for column in policy.columns if column.rule in ("token", *_INITIAL)),
        observe_before=(*_first("row", policy, uses, folded), *texts(before)),
        observe=tuple(_folded(folded, texts(bodies))),
        observe_reads_keys=_needs_keys(uses),
        needs_attn="attn" in names_of(uses, "input"),
        needs_logit="logit" in names_of(uses, "input"),
        overflow=_overflow(numbers, measured=settle.budget is not None),
        budget=settle.budget,
        settle_before=settle.before,
        settle=settle.loop,
        settle_reads_keys=settle.reads_keys,
        protect=settle.protect,
        settle_last=settle.last,
        ends_last=policy.ends_last,
        settles=settle is not _NOBODY_LEAVES,
        prefill_only=settle is not _NOBODY_LEAVES and policy.when == "prefill",
        hard_cap=policy.cap == "hard",
        forgets=policy.forgets,
        scratch=settle.scratch,
        select=_select(policy),
    )


def _refuse_statements(policy: Policy) -> None:
    """The statements that the C++ kernels do not know, which work on one head at a time, by its own positions."""
    # After a prompt nothing leaves, and nobody has to agree.
    shared = policy.victims != "own" and policy.when != "prefill"
    if shared:
        raise NotLowerable(f"`victims shared by {policy.victims}`")
    if policy.weighs:
        raise NotLowerable("`weight` on what is attended to")


def _needs_keys(uses: Iterable[Use]) -> bool:
    return bool({"k", "v"} & {*names_of(uses, "input")})


def _place(column: Column) -> str:
    value = f"static_cast<float>({TokenPrinter().value(column.body)})" if column.rule == "token" else _INITIAL[column.rule]
    return f"slot.column(Column::{column.name}) = {value};"


def _folded(columns: list[Column], bodies: Iterable[str]) -> Iterator[str]:
    """Statements that fold a query into the columns of a slot; folds read each other as they were before it, so they are stored last."""
    stored = []
    for column, body in zip(columns, bodies, strict=True):
        if column.rule != "fold":
            yield _fold(column, body)
            continue
        yield f"const float new_{column.name} = {body};"
        stored.append(f"{column.name}[i] = seen ? new_{column.name} : {column.name}[i];")
    yield from stored


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


def _hoist(
    view: str,
    exprs: Iterable[Expr],
    known: Mapping[Expr, str] = MappingProxyType({}),
    *,
    alone: bool = False,
) -> tuple[list[Fragment], dict[Expr, str]]:
    """Statements that compute every reduction over slots, and ranks and pools of these, inner ones first, and the names they get.

    Args:
        known: names of what has been computed already.
        alone: whether the view is a query's of one head.
    """
    exprs = list(exprs)
    inside = {part for expr in exprs for part in _inside_of_vectors(expr)}

    def statement(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> Fragment | None:
        if isinstance(expr, Reduce):
            CAN.check(expr.op, expr.over)
        if isinstance(expr, Reduce) and expr.axis not in (Axis.SLOT, Axis.OTHER):
            if expr.axis is not Axis.DIM:
                return None
            if (sides := of_slot_and_other(expr)) is not None:
                vector = SlotPrinter(view, names, over_dims=True, alone=alone)
                both = (function_of(vector.value(side), SLOT, DIM) for side in (sides[0], sides[1].body))
                return fragment(f"const auto {name} = {view}.products({size_of_dims(view, expr.body)}, {{}}, {{}});", *both)
            if not varies(expr) or expr not in inside:
                return _over_dims(view, expr, name, names, alone=alone)
            if of_query_heads(expr) and not alone:
                raise NotLowerable("a reduction over dims of what a query is compared with, inside another one")
            made = function_of(SlotPrinter(view, names, alone=alone).value(expr), SLOT, DIM)
            return fragment(f"const auto {name} = {view}.each(1, {{}});", made)
        if of_query_heads(expr) and not alone:
            raise NotLowerable("a reduction over slots of what a query is compared with")
        printer = SlotPrinter(view, names, alone=alone)
        if isinstance(expr, Call):  # a pool
            values, size = expr.args
            parts = CountPrinter(view)(size), function_of(printer.value(values), SLOT)
            return fragment(f"const auto {name} = {view}.{expr.op}({{}}, {{}});", *parts)
        if isinstance(expr, Rank):
            if expr.within == "heads":
                raise NotLowerable("`rank(x over heads)`")
            pages = (Fragment(", &pages", uses=(PAGES,)),) if expr.within == "page" else ()
            body = function_of(printer.value(expr.body), SLOT)
            return fragment(f"const auto {name} = {view}.rank({{}}{'{}' * len(pages)});", body, *pages)
        vectors = dims_of(expr.body) != ""
        body, width = replace(printer, over_dims=vectors).value(expr.body), size_of_dims(view, expr.body) if vectors else "1"
        if expr.axis is Axis.OTHER:
            itself, made = "true" if expr.within == "self" else "false", function_of(body, SLOT, OTHER, DIM)
            return fragment(f"const auto {name} = {view}.{expr.op}_of_others({width}, {itself}, {{}});", made)
        if vectors or expr.within != "all":
            pages = (Fragment(", &pages", uses=(PAGES,)),) if expr.within != "all" else ()
            made = function_of(body, SLOT, DIM)
            return fragment(f"const auto {name} = {view}.{expr.op}_of_dims({width}, {{}}{'{}' * len(pages)});", made, *pages)
        return fragment(f"const float {name} = {view}.{expr.op}({{}});", function_of(body, SLOT))

    def closed(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> Fragment | None:
        made = statement(expr, name, names)
        if made is not None and OTHER in made.uses:
            raise NotLowerable("a reduction of what a slot is compared with, inside another one")
        return made

    return hoist(exprs, closed, known)


def _inside_of_vectors(expr: Expr, *, inside: bool = False) -> Iterator[Expr]:
    """Reductions over dims within what has dims itself: each slot has them once, not once a dim."""
    if isinstance(expr, Reduce) and expr.axis is Axis.DIM and inside:
        yield expr
    if isinstance(expr, (Reduce, Rank)) or is_call(expr, *POOLS):
        inside = isinstance(expr, Reduce) and (expr.axis is Axis.DIM or is_vector(expr))
    for child in children(expr):
        yield from _inside_of_vectors(child, inside=inside)


def _first(view: str, policy: Policy, uses: Iterable[Use], written: list[Column] | None = None) -> list[str]:
    """Statements that everything else may need: pointers to columns, and which slots lie in one page."""
    lines = _column_pointers(view, written or [], uses)
    if PAGES in uses:
        after = "0" if policy.pages_after is None else f"kvdsl::count({view}.param(Number::page_after))"
        lines.append(f"const kvdsl::Pages pages = {view}.pages(kvdsl::count({view}.param(Number::page)), {after});")
    return lines


def _over_dims(view: str, expr: Reduce, name: str, names: dict[Expr, str], *, alone: bool) -> Fragment | None:
    """The statement of a reduction over dims that is the same for every slot; None where it is not."""
    made = SlotPrinter(view, names, alone=alone)(expr) if expr.within == "all" else None
    if made is None or {SLOT, HEAD, OTHER} & {*made.uses}:
        return None
    return fragment(f"const float {name} = {{}};", made)


def _overflow(numbers: tuple[str, ...], *, measured: bool) -> str:
    """The arguments of the call that says how many tokens must leave."""
    if "capacity" not in numbers:
        return ""
    stated = [name for name in ("capacity", "trigger", "slack", "max_drop") if name in numbers]
    found: dict[str, str] = {name: f"kvdsl::count(head.param(Number::{name}))" for name in stated}
    if measured:
        found["capacity"] = "kvdsl::count(kvdsl::minimum(head.param(Number::capacity), budget(head)))"
    if stated == ["capacity"]:
        return found["capacity"]
    defaults = {"trigger": "1", "slack": "0", "max_drop": "0"}
    return ", ".join(found.get(name, default) for name, default in {"capacity": "", **defaults}.items())


def _count(view: str, count: Expr | None, layers: LayerRange | Select | None, policy: Policy) -> CountPlan | None:
    """A number of tokens that reads the data, in some layers; None where it reads none."""
    if count is None:
        return None
    alone = of_query_heads(count)
    before, hoisted = _hoist(view, _reduced(count), alone=alone)
    low, high = (None, None) if layers is None else (layers.low, layers.high)
    value = CountPrinter(view, hoisted, alone=alone).value(in_layers(count, low, high))
    uses = uses_of(value, *before)
    rings = _ring_reductions(uses, 0)
    lines = (*_first(view, policy, uses), *rings, *texts(before))
    return CountPlan(lines, value.text, _needs_keys(uses), alone or _needs_keys(uses), len(rings))


def _reduced(count: Expr) -> Iterator[Expr]:
    """What a number reduces over slots, as doubles."""
    if isinstance(count, Reduce):
        yield count.body if count.axis is Axis.SLOT else count
    elif is_call(count, "enough"):
        values, share, order = count.args
        yield from (values, order)
        yield from _reduced(share)
    else:
        for child in children(count):
            yield from _reduced(child)


def _settle_if_own(policy: Policy) -> _Settle:
    """Nothing for a policy of which torch finds who leaves: at the end of a prompt only, where a kernel alone cannot."""
    if policy.when != "prefill":
        return _settle(policy)
    if policy.victims != "own" or policy.heads_share or policy.across_layers is not None:
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
    scores = {"score": policy.score} | {f"top_{n}": keep.by for n, keep in enumerate(tops, start=1) if keep.by is not None}
    # A pool goes by what may not leave, so that it comes behind all else.
    late = {} if not any(is_call(part, *POOLS) for part in walk(policy.score)) else {"score": scores.pop("score")}
    prunes = [column for column in policy.columns if column.rule == "prune"]
    before, hoisted = _hoist("head", [*scores.values(), *conditions, *(column.body for column in prunes)])
    printer = SlotPrinter("head", hoisted)
    values = {name: printer.value(expr) for name, expr in scores.items()}
    protect = _protect(policy, printer)
    pools, hoisted = _hoist("head", late.values(), hoisted)
    last = [fragment("score[i] = {};", SlotPrinter("head", hoisted).value(expr)) for expr in late.values()]
    last += [fragment(f"{column.name}[i] = {{}};", SlotPrinter("head", hoisted).value(column.body)) for column in prunes]
    uses = uses_of(*values.values(), *protect, *before, *pools, *last)
    names = ["score", *(f"top_{n}" for n in range(1, len(tops) + 1))]
    pointers = [f"float* const {name} = head.scratch({n});" for n, name in enumerate(names)]
    rings = _ring_reductions(uses, len(names))
    budget = _count("head", policy.measured, policy.layers, policy)
    return _Settle(
        before=(*_first("head", policy, uses, prunes), *rings, *texts(before), *pointers),
        loop=tuple(f"{name}[i] = {value};" for name, value in values.items()),
        protect=(*texts(protect), *texts(pools)),
        last=texts(last),
        budget=budget,
        scratch=max(len(names) + len(rings), 0 if budget is None else budget.scratch),
        reads_keys=_needs_keys(uses) or (budget is not None and budget.reads_keys),
    )


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
    by = form_of_select(policy.select.by)
    if by == "page_mean" or (by == "page_bound" and not bounds_pages(policy)):
        by = "expression"
    vote, rest, names = policy.select.by, None, dict[Expr, str]()
    votes = list(dict.fromkeys(part for part in walk(vote) if isinstance(part, Reduce) and part.axis is Axis.HEAD))
    if len(votes) > 1:
        raise NotLowerable("several reductions over heads")
    for found in votes:
        CAN.check(found.op, found.over)
        names = {found: "voted"}
        vote, rest = found.body, None if found == vote else vote
    before, value, alone = ((), "", False) if by != "expression" else _expression(policy, vote, {})
    voted_before, voted, voted_alone = ((), "", False) if rest is None else _expression(policy, rest, names)
    if voted_alone:
        raise NotLowerable("a reduction over slots of what a query is compared with, beside `over heads`")
    measured = policy.select.measured
    if measured is not None and any(isinstance(part, Reduce) and part.within == "sketch" for part in walk(measured)):
        raise NotLowerable("a count of `select` that reads `over sketch`: tokens are counted before a sketch is found anew")
    count = _count("row", measured, None, policy)
    sketch_before, sketch_by = _sketch(policy)
    places = [keep for keep in policy.keeps if keep.scope in ("first", "last")]
    return SelectPlan(
        by=by,
        expression_before=before,
        expression=value,
        alone=alone,
        vote="".join(found.op for found in votes),
        voted_before=voted_before,
        voted=voted,
        count=count,
        always=texts(_protect_line(keep, SlotPrinter("head", {}), "") for keep in places),
        page=policy.pages is not None,
        page_after=policy.pages_after is not None,
        sketch=policy.sketch is not None,
        sketch_before=sketch_before,
        sketch_by=sketch_by,
    )


def _expression(policy: Policy, by: Expr, names: Mapping[Expr, str]) -> tuple[tuple[str, ...], str, bool]:
    """What a query ranks slots by: statements before the loop over them, the value, and whether both are of one query head.

    Args:
        names: of what the heads of the layer have found.
    """
    own = rewrite(by, lambda part: Number(value=0) if part in names else None)
    compared = (
        part for part in walk(own) if isinstance(part, Rank) or (isinstance(part, Reduce) and part.axis is Axis.SLOT)
    )
    alone = any(of_query_heads(part) for part in compared)
    reductions, hoisted = _hoist("row", [by], names, alone=alone)
    printer = SlotPrinter("row", hoisted, alone=alone)
    body = printer.value(by) if alone else printer.body(by)
    lines = (*_first("row", policy, uses_of(body, *reductions)), *texts(reductions))
    return lines, body.text, alone


def _sketch(policy: Policy) -> tuple[tuple[str, ...], str]:
    """What the dims rank by: statements before the loop over them, and the value."""
    if policy.sketch is None:
        return (), ""
    if any(isinstance(part, ColumnRef) for part in walk(policy.sketch.by)):
        raise NotLowerable("a sketch by what the caller gives")
    before, hoisted = _hoist("row", [policy.sketch.by])
    value = DimPrinter("row", hoisted).value(policy.sketch.by)
    if reads(policy.sketch.by, "v"):
        raise NotLowerable("values over a sketch's dims")
    return texts(before), over_group(value).text
