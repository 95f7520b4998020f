"""Lower a policy to C++: the contents of a generated `kernels_cpu.cpp`. `kvdsl/lower/cpp_expressions.py` prints expressions.

Reductions over slots, and rings reduced per slot, are computed before the loop under a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvdsl.ir.nodes import Axis, Call, Column, ColumnRef, Expr, Keep, Number, Rank, Reduce, is_reduction
from kvdsl.ir.visitors import children, has, of_query_heads, parts_of, reads, rewrite
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
    literal,
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
    dims_of,
    fragment,
    hoist,
    is_of_all_slots,
    is_vector,
    names_of,
    of_slot_and_other,
    size_of,
    texts,
    uses_of,
    whole,
)
from kvdsl.lower.step import START, Eviction, Step, for_target


@dataclass(frozen=True)
class Value:
    """The body of a function: statements, and a value, a float over slots or dims or a double of the head.

    Attributes:
        reads_keys: whether it needs k or v.
        alone: whether it sees one query head at a time.
        scratch: the number of work rows that it uses.
    """

    before: tuple[str, ...]
    value: str
    reads_keys: bool = False
    alone: bool = False
    scratch: int = 0

    @property
    def asks(self) -> bool:
        """Whether it needs a single query head, or keys and values."""
        return self.alone or self.reads_keys


@dataclass(frozen=True)
class ObservePlan:
    """How a query updates the columns.

    Attributes:
        before: statements before the loop over slots.
        loop: statements in the loop.
        reads_keys: whether it needs k or v.
        attn, logit: whether it needs these of the query.
    """

    before: tuple[str, ...]
    loop: tuple[str, ...]
    reads_keys: bool
    attn: bool
    logit: bool


@dataclass(frozen=True)
class SettlePlan:
    """Eviction.

    Attributes:
        overflow: the number of slots to evict. budget: a data-dependent number of tokens to keep.
        before: hoisted values. loop: in the loop over slots. protect: after it. last: in another loop after that.
        ends_last: whether the kept first and last tokens yield only after all others.
        reads_keys: whether it needs k or v, which are not passed at a prompt's end; there torch finds the victims.
        prefill_only: whether a decode step evicts nothing. hard_cap: whether it also evicts before a token is placed.
        scratch: the number of work rows of floats that it uses.
    """

    overflow: str
    budget: Value | None
    before: tuple[str, ...]
    loop: tuple[str, ...]
    protect: tuple[str, ...]
    last: tuple[str, ...]
    ends_last: bool
    reads_keys: bool
    prefill_only: bool
    hard_cap: bool
    scratch: int


@dataclass(frozen=True)
class SelectPlan:
    """Selection by a query.

    Attributes:
        by: one of `kvdsl::By`. expression: what slots rank by, if it is not a fast form.
        vote: the reduction over the layer's KV heads per slot; empty if each selects alone. voted: what a head computes from it; None
            if it uses it directly.
        count: a data-dependent number of tokens.
        always: statements that mark the slots that are always selected.
        page: whether there are pages. page_after: whether they start after the text's first tokens.
        sketch: what dims rank by.
        reads_rows: whether one of these expressions reads cached keys or values.
    """

    by: str
    expression: Value | None
    vote: str
    voted: Value | None
    count: Value | None
    always: tuple[str, ...]
    page: bool
    page_after: bool
    sketch: Value | None
    reads_rows: bool


@dataclass(frozen=True)
class CppPlan:
    """Bodies of the functions of the policy's struct, one statement a line; missing parts are None or empty.

    `place`: the columns computed for a new token, and those that do not start at 0. `forgets`: whether decode queries are not observed.
    `beyond`: the statement or operation for which torch evicts in decode steps, too; empty if C++ does.
    """

    place: tuple[str, ...]
    observe: ObservePlan | None
    settle: SettlePlan | None
    select: SelectPlan | None
    forgets: bool
    beyond: str = ""


def cpp_plan(step: Step) -> CppPlan:
    """Lower a decode step to C++, and the eviction at a prompt's end.

    Raises:
        NotLowerable: if the policy has no C++ form; torch then serves it.
    """
    select = step.select
    step = for_target(step, CAN, {"`weight` in `select`": select is not None and select.weight is not None})
    settle, beyond = _settle_if_own(step)
    return CppPlan(
        place=tuple(_place(column) for column in step.ruled("token", *START)),
        observe=_observe(step),
        settle=settle,
        select=_select(step),
        forgets=step.forgets,
        beyond=beyond,
    )


def _needs_keys(uses: Iterable[Use]) -> bool:
    return bool({"k", "v"} & {*names_of(uses, "input")})


def _place(column: Column) -> str:
    value = (
        f"static_cast<float>({TokenPrinter().value(column.body)})" if column.rule == "token" else literal(START[column.rule])
    )
    return f"slot.column(Column::{column.name}) = {value};"


def _observe(step: Step) -> ObservePlan | None:
    if not step.observe:
        return None
    before, hoisted = _hoist("row", [column.body for column in step.observe])
    row = SlotPrinter("row", hoisted)
    bodies = [row.body(column.body) for column in step.observe]
    uses = uses_of(*bodies, *before)
    inputs = names_of(uses, "input")
    return ObservePlan(
        before=(*_first("row", step, uses, step.observe), *texts(before)),
        loop=tuple(_folded(step.observe, texts(bodies))),
        reads_keys=_needs_keys(uses),
        attn="attn" in inputs,
        logit="logit" in inputs,
    )


def _folded(columns: Iterable[Column], bodies: Iterable[str]) -> Iterator[str]:
    """Yield statements that update a slot's columns. Folds read each other's old values, so they are stored last."""
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


def _column_pointers(view: str, written: Iterable[Column], uses: Iterable[Use]) -> list[str]:
    """Return pointers to the columns that a loop reads or writes; for a ring, to the newest query's row."""
    written = list(written)
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
    """Return statements that compute every reduction over slots, rank and pool, inner ones first, and their names.

    Args:
        known: names of values that are already computed.
        alone: whether the view is a query's with one head.
    """
    exprs = list(exprs)
    inside = {part for expr in exprs for part in _inside_of_vectors(expr)}

    def statement(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> Fragment | None:
        if expr.kind == "reduce":
            CAN.check(expr.op, expr.over)
            if expr.axis not in (Axis.SLOT, Axis.OTHER, Axis.DIM):
                return None
        if is_reduction(expr, Axis.DIM):
            if (sides := of_slot_and_other(expr)) is not None:
                vector = SlotPrinter(view, names, over_dims=True, alone=alone)
                both = (function_of(vector.value(side), SLOT, DIM) for side in (sides[0], sides[1].body))
                return fragment(f"const auto {name} = {view}.products({size_of_dims(view, expr.body)}, {{}}, {{}});", *both)
            if not varies(expr) or expr not in inside:
                return _over_dims(view, expr, name, names, alone=alone)
            if of_query_heads(expr) and not alone:
                raise NotLowerable("a reduction over dims of a value per query head, inside another one")
            made = function_of(SlotPrinter(view, names, alone=alone).value(expr), SLOT, DIM)
            return fragment(f"const auto {name} = {view}.each(1, {{}});", made)
        if of_query_heads(expr) and not alone:
            raise NotLowerable("a reduction over slots of a value per query head")
        printer = SlotPrinter(view, names, alone=alone)
        match expr:
            case Call(op=pool, args=(values, size)):
                parts = CountPrinter(view)(size), function_of(printer.value(values), SLOT)
                return fragment(f"const auto {name} = {view}.{pool}({{}}, {{}});", *parts)
            case Rank(within="heads"):
                raise NotLowerable("`rank(x over heads)`")
            case Rank():
                pages = (Fragment(", &pages", uses=(PAGES,)),) if expr.within == "page" else ()
                body = function_of(printer.value(expr.body), SLOT)
                return fragment(f"const auto {name} = {view}.rank({{}}{'{}' * len(pages)});", body, *pages)
        assert expr.kind == "reduce"
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
            raise NotLowerable("a reduction that compares slots, inside another one")
        return made

    return hoist(exprs, closed, known)


def _inside_of_vectors(expr: Expr, *, inside: bool = False) -> Iterator[Expr]:
    """Yield reductions over dims inside values that vary over dims: a slot computes them once, not once per dim."""
    if is_reduction(expr, Axis.DIM) and inside:
        yield expr
    if is_of_all_slots(expr):
        inside = expr.kind == "reduce" and (expr.axis is Axis.DIM or is_vector(expr))
    for child in children(expr):
        yield from _inside_of_vectors(child, inside=inside)


def _first(view: str, step: Step, uses: Iterable[Use], written: Iterable[Column] = ()) -> list[str]:
    """Return statements that others need: pointers to columns, and the page of each slot."""
    lines = _column_pointers(view, written, uses)
    if PAGES in uses:
        after = f"kvdsl::count({view}.param(Number::page_after))" if step.pages_after else "0"
        lines.append(f"const kvdsl::Pages pages = {view}.pages(kvdsl::count({view}.param(Number::page)), {after});")
    return lines


def _over_dims(view: str, expr: Reduce, name: str, names: dict[Expr, str], *, alone: bool) -> Fragment | None:
    """Return the statement of a reduction over dims that does not vary over slots; None for one that does."""
    made = SlotPrinter(view, names, alone=alone)(expr) if expr.within == "all" else None
    if made is None or {SLOT, HEAD, OTHER} & {*made.uses}:
        return None
    return fragment(f"const float {name} = {{}};", made)


def _overflow(numbers: Mapping[str, int | None], *, measured: bool) -> str:
    """Return the arguments of the call that computes how many tokens to evict; all but the first have defaults."""
    found = {
        name: f"kvdsl::count(head.param(Number::{name}))" if default is None else str(default)
        for name, default in numbers.items()
    }
    if measured:
        found["capacity"] = "kvdsl::count(kvdsl::minimum(head.param(Number::capacity), budget(head)))"
    alone = all(default is not None for name, default in numbers.items() if name != "capacity")
    return found["capacity"] if alone else ", ".join(found.values())


def _count(view: str, count: Expr | None, step: Step) -> Value | None:
    """Return a data-dependent number of tokens; None for a fixed one."""
    if count is None:
        return None
    alone = of_query_heads(count)
    before, hoisted = _hoist(view, _reduced(count), alone=alone)
    value = CountPrinter(view, hoisted, alone=alone).value(count)
    uses = uses_of(value, *before)
    rings = _ring_reductions(uses, 0)
    lines = (*_first(view, step, uses), *rings, *texts(before))
    return Value(lines, value.text, _needs_keys(uses), alone, len(rings))


def _reduced(count: Expr) -> Iterator[Expr]:
    """Yield what a number reduces over slots, as doubles."""
    match count:
        case Reduce(axis=Axis.SLOT, body=body):
            yield body
        case Reduce():
            yield count
        case Call(op="enough", args=(values, share, order)):
            yield from (values, order)
            yield from _reduced(share)
        case _:
            for child in children(count):
                yield from _reduced(child)


def _settle_if_own(step: Step) -> tuple[SettlePlan | None, str]:
    """Return how C++ evicts, or None if torch does, and then what C++ lacks for decode steps."""
    evict = step.evict
    if evict is None:
        return None, ""
    if evict.decodes and evict.by != "own":
        return None, f"`victims shared by {evict.by}`"
    if not evict.decodes and not evict.alone:
        return None, ""
    try:
        found = _settle(step, evict)
    except NotLowerable as refusal:
        return None, str(refusal) if evict.decodes else ""
    return (found if evict.decodes or not found.reads_keys else None), ""


def _settle(step: Step, evict: Eviction) -> SettlePlan:
    first, *behind = step.rank
    before, hoisted = _hoist("head", first.values)
    printer = SlotPrinter("head", hoisted)
    values = {name: printer.value(expr) for name, expr in first.rows.items()}
    rows = iter(step.protect.ranks)
    protect = [_protect_line(keep, printer, next(rows) if keep.row.ranks else "") for keep in step.protect.keeps]
    last, pools = list[Fragment](), list[Fragment]()
    for late in behind:
        pools, hoisted = _hoist("head", late.values, hoisted)
        printer = SlotPrinter("head", hoisted)
        last += [fragment(f"{name}[i] = {{}};", printer.value(expr)) for name, expr in late.rows.items()]
    last += [fragment(f"{column.name}[i] = {{}};", printer.value(column.body)) for column in evict.columns]
    uses = uses_of(*values.values(), *protect, *before, *pools, *last)
    names = [name for one in (*behind, first) for name in one.rows]
    pointers = [f"float* const {name} = head.scratch({n});" for n, name in enumerate(names)]
    rings = _ring_reductions(uses, len(names))
    budget = _count("head", evict.budget, step)
    return SettlePlan(
        overflow=_overflow(evict.overflow, measured=budget is not None),
        budget=budget,
        before=(*_first("head", step, uses, evict.columns), *rings, *texts(before), *pointers),
        loop=tuple(f"{name}[i] = {value};" for name, value in values.items()),
        protect=(*texts(protect), *texts(pools)),
        last=texts(last),
        ends_last=step.protect.ends_last,
        reads_keys=_needs_keys(uses) or (budget is not None and budget.reads_keys),
        prefill_only=not evict.decodes,
        hard_cap=evict.hard,
        scratch=max(len(names) + len(rings), 0 if budget is None else budget.scratch),
    )


def _ring_reductions(uses: Iterable[Use], scratch: int) -> list[str]:
    """Return statements that reduce rings, each into a work row of its own, from the row `scratch` on."""
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


def _protect_line(keep: Keep, printer: SlotPrinter, row: str) -> Fragment:
    given = [Fragment(row)] if row else []
    if keep.row.holds and keep.by is not None:
        given.append(function_of(printer.truth(keep.by), SLOT))
    if keep.count is not None and keep.count.kind == "number":
        given.append(Fragment(str(whole(keep.count.value))))
    elif keep.count is not None:
        given.append(fragment("kvdsl::count({})", CountPrinter()(keep.count)))
    return fragment(f"head.protect_{keep.scope}({', '.join('{}' for _ in given)});", *given)


# -- select ------------------------------------------------------------------------------------------------------------


def _select(step: Step) -> SelectPlan | None:
    select = step.select
    if select is None:
        return None
    if len(select.votes) > 1:
        raise NotLowerable("several reductions over heads")
    for vote in select.votes:
        CAN.check(vote.op, vote.over)
    by = "expression" if select.votes or select.form == "page_mean" else select.form
    named: dict[Expr, str] = {vote: "voted" for vote in select.votes}
    voted = None if select.of_votes is None else _expression(step, select.of_votes, named)
    if voted is not None and voted.alone:
        raise NotLowerable("a reduction over slots of a value per query head, together with `over heads`")
    if select.count and has(select.count, Reduce, within="sketch"):
        raise NotLowerable("a count of `select` that reads `over sketch`: tokens are counted before the sketch is refreshed")
    written = (select.count, step.sketch, *((select.of_head, select.of_votes) if by == "expression" else ()))
    return SelectPlan(
        by=by,
        expression=_expression(step, select.of_head, {}) if by == "expression" else None,
        vote="".join(vote.op for vote in select.votes),
        voted=voted,
        count=_count("row", select.count, step),
        always=texts(_protect_line(keep, SlotPrinter("head", {}), "") for keep in step.protect.ends),
        page=select.paged,
        page_after=step.pages_after,
        sketch=None if step.sketch is None else _sketch(step.sketch),
        reads_rows=any(reads(one, "k", "v") for one in written if one is not None),
    )


def _expression(step: Step, by: Expr, names: Mapping[Expr, str]) -> Value:
    """Return what a query ranks slots by.

    Args:
        names: names of what the layer's heads computed.
    """
    own = rewrite(by, lambda part: Number(value=0) if part in names else None)
    compared: list[Expr] = [*parts_of(own, Rank), *parts_of(own, Reduce, axis=Axis.SLOT)]
    alone = any(of_query_heads(part) for part in compared)
    reductions, hoisted = _hoist("row", [by], names, alone=alone)
    printer = SlotPrinter("row", hoisted, alone=alone)
    body = printer.value(by) if alone else printer.body(by)
    lines = (*_first("row", step, uses_of(body, *reductions)), *texts(reductions))
    return Value(lines, body.text, alone=alone)


def _sketch(by: Expr) -> Value:
    """Return what the dims rank by."""
    if has(by, ColumnRef):
        raise NotLowerable("a sketch by values from the caller")
    before, hoisted = _hoist("row", [by])
    value = DimPrinter("row", hoisted).value(by)
    if reads(by, "v"):
        raise NotLowerable("values (`v`) over a sketch's dims")
    return Value(texts(before), over_group(value).text)
