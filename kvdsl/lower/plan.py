"""Plans: everything that a template prints. Templates only place it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvdsl.budget import offers_ratio
from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Axis, Expr, Given, GivenRef, Policy, Reduce, Tensor
from kvdsl.ir.printer import print_across_layers, print_count, print_expression, print_keep, print_number
from kvdsl.ir.visitors import everywhere, parts_of, reads
from kvdsl.lower.cpp import CppPlan, cpp_plan
from kvdsl.lower.expression import NotLowerable, reads_vectors, size_of, spelled
from kvdsl.lower.numbers import ParamPlan, numbers_plan
from kvdsl.lower.step import Step, step_of
from kvdsl.lower.torch import TorchPlan, torch_plan
from kvdsl.lower.triton import TritonPlan, triton_plan
from kvdsl.passes.columns import add_columns
from kvdsl.passes.fold import fold
from kvdsl.passes.normal import normal

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class ColumnPlan:
    """A state column; `meaning` is its body in the language's notation."""

    name: str
    rule: str
    meaning: str


@dataclass(frozen=True)
class RingPlan:
    """A ring of `meaning`; `size` names the number of queries that it holds."""

    name: str
    size: str
    meaning: str


@dataclass(frozen=True)
class GivenPlan:
    """A value per token: its name in the constructor and in kernels, and its help in the docstring.

    `asked`: whether it is a constructor argument, because a function provides it.
    """

    name: str
    code: str
    help: str
    asked: bool


@dataclass(frozen=True)
class Written:
    """The user's statements in the language's notation; empty if missing."""

    keeps: tuple[str, ...]
    budget: str
    score: str
    weigh: str
    select: str
    count: str
    weight: str
    sketch: str


@dataclass(frozen=True)
class PackagePlan:
    """The generated package of one policy.

    Attributes:
        resolve: the statements that compute the numbers of a row from the user's params. `resolve_uses_torch`: whether they, or
            the numbers' expressions, need torch.
        ratio: whether the budget can also be given as `ratio`.
        tensors: tensors of files, in the order of `SlotState.constants`, those of one row first; `tensor_names`: their names in kernels.
        given: the caller's values per token, in the order of `AttentionCall.supplied`.
        numbers: names and expressions of the numbers that kernels read per row, in the order of the table.
        heads_differ: whether numbers differ between the KV heads of a layer; the table then has a row for each.
        columns, rings: the state per slot, of one number and of one number per query.
        flags: names and values of the fields of `kvdsl.runtime.spec.PolicySpec` that differ from their defaults.
        cpp, triton: None if the target refuses the policy.
        refusals: the reason by refusing target, `cpu` or `triton`.
        written: the user's statements.
    """

    name: str
    stem: str
    doc: tuple[str, ...]
    params: tuple[ParamPlan, ...]
    ratio: bool
    tensors: tuple[Tensor, ...]
    tensor_names: tuple[str, ...]
    given: tuple[GivenPlan, ...]
    resolve: tuple[str, ...]
    resolve_uses_torch: bool
    numbers: tuple[tuple[str, str], ...]
    heads_differ: bool
    columns: tuple[ColumnPlan, ...]
    rings: tuple[RingPlan, ...]
    bounded: bool
    group: str
    reads_attention: bool
    flags: tuple[tuple[str, str], ...]
    torch: TorchPlan
    cpp: CppPlan | None
    triton: TritonPlan | None
    refusals: Mapping[str, str]
    written: Written


def make_plan(policy: Policy) -> PackagePlan:
    """Return the plan of a checked policy.

    Raises:
        KvdslError: if not even torch has code for something in it.
    """
    policy = _tensors_in_order(fold(normal(policy)))
    lowered = add_columns(policy)
    numbers = numbers_plan(lowered)
    step = step_of(lowered, numbers)
    refusals: dict[str, str] = {}
    cpp, triton = _lowered("cpu", cpp_plan, step, refusals), _lowered("triton", triton_plan, step, refusals)
    torch = _torch(step)
    return PackagePlan(
        name=policy.name,
        stem=policy.stem,
        doc=tuple(line.rstrip() for line in policy.doc.strip().splitlines()) or (f"The policy {policy.name}.",),
        params=numbers.params,
        ratio=offers_ratio([param.name for param in policy.params]),
        tensors=policy.tensors,
        tensor_names=tuple(spelled(tensor.name) for tensor in policy.tensors),
        given=tuple(_given(given) for given in policy.given),
        resolve=numbers.resolve,
        resolve_uses_torch=numbers.uses_torch,
        numbers=numbers.numbers,
        heads_differ=numbers.heads_differ,
        columns=tuple(ColumnPlan(c.name, c.rule, print_expression(c.body)) for c in lowered.columns if c.rule != "ring"),
        rings=tuple(
            RingPlan(c.name, size_of(c.name), print_expression(c.body)) for c in lowered.columns if c.rule == "ring"
        ),
        bounded=policy.budget is not None,
        group=policy.group,
        reads_attention=bool(step.observe),
        flags=tuple(_flags(lowered, step, torch, cpp)),
        torch=torch,
        cpp=cpp,
        triton=triton,
        refusals=refusals,
        written=_written(policy),
    )


