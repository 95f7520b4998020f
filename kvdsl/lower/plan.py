"""Plans: everything that a template prints, decided. A template only places what stands here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvdsl.ir.nodes import Column, ColumnRef, Expr, Keep, LayerRange, Number, Param, ParamRef, Policy, Select
from kvdsl.ir.printer import print_expression, print_keep
from kvdsl.ir.visitors import walk
from kvdsl.lower.cpp import CppPlan, cpp_plan
from kvdsl.lower.expression import NotLowerable, literal, reads
from kvdsl.lower.spelling import size_of, spelled
from kvdsl.lower.torch import NumberPrinter, TensorPrinter
from kvdsl.lower.triton import TritonPlan, triton_plan
from kvdsl.lower.triton_prompt import TritonPromptPlan, triton_prompt_plan
from kvdsl.passes.columns import add_columns

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class ParamPlan:
    """One constructor argument.

    Attributes:
        name: a checked identifier that is reserved nowhere.
        annotation, default: as the constructor's signature has them.
        help: what the docstring says of it.
    """

    name: str
    annotation: str
    default: str
    help: str


@dataclass(frozen=True)
class ColumnPlan:
    """One state column: `meaning` is its body in the language's own notation."""

    name: str
    rule: str
    meaning: str


@dataclass(frozen=True)
class RingPlan:
    """One ring: `size` is the name of the number that says of how many queries it holds `meaning`."""

    name: str
    size: str
    meaning: str


@dataclass(frozen=True)
class TorchPlan:
    """Bodies of the functions of `kernels_torch.py`, one statement a line; a function without a body is not printed.

    `protects` is whether there is a `protect`, which may have nothing to do.
    """

    observe: tuple[str, ...]
    place: tuple[str, ...]
    protects: bool
    protect: tuple[str, ...]
    score: tuple[str, ...]
    select: tuple[str, ...]
    sketch: tuple[str, ...]


@dataclass(frozen=True)
class PackagePlan:
    """What the generated package of one policy holds.

    Attributes:
        resolve: the statements that compute the numbers of a row from what the user gave.
        numbers: names and expressions of the numbers that kernels read per row, in the order of the table.
        columns, rings: what is remembered per slot: of one number, and of one number per query.
        flags: names and values of what else `kvdsl.runtime.spec.PolicySpec` is told, where it is not the default.
        cpp: None where the policy has no C++ form; `cpp_refusal` says why. `triton`, `triton_refusal`: likewise;
            `triton_prompt`: None, too, where it observes nothing.
        keeps_text, score_text, select_text, sketch_text: what the user wrote.
    """

    name: str
    stem: str
    doc: tuple[str, ...]
    params: tuple[ParamPlan, ...]
    resolve: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    columns: tuple[ColumnPlan, ...]
    rings: tuple[RingPlan, ...]
    bounded: bool
    group: str
    reads_attention: bool
    flags: tuple[tuple[str, str], ...]
    torch: TorchPlan
    cpp: CppPlan | None
    cpp_refusal: str
    triton: TritonPlan | None
    triton_refusal: str
    triton_prompt: TritonPromptPlan | None
    keeps_text: tuple[str, ...]
    score_text: str
    select_text: str
    sketch_text: str


def make_plan(policy: Policy) -> PackagePlan:
    """The plan of a checked policy."""
    lowered = add_columns(policy)
    numbers = _numbers(lowered)
    cpp, cpp_refusal = _lowered(cpp_plan, lowered, numbers)
    triton, triton_refusal = _lowered(triton_plan, lowered, numbers)
    return PackagePlan(
        name=policy.name,
        stem=policy.stem,
        doc=tuple(line.rstrip() for line in policy.doc.strip().splitlines()) or (f"The policy {policy.name}.",),
        params=tuple(_param(param) for param in policy.params),
        resolve=tuple(_resolve(policy)),
        numbers=numbers,
        columns=tuple(ColumnPlan(c.name, c.rule, print_expression(c.body)) for c in lowered.columns if c.rule != "ring"),
        rings=tuple(
            RingPlan(c.name, size_of(c.name), print_expression(c.body)) for c in lowered.columns if c.rule == "ring"
        ),
        bounded=policy.budget is not None,
        group=policy.group,
        reads_attention=any(column.rule != "token" for column in lowered.columns),
        flags=tuple(_flags(lowered)),
        torch=_torch(lowered),
        cpp=cpp,
        cpp_refusal=cpp_refusal,
        triton=triton,
        triton_refusal=triton_refusal,
        triton_prompt=None if triton is None else triton_prompt_plan(lowered, tuple(name for name, _ in numbers)),
        keeps_text=tuple(print_keep(keep) for keep in policy.keeps),
        score_text="" if policy.score is None else print_expression(policy.score),
        select_text="" if policy.select is None else print_expression(policy.select.by),
        sketch_text="" if policy.sketch is None else print_expression(policy.sketch.by),
    )


