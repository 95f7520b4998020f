"""Lower a policy to torch: the functions of a generated `kernels_torch.py`. `kvdsl/lower/torch_expressions.py` prints expressions."""

from __future__ import annotations

from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Column, Expr, Keep, LayerRange, Reduce, TensorRef
from kvdsl.ir.ops import TABLED
from kvdsl.ir.visitors import axes_of, has, of_query_heads, parts_of, reads
from kvdsl.lower.expression import Fragment, fragment, names_of, texts, uses_of
from kvdsl.lower.sharing import shared
from kvdsl.lower.step import Step, for_target, in_layers
from kvdsl.lower.torch_expressions import CAN, TORCH, VECTORS, CountPrinter, NumberPrinter, TensorPrinter, TokenPrinter


@dataclass(frozen=True)
class TorchPlan:
    """Bodies of the functions of `kernels_torch.py`, one statement a line; a function without a body is not printed.

    Attributes:
        summary: the contents of the file, in words.
        protected: the docstring of `protect`.
        uses_torch: whether a body uses the name `torch`.
        vectors: whether `observe` computes a value for every query, slot and dim.
        protects: whether `protect` exists, even with an empty body.
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
    counts_protected: tuple[str, ...]
    budget: tuple[str, ...]
    score: tuple[str, ...]
    count: tuple[str, ...]
    weigh: tuple[str, ...]
    select: tuple[str, ...]
    weight: tuple[str, ...]
    sketch: tuple[str, ...]


def torch_plan(step: Step) -> TorchPlan:
    """Lower a step to torch.

    Raises:
        NotLowerable: if torch has no code for it.
    """
    step = for_target(step, CAN, {})
    row, slots, new = TensorPrinter("row"), TensorPrinter("slots"), TokenPrinter()
    evict, select = step.evict, step.select
    bodies = {
        "place": [fragment(f'new.put("{c.name}", {{}})', new.value(c.body)) for c in step.place],
        "observe": [_observed(column, row) for column in step.observe if column.rule != "fold"],
        "fold": _named(step.ruled("fold"), row),
        "prune": _named(step.ruled("prune"), slots),
        "protect": [_torch_keep(keep, slots, step.protect.ends_last) for keep in step.protect.keeps],
        "counts_protected": _counts_protected(step),
        "budget": [] if evict is None or evict.budget is None else _returned(_budget(evict.budget, evict.by)),
        "score": [] if evict is None else _score(evict.score),
        "weigh": [] if step.share is None else _returned(slots.value(step.share)),
        "count": [] if select is None or select.count is None else _returned(_count(select.count, select.layers)),
        "select": [] if select is None else _returned(row.body(select.by)),
        "weight": [] if select is None or select.weight is None else _returned(row.body(select.weight)),
        "sketch": [] if step.sketch is None else _returned(TensorPrinter("row", dims=True).body(step.sketch)),
    }
    evicted = "state columns, eviction and selection" if select else "state columns and eviction"
    return TorchPlan(
        summary=evicted if evict or not select else "selection",
        protected="Protect tokens from eviction." if evict else "Mark tokens that are always selected.",
        uses_torch=TORCH in uses_of(*(line for lines in bodies.values() for line in lines)),
        vectors=VECTORS in uses_of(*bodies["observe"], *bodies["fold"]),
        protects=evict is not None or select is not None,
        **{name: _function(_VIEWS.get(name, "slots"), lines) for name, lines in bodies.items()},
    )


_VIEWS = {"place": "new", **dict.fromkeys(("observe", "fold", "count", "select", "weight", "sketch"), "row")}
"""The argument of functions that do not read the live slots."""


def _returned(value: Fragment) -> list[Fragment]:
    return [fragment("return {}", value)]


def _function(view: str, lines: list[Fragment]) -> tuple[str, ...]:
    """Return the body of a function, if it has statements. Each column is read once into a local of its name."""
    columns = names_of(uses_of(*lines), "column")
    return shared([*(f'{name} = {view}.column("{name}")' for name in columns), *texts(lines)]) if lines else ()


def _score(score: Expr) -> list[Fragment]:
    """Print the score; each reduction over the text is computed once."""
    texts = dict.fromkeys(parts_of(score, Reduce, within="text"))
    names: dict[Expr, str] = {}
    lines = []
    for number, part in enumerate(texts, 1):
        names[part] = f"{part.op}_over_text_{number}"
        bare = TensorPrinter("slots", grouped=of_query_heads(part.body), dims=Axis.DIM in axes_of(part.body))
        lines.append(fragment(f"{names[part]} = {{}}", bare.value(part)))
    return [*lines, fragment("return {}", TensorPrinter("slots", names=names).body(score))]


def _budget(budget: Expr, by: str) -> Fragment:
    return CountPrinter("slots", agreed=by == "heads").value(budget)


def _count(count: Expr, layers: LayerRange) -> Fragment:
    """Print the number of tokens that a query selects. If it reads q it is reduced over the group, except under `group each`."""
    bounded = in_layers(count, layers)
    assert bounded is not None
    made = CountPrinter("row", grouped=of_query_heads(count)).value(bounded)
    return fragment("row.over_group({})", made) if of_query_heads(count) else made


def _observed(column: Column, row: TensorPrinter) -> Fragment:
    decay = [] if column.decay is None else [row.value(column.decay)]
    more = ", {}" * len(decay)
    return fragment(f'columns.{column.rule}("{column.name}", {{}}{more})', row.body(column.body), *decay)


def _counts_protected(step: Step) -> list[Fragment]:
    """Print the counts of `keep` lines, if they may protect more than the budget and do not depend on the cached tokens."""
    counts = [keep.count for keep in step.protect.keeps if keep.count is not None]
    known = len(counts) == len(step.protect.keeps) and not any(reads(x, "live") or has(x, TensorRef) for x in counts)
    if step.evict is None or not step.protect.overprotects or not known:
        return []
    printed = map(_IN_KERNEL, counts)
    return [fragment(f"return [{', '.join('{}' for _ in counts)}]", *printed)]


def _named(columns: tuple[Column, ...], view: TensorPrinter) -> list[Fragment]:
    """Print new values of columns; none is assigned before all are computed."""
    new = [fragment(f'    "{column.name}": {{}},', view.body(column.body)) for column in columns]
    return [Fragment("return {"), *new, Fragment("}")] if new else []


_IN_KERNEL = NumberPrinter(
    'numbers["{}"]', {name: f'numbers["{name}"]' for name in TABLED} | {"live": "keep.live"}, 'slots.constants.of_head("{}")'
)


def _torch_keep(keep: Keep, slots: TensorPrinter, ends_last: bool) -> Fragment:
    given = [] if keep.by is None else [slots.truth(keep.by) if keep.row.holds else slots.value(keep.by)]
    given += [] if keep.count is None else [_IN_KERNEL(keep.count)]
    given += [Fragment("ends_last=True")] if ends_last and keep.row.place else []
    return fragment(f"keep.{keep.scope}({', '.join('{}' for _ in given)})", *given)
