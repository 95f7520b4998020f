"""A policy as torch: the functions of a generated `kernels_torch.py`; `kvdsl/lower/torch_expressions.py` has the expressions in them."""

from __future__ import annotations

from dataclasses import dataclass

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Column, Expr, Keep, LayerRange, Policy, Reduce, Select
from kvdsl.ir.ops import FIXED
from kvdsl.ir.visitors import of_query_heads, walk
from kvdsl.lower.expression import Fragment, fragment, names_of, texts, uses_of
from kvdsl.lower.sharing import shared
from kvdsl.lower.torch_expressions import CAN, TORCH, VECTORS, CountPrinter, NumberPrinter, TensorPrinter, TokenPrinter
from kvdsl.passes.parts import in_parts


@dataclass(frozen=True)
class TorchPlan:
    """Bodies of the functions of `kernels_torch.py`, one statement a line; a function without a body is not printed.

    `protects` is whether there is a `protect`, which may have nothing to do; `uses_torch`, whether a body needs torch by its name;
    `vectors`, whether `observe` computes something for every query, slot and dim;
    `summary`, what the file has in words; `protected`, what `protect` names.
    """

    summary: str
    protected: str
    uses_torch: bool
    vectors: bool
    observe: tuple[str, ...]
    fold: tuple[str, ...]
    prune: tuple[str, ...]
    place: tuple[str, ...]
    protects: bool
    protect: tuple[str, ...]
    budget: tuple[str, ...]
    score: tuple[str, ...]
    count: tuple[str, ...]
    weigh: tuple[str, ...]
    select: tuple[str, ...]
    weight: tuple[str, ...]
    sketch: tuple[str, ...]


def torch_plan(policy: Policy) -> TorchPlan:
    """The torch of a policy whose state columns are known.

    Raises:
        NotLowerable: if there is none.
    """
    policy = in_parts(policy, CAN.knows)
    CAN.check_columns(policy.columns)
    row, slots, new = TensorPrinter("row"), TensorPrinter("slots"), TokenPrinter()
    folded = [column for column in policy.columns if column.rule not in ("token", "fold", "prune")]
    place = [fragment(f'new.put("{c.name}", {{}})', new.value(c.body)) for c in policy.columns if c.rule == "token"]
    observe = [_observed(column, row) for column in folded]
    fold, prune = _named(policy, "fold", row), _named(policy, "prune", slots)
    protect = [_torch_keep(keep, slots, policy.ends_last) for keep in policy.keeps]
    score = [] if policy.score is None else _score(policy.score)
    budget = [] if policy.measured is None else [fragment("return {}", _budget(policy))]
    by = None if policy.across_layers is None else policy.across_layers.by
    weigh = [] if by is None else [fragment("return {}", slots.value(by))]
    select = [] if policy.select is None else [fragment("return {}", row.body(policy.select.by))]
    count = [] if policy.select is None or policy.select.measured is None else [fragment("return {}", _count(policy.select))]
    weighed = None if policy.select is None else policy.select.weight
    weight = [] if weighed is None else [fragment("return {}", row.body(weighed))]
    dims = TensorPrinter("row", dims=True)
    sketch = [] if policy.sketch is None else [fragment("return {}", dims.body(policy.sketch.by))]
    evicts, selects = policy.budget is not None, policy.select is not None
    attended = "what is attended to"
    evicted = f"what is remembered of every query, {f'who leaves, and {attended}' if selects else 'and who leaves'}"
    return TorchPlan(
        summary=evicted if evicts or not selects else attended,
        protected="What may not leave." if evicts else "What is always attended to.",
        uses_torch=TORCH
        in uses_of(*place, *observe, *fold, *prune, *protect, *budget, *score, *weigh, *count, *select, *weight, *sketch),
        vectors=VECTORS in uses_of(*observe, *fold),
        observe=_function("row", observe),
        fold=_returned("row", fold),
        prune=_returned("slots", prune),
        place=texts(place),
        protects=evicts or selects,
        protect=_function("slots", protect),
        budget=_function("slots", budget),
        score=_function("slots", score),
        count=_function("row", count),
        weigh=_function("slots", weigh),
        select=_function("row", select),
        weight=_function("row", weight),
        sketch=_function("row", sketch),
    )


