"""Plans: everything that a template prints, decided. A template only places what stands here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kvdsl.ir.nodes import ColumnRef, Expr, Keep, Number, Param, ParamRef, Policy
from kvdsl.ir.printer import print_expression, print_keep
from kvdsl.ir.visitors import walk
from kvdsl.lower.cpp import CppPlan, cpp_plan
from kvdsl.lower.expression import NotLowerable, literal, reads
from kvdsl.lower.spelling import spelled
from kvdsl.lower.torch import NumberPrinter, TensorPrinter
from kvdsl.passes.columns import add_columns


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
class TorchPlan:
    """Bodies of the functions of `kernels_torch.py`, one statement a line."""

    observe: tuple[str, ...]
    place: tuple[str, ...]
    protect: tuple[str, ...]
    score: tuple[str, ...]


@dataclass(frozen=True)
class PackagePlan:
    """What the generated package of one policy holds.

    Attributes:
        resolve: the statements that compute the numbers of a row from what the user gave.
        numbers: names and expressions of the numbers that kernels read per row, in the order of the table.
        cpp: None where an expression has no C++ form; `cpp_refusal` says which.
        keeps_text, score_text: what the user wrote.
    """

    name: str
    stem: str
    doc: tuple[str, ...]
    params: tuple[ParamPlan, ...]
    resolve: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    columns: tuple[ColumnPlan, ...]
    bounded: bool
    group: str
    reads_attention: bool
    torch: TorchPlan
    cpp: CppPlan | None
    cpp_refusal: str
    keeps_text: tuple[str, ...]
    score_text: str


def make_plan(policy: Policy) -> PackagePlan:
    """The plan of a checked policy."""
    lowered = add_columns(policy)
    numbers = _numbers(lowered)
    cpp, reason = _cpp(lowered, numbers)
    return PackagePlan(
        name=policy.name,
        stem=policy.stem,
        doc=tuple(line.rstrip() for line in policy.doc.strip().splitlines()) or (f"The policy {policy.name}.",),
        params=tuple(_param(param) for param in policy.params),
        resolve=tuple(_resolve(policy)),
        numbers=numbers,
        columns=tuple(ColumnPlan(c.name, c.rule, print_expression(c.body)) for c in lowered.columns),
        bounded=policy.budget is not None,
        group=policy.group,
        reads_attention=any(column.rule != "token" for column in lowered.columns),
        torch=_torch(lowered),
        cpp=cpp,
        cpp_refusal=reason,
        keeps_text=tuple(print_keep(keep) for keep in policy.keeps),
        score_text="" if policy.score is None else print_expression(policy.score),
    )


# -- numbers -----------------------------------------------------------------------------------------------------------

_RESOLVE = NumberPrinter(
    "{}", {"budget": "capacity", "prompt": "given.prompt", "layer": "given.layer", "layers": "given.layers"}
)


def _param(param: Param) -> ParamPlan:
    constant = isinstance(param.default, Number)
    rate = "; below 1 it is a rate of the prompt" if param.name == "budget" else ""
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
    if policy.budget:
        yield from _fits(policy)


def _capacity(budget: Expr) -> str:
    return f"capacity = given.count({_RESOLVE(budget)})"


def _given(param: Param) -> str:
    method = "tokens" if param.name == "budget" else "number"
    bounds = (("low", param.low), ("high", param.high))
    limits = "".join(f", {side}={literal(bound)}" for side, bound in bounds if bound is not None)
    return f'given.{method}("{param.name}", {_RESOLVE(param.default)}{limits})'


def _fits(policy: Policy) -> Iterator[str]:
    """What `keep first` and `keep last` protect must leave room for a candidate. Keeps of one kind overlap."""
    static = [keep for keep in policy.keeps if keep.scope in ("first", "last")]
    if static:
        first, last = (
            f"given.largest({', '.join(_RESOLVE(keep.count) for keep in static if keep.scope == scope and keep.count is not None)})"
            for scope in ("first", "last")
        )
        yield f"given.check_fits({first}, {last}, capacity, {json.dumps(', '.join(print_keep(keep) for keep in static))})"


def _numbers(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Names and texts of the numbers that kernels read per row, in the order of the table."""
    if policy.budget is None:
        return ()
    exprs = [*_keep_counts(policy), *(column.body for column in policy.columns)]
    exprs += [e for e in (policy.score, *(keep.by for keep in policy.keeps)) if e is not None]
    wanted = [(spelled(param.name), spelled(param.name)) for param in policy.params if _refers(exprs, param.name)]
    wanted += [(name, f"given.{name}") for name in ("prompt", "layer", "layers") if any(reads(e, name) for e in exprs)]
    wanted.append(("capacity", "capacity"))
    for name, default in (("trigger", 1), ("slack", 0), ("max_drop", 0)):
        value: Expr = getattr(policy, name)
        if value != Number(value=default) or (name == "slack" and policy.max_drop != Number(value=0)):
            wanted.append((name, f"given.count({_RESOLVE(value)})"))
    return tuple(wanted)


def _keep_counts(policy: Policy) -> list[Expr]:
    return [keep.count for keep in policy.keeps if keep.count is not None]


def _refers(exprs: list[Expr], name: str) -> bool:
    return any(node == ParamRef(name=name) for expr in exprs for node in walk(expr))


def _cpp(policy: Policy, numbers: tuple[tuple[str, str], ...]) -> tuple[CppPlan | None, str]:
    try:
        return cpp_plan(policy, tuple(name for name, _ in numbers)), ""
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
            *(f'columns.{column.rule}("{column.name}", {row.body(column.body)})' for column in folded),
        ),
        place=tuple(f'columns.put("{column.name}", {new.value(column.body)})' for column in placed),
        protect=(*_column_locals("slots", ranked), *(_torch_keep(keep, slots) for keep in policy.keeps)),
        score=(*_column_locals("slots", scores), *(f"return {slots.value(score)}" for score in scores)),
    )


def _column_locals(view: str, exprs: list[Expr]) -> list[str]:
    """Columns are read once and have their names in the expressions."""
    names = {node.name: None for expr in exprs for node in walk(expr) if isinstance(node, ColumnRef)}
    return [f'{name} = {view}.column("{name}")' for name in names]


_IN_KERNEL = NumberPrinter(
    'numbers["{}"]',
    {
        "budget": 'numbers["capacity"]',
        "prompt": 'numbers["prompt"]',
        "layer": 'numbers["layer"]',
        "layers": 'numbers["layers"]',
        "live": "keep.live",
    },
)


def _torch_keep(keep: Keep, slots: TensorPrinter) -> str:
    if keep.scope == "where":
        assert keep.by is not None
        return f"keep.where({slots.truth(keep.by)})"
    assert keep.count is not None
    by = f"{slots.value(keep.by)}, " if keep.by is not None else ""
    return f"keep.{keep.scope}({by}{_IN_KERNEL(keep.count)})"