def _flags(policy: Policy) -> Iterator[tuple[str, str]]:
    rings = [f'("{column.name}", "{size_of(column.name)}"),' for column in policy.columns if column.rule == "ring"]
    if rings:
        yield "rings", f"({' '.join(rings)})"
    for name, default in (("when", "both"), ("victims", "own")):
        value = getattr(policy, name)
        if value != default:
            yield name, json.dumps(value)
    holds = {
        "across": policy.across is not None,
        "hard_cap": policy.cap == "hard",
        "selects": policy.select is not None,
        "sketches": policy.sketch is not None,
        "compact": policy.positions == "compact",
        "rope_cached": policy.rope == "cached",
    }
    yield from ((name, "True") for name, true in holds.items() if true)


# -- numbers -----------------------------------------------------------------------------------------------------------

_RESOLVE = NumberPrinter(
    "{}", {"budget": "capacity", "prompt": "given.prompt", "layer": "given.layer", "layers": "given.layers"}
)


def _param(param: Param) -> ParamPlan:
    constant = isinstance(param.default, Number)
    rate = "; 0.25 is a rate of the prompt, 1.0 all of it" if param.name == "budget" else ""
    return ParamPlan(
        name=param.name,
        annotation="float" if constant else "float | None",
        default=_RESOLVE(param.default) if constant else "None",
        help=f"default {print_expression(param.default)}{' ' + param.unit if param.unit else ''}{rate}",
    )


def _resolve(policy: Policy) -> Iterator[str]:
    """Params in order; the capacity as soon as the params that it reads are known, since later ones may read it."""
    awaited = {node.name for node in walk(policy.budget) if isinstance(node, ParamRef)} if policy.budget else set()
    if policy.budget and not awaited:
        yield _capacity(policy.budget)
    for param in policy.params:
        yield f"{spelled(param.name)} = {_given(param)}"
        if param.name in awaited:
            awaited.remove(param.name)
            if policy.budget and not awaited:
                yield _capacity(policy.budget)
    if policy.select:
        yield f"select = {_inside(_at_least_one(policy.select.count), policy.select)}"
    yield from _fits(policy)


def _capacity(budget: Expr) -> str:
    return f"capacity = {_count(budget)}"


def _count(expr: Expr) -> str:
    return f"given.count({_RESOLVE(expr)})"


def _at_least_one(expr: Expr) -> str:
    return f"given.count({_RESOLVE(expr)}, low=1)"


def _inside(count: str, layers: LayerRange | Select | None) -> str:
    """The count in the layers of a range; inf in the others."""
    if layers is None or (layers.low is None and layers.high is None):
        return count
    ends = (("low", layers.low), ("high", layers.high))
    return f"given.inside({count}, {', '.join(f'{name}={_RESOLVE(end)}' for name, end in ends if end is not None)})"


def _given(param: Param) -> str:
    method = "tokens" if param.name == "budget" else "number"
    bounds = (("low", param.low), ("high", param.high))
    limits = "".join(f", {side}={literal(bound)}" for side, bound in bounds if bound is not None)
    return f'given.{method}("{param.name}", {_RESOLVE(param.default)}{limits})'


def _fits(policy: Policy) -> Iterator[str]:
    """What `keep first` and `keep last` protect must leave room for a candidate. Keeps of one kind overlap."""
    static = [keep for keep in policy.keeps if keep.scope in ("first", "last")]
    if not static:
        return
    first, last = (
        f"given.largest({', '.join(_RESOLVE(keep.count) for keep in static if keep.scope == scope and keep.count is not None)})"
        for scope in ("first", "last")
    )
    keeps = json.dumps(", ".join(print_keep(keep) for keep in static))
    if policy.budget:
        yield f"given.check_fits({first}, {last}, {_inside('capacity', policy.layers)}, {keeps})"
    if policy.select:
        yield f"given.check_fits({first}, {last}, select, {keeps}, selected=True)"