def _function(view: str, lines: list[Fragment]) -> tuple[str, ...]:
    """The body of a function, if it does anything. Columns are read once and have their names in the expressions."""
    columns = names_of(uses_of(*lines), "column")
    return shared([*(f'{name} = {view}.column("{name}")' for name in columns), *texts(lines)]) if lines else ()


def _score(score: Expr) -> list[Fragment]:
    """What slots score; each reduction over the text is found once."""
    texts = dict.fromkeys(part for part in walk(score) if isinstance(part, Reduce) and part.within == "text")
    names: dict[Expr, str] = {}
    lines = []
    for number, part in enumerate(texts, 1):
        names[part] = f"{part.op}_over_text_{number}"
        bare = TensorPrinter("slots", grouped=of_query_heads(part.body), dims=Axis.DIM in axes_of(part.body))
        lines.append(fragment(f"{names[part]} = {{}}", bare.value(part)))
    return [*lines, fragment("return {}", TensorPrinter("slots", names=names).body(score))]


def _budget(policy: Policy) -> Fragment:
    """What a budget that reads the data is, in the layers where the policy evicts; elsewhere it keeps everything."""
    assert policy.measured is not None
    made = CountPrinter("slots", agreed=policy.victims == "heads").value(policy.measured)
    return _in_layers("slots", made, policy.layers)


def _count(select: Select) -> Fragment:
    """How many tokens a query selects; per query head where that reads q, then reduced over the group, unless each selects for itself."""
    assert select.measured is not None
    made = CountPrinter("row", grouped=of_query_heads(select.measured)).value(select.measured)
    if of_query_heads(select.measured):
        made = fragment("row.over_group({})", made)
    return _in_layers("row", made, select)


def _in_layers(view: str, count: Fragment, layers: LayerRange | Select | None) -> Fragment:
    numbers = CountPrinter(view)
    ends = (
        {}
        if layers is None
        else {name: end for name, end in (("low", layers.low), ("high", layers.high)) if end is not None}
    )
    if not ends:
        return count
    return fragment(
        f"{view}.in_layers({{}}, {', '.join(f'{name}={{}}' for name in ends)})", count, *map(numbers, ends.values())
    )


def _observed(column: Column, row: TensorPrinter) -> Fragment:
    decay = [] if column.decay is None else [row.value(column.decay)]
    more = ", {}" * len(decay)
    return fragment(f'columns.{column.rule}("{column.name}", {{}}{more})', row.body(column.body), *decay)


def _named(policy: Policy, rule: str, view: TensorPrinter) -> list[Fragment]:
    """What the columns of a rule become, by their names."""
    return [fragment(f'"{c.name}": {{}}', view.body(c.body)) for c in policy.columns if c.rule == rule]


def _returned(view: str, named: list[Fragment]) -> tuple[str, ...]:
    """The body of a function that gives the new values of columns, of which none is changed before all are known."""
    if not named:
        return ()
    return _function(view, [Fragment("return {"), *(fragment("    {},", line) for line in named), Fragment("}")])


_IN_KERNEL = NumberPrinter(
    'numbers["{}"]', {name: f'numbers["{name}"]' for name in FIXED} | {"live": "keep.live"}, 'slots.constants.of_head("{}")'
)


def _torch_keep(keep: Keep, slots: TensorPrinter, ends_last: bool) -> Fragment:
    if keep.scope == "where":
        assert keep.by is not None
        return fragment("keep.where({})", slots.truth(keep.by))
    assert keep.count is not None
    by = [] if keep.by is None else [slots.value(keep.by)]
    said = ", ends_last=True" if ends_last and keep.scope in ("first", "last") else ""
    return fragment(f"keep.{keep.scope}({'{}, ' * len(by)}{{}}{said})", *by, _IN_KERNEL(keep.count))