def _written(policy: Policy) -> Written:
    select, sketch, shared = policy.select, policy.sketch, policy.across_layers

    def printed(expr: Expr | None) -> str:
        return "" if expr is None else print_expression(expr)

    return Written(
        keeps=tuple(print_keep(keep) for keep in policy.keeps),
        budget=printed(policy.measured),
        score=printed(policy.score),
        weigh=print_across_layers(shared).strip(),
        select="" if select is None else print_expression(select.by),
        count="" if select is None else print_count(select),
        weight="" if select is None else printed(select.weight),
        sketch="" if sketch is None else print_expression(sketch.by),
    )


def _given(given: Given) -> GivenPlan:
    help = "`f(module, hidden_states)`, which returns a number per new token, [batch, KV heads or 1, tokens]; see `give`"
    default = "" if given.default is None else f"; default {print_number(given.default)}"
    return GivenPlan(given.name, spelled(given.name), help + default, given.source == "caller")


def _flags(policy: Policy, step: Step, torch: TorchPlan, cpp: CppPlan | None) -> Iterator[tuple[str, str]]:
    rings = [f'("{name}", "{size_of(name)}"),' for name in step.rings]
    if rings:
        yield "rings", f"({' '.join(rings)})"
    if policy.given:
        yield "supplied", repr(tuple((given.name, given.default) for given in policy.given))
    held = {column.body: column.name for column in policy.columns}
    spans = tuple((one.name, held[GivenRef(name=one.name, marked=True)]) for one in policy.given if one.source == "spans")
    if spans:
        yield "spans", repr(spans)
    provided = tuple(one.name for one in policy.given if one.source == one.name)
    if provided:
        yield "hears", repr(provided)
    if policy.across_layers is not None:
        yield "across_layers", '"pool"' if policy.one_pool else '"shares"'
    for name, default in (("when", "both"), ("victims", "own")):
        value = getattr(policy, name)
        if value != default:
            yield name, json.dumps(value)
    evict, select = step.evict, step.select
    holds = {
        "across": evict and evict.heads_share,
        "heads_differ": step.heads_differ,
        "overprotects": evict and step.protect.overprotects,
        "hard_cap": evict and evict.hard,
        "measures": evict and evict.budget,
        "selects": select,
        "heads_vote": select and select.votes,
        "reuses": select and select.reuses,
        "counts": select and select.count,
        "weighs": select and select.weight,
        "sketches": step.sketch,
        "bounds_pages": select and not select.votes and select.form == "page_bound",
        "compact": step.compact,
        "rotates": policy.rotates,
        "reads_text": policy.reads_text,
        "settles_turns": policy.settles_turns,
        "torch_evicts": cpp and cpp.beyond,
        "rope_cached": policy.rope == "cached",
        "vectors": torch.vectors,
        "tensors_of_values": _tensors_of_values(policy),
    }
    yield from ((name, "True") for name, stated in holds.items() if stated)


def _tensors_in_order(policy: Policy) -> Policy:
    """Put tensors first that take one row of `SlotState.constants`, which kernels index by number.

    Kernels do not read the others, matrices and vectors of query heads.
    """
    in_order = sorted(policy.tensors, key=lambda tensor: not {"rank", "group"}.isdisjoint(tensor.axes))
    return policy.model_copy(update={"tensors": tuple(in_order)})


def _tensors_of_values(policy: Policy) -> bool:
    """Return whether a reduction over dims combines dims of tensors with those of values."""
    return any(
        reads(node.body, "v") and reads_vectors(node.body)
        for expr in everywhere(policy)
        for node in parts_of(expr, Reduce, axis=Axis.DIM)
    )


def _lowered(target: str, plan: Callable[[Step], Plan], step: Step, refusals: dict[str, str]) -> Plan | None:
    """Return a target's plan, or None with the reason in `refusals`."""
    try:
        return plan(step)
    except NotLowerable as refusal:
        refusals[target] = str(refusal)
        return None


def _torch(step: Step) -> TorchPlan:
    """Return the torch plan, which serves the prompts of every backend.

    Raises:
        KvdslError: if torch has no code for something that the checker accepts.
    """
    try:
        return torch_plan(step)
    except NotLowerable as refusal:
        raise KvdslError(f"no backend has code for {refusal}") from refusal