def _numbers(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Names and texts of the numbers that kernels read per row, in the order of the table."""
    exprs = list(_evaluated(policy))
    wanted = [(spelled(param.name), spelled(param.name)) for param in policy.params if _refers(exprs, param.name)]
    for name, text in _RESOLVE.given.items():
        if any(reads(expr, name) for expr in exprs):
            wanted.append((name, text))
    if policy.budget:
        wanted.append(("capacity", _inside("capacity", policy.layers)))
        wanted += _staging(policy)
    if policy.across:
        wanted.append(("floor", f"given.share(capacity, {_RESOLVE(policy.across)})"))
    if policy.select:
        wanted.append(("select", "select"))
    if policy.pages:
        wanted.append(("page", _at_least_one(policy.pages)))
    if policy.sketch:
        wanted.append(("sketch_dims", _at_least_one(policy.sketch.count)))
        wanted.append(("sketch_every", _at_least_one(policy.sketch.every)))
    if policy.prefill_block:
        wanted.append(("prefill_block", _at_least_one(policy.prefill_block)))
    if policy.storage == "blocks" and policy.block:
        wanted.append(("block", _at_least_one(policy.block)))
    wanted += ((size_of(column.name), _at_least_one(column.size)) for column in policy.columns if column.size is not None)
    return tuple(wanted)


def _evaluated(policy: Policy) -> Iterator[Expr]:
    """The expressions that kernels evaluate."""
    for column in policy.columns:
        yield column.body
        if column.decay is not None:
            yield column.decay
    for keep in policy.keeps:
        yield from (expr for expr in (keep.count, keep.by) if expr is not None)
    yield from (part.by for part in (policy.select, policy.sketch) if part is not None)
    if policy.score is not None:
        yield policy.score


def _staging(policy: Policy) -> Iterator[tuple[str, str]]:
    """The numbers of lazy pruning that differ from their defaults."""
    for name, default in (("trigger", 1), ("slack", 0), ("max_drop", 0)):
        value: Expr = getattr(policy, name)
        if value != Number(value=default) or (name == "slack" and policy.max_drop != Number(value=0)):
            yield name, _count(value)


def _refers(exprs: list[Expr], name: str) -> bool:
    return any(node == ParamRef(name=name) for expr in exprs for node in walk(expr))


def _lowered(
    plan: Callable[[Policy, tuple[str, ...]], Plan], policy: Policy, numbers: tuple[tuple[str, str], ...]
) -> tuple[Plan | None, str]:
    """What a target makes of the policy, or why it has no form there."""
    try:
        return plan(policy, tuple(name for name, _ in numbers)), ""
    except NotLowerable as refusal:
        return None, str(refusal)


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(policy: Policy) -> TorchPlan:
    row, slots, new = TensorPrinter("row"), TensorPrinter("slots"), TensorPrinter("new")
    folded = [column for column in policy.columns if column.rule != "token"]
    placed = [column for column in policy.columns if column.rule == "token"]
    ranked = [keep.by for keep in policy.keeps if keep.by is not None]
    scores = [] if policy.score is None else [policy.score]
    return TorchPlan(
        observe=(
            *_column_locals("row", [column.body for column in folded]),
            *(_observed(column, row) for column in folded),
        ),
        place=tuple(f'columns.put("{column.name}", {new.value(column.body)})' for column in placed),
        protects=policy.budget is not None or policy.select is not None,
        protect=(*_column_locals("slots", ranked), *(_torch_keep(keep, slots) for keep in policy.keeps)),
        score=(*_column_locals("slots", scores), *(f"return {slots.value(score)}" for score in scores)),
        select=() if policy.select is None else (f"return {row.body(policy.select.by)}",),
        sketch=() if policy.sketch is None else (f"return {TensorPrinter('row', dims=True).body(policy.sketch.by)}",),
    )


def _observed(column: Column, row: TensorPrinter) -> str:
    decay = "" if column.decay is None else f", {row.value(column.decay)}"
    return f'columns.{column.rule}("{column.name}", {row.body(column.body)}{decay})'


def _column_locals(view: str, exprs: list[Expr]) -> list[str]:
    """Columns are read once and have their names in the expressions."""
    names = {node.name: None for expr in exprs for node in walk(expr) if isinstance(node, ColumnRef)}
    return [f'{name} = {view}.column("{name}")' for name in names]


_IN_KERNEL = NumberPrinter(
    'numbers["{}"]',
    {name: f'numbers["{name}"]' for name in ("budget", "prompt", "layer", "layers")} | {"live": "keep.live"},
)


def _torch_keep(keep: Keep, slots: TensorPrinter) -> str:
    if keep.scope == "where":
        assert keep.by is not None
        return f"keep.where({slots.truth(keep.by)})"
    assert keep.count is not None
    by = f"{slots.value(keep.by)}, " if keep.by is not None else ""
    return f"keep.{keep.scope}({by}{_IN_KERNEL(keep.count)})"
