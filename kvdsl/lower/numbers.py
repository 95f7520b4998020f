"""The numbers of a policy, such as params, computed per row in the generated `resolve` of `cache.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvdsl.budget import offers_ratio
from kvdsl.ir.nodes import Expr, Input, LayerRange, Number, Param, ParamRef, Policy, Select, TensorRef, is_call
from kvdsl.ir.ops import ENDS, POOLS
from kvdsl.ir.printer import print_expression, print_keep, print_number
from kvdsl.ir.visitors import has, parts_of, reads, walk
from kvdsl.lower.expression import Fragment, fragment, names_of, size_of, spelled, texts, uses_of
from kvdsl.lower.torch_expressions import NumberPrinter

STAGES: Mapping[str, int] = MappingProxyType({"trigger": 1, "slack": 0, "max_drop": 0})
"""The numbers that, with the capacity, decide how many tokens to evict, and their values if the table lacks them."""


@dataclass(frozen=True)
class ParamPlan:
    """One constructor argument.

    Attributes:
        name: a checked identifier that is not reserved.
        annotation, default: for the constructor's signature.
        given: the expression that the constructor passes on.
        help: its text in the docstring.
    """

    name: str
    annotation: str
    default: str
    given: str
    help: str


@dataclass(frozen=True)
class NumbersPlan:
    """The computation of a policy's numbers.

    Attributes:
        resolve: the statements that compute the numbers of a row from the user's params.
        numbers: names and expressions of the numbers that kernels read per row, in the order of the table.
        uses_torch: whether either needs torch.
        heads_differ: whether any differs between the KV heads of a layer.
    """

    params: tuple[ParamPlan, ...]
    resolve: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    uses_torch: bool
    heads_differ: bool


_RESOLVE = NumberPrinter(
    "{}",
    {"budget": "capacity"} | {name: f"given.{name}" for name in ("prompt", "layer", "layers", "everything", "turns")},
    'given.tensor("{}")',
)


_CAPACITY = Fragment("capacity")


def numbers_plan(policy: Policy) -> NumbersPlan:
    """Return the numbers of a policy that has its state columns."""
    resolve, numbers = list(_resolve(policy)), list(_numbers(policy))
    return NumbersPlan(
        params=tuple(_param(param, {one.name for one in policy.params}) for param in policy.params),
        resolve=texts(resolve),
        numbers=tuple((name, made.text) for name, made in numbers),
        uses_torch="torch" in names_of(uses_of(*resolve, *(made for _, made in numbers)), "helper"),
        heads_differ=heads_differ(policy),
    )


def heads_differ(policy: Policy) -> bool:
    """Return whether a number that counts tokens reads a per-head tensor."""
    read = {node.name for expr in _numbers_of(policy) for node in parts_of(expr, TensorRef)}
    return any(tensor.name in read and "heads" in tensor.axes for tensor in policy.tensors)


def _numbers_of(policy: Policy) -> Iterator[Expr]:
    """Yield the expressions that `resolve` evaluates."""
    yield from (param.default for param in policy.params)
    yield from (keep.count for keep in policy.keeps if keep.count is not None)
    yield from (policy.trigger, policy.slack, policy.max_drop)
    yield from () if policy.budget is None else (policy.budget,)
    yield from () if policy.select is None else (policy.select.count,)


def _param(param: Param, params: Collection[str]) -> ParamPlan:
    constant, given = param.default.kind == "number", param.name
    if constant and param.name == "budget" and offers_ratio(params):
        constant, given = False, f"{_RESOLVE(param.default).text} if budget is None and ratio is None else budget"
    ratio = "; 0.25 is a ratio of the prompt, 1.0 all of it" if param.name == "budget" else ""
    return ParamPlan(
        name=param.name,
        annotation="float" if constant else "float | None",
        default=_RESOLVE(param.default).text if constant else "None",
        given=given,
        help=f"default {print_expression(param.default)}{' ' + param.unit if param.unit else ''}{ratio}",
    )


def _resolve(policy: Policy) -> Iterator[Fragment]:
    """Yield params in order, and the capacity between those that it reads and those that read it."""
    bounds, early = _bounds(policy), _ahead_of_the_budget(policy)
    for param in early:
        yield _assigned(param, bounds)
    if policy.budget:
        yield fragment("capacity = {}", _at_least_one(policy.budget))
    for param in policy.params:
        if param not in early:
            yield _assigned(param, bounds)
    if policy.select:
        if policy.select.choosing:
            listed = [_RESOLVE(layer) for layer in policy.select.choosing]
            yield fragment(f"chooser = given.chooser({', '.join('{}' for _ in listed)})", *listed)
        yield fragment("select = {}", _selected(policy.select))
    yield from _decays(policy)
    yield from _fits(policy)


def _ahead_of_the_budget(policy: Policy) -> list[Param]:
    """Return the params up to the last that the budget reads, except those that depend on the budget."""
    awaited = {node.name for node in parts_of(policy.budget, ParamRef)} if policy.budget else set()
    behind, ahead, count = set[str](), list[Param](), 0
    for param in policy.params:
        if reads(param.default, "budget") or behind & {node.name for node in parts_of(param.default, ParamRef)}:
            behind.add(param.name)
            continue
        ahead.append(param)
        if param.name in awaited:
            count = len(ahead)
    return ahead[:count]


def _assigned(param: Param, bounds: Mapping[str, tuple[float, float]]) -> Fragment:
    return fragment(f"{spelled(param.name)} = {{}}", _given(param, bounds))


_MANY = 2**31 - 1


def _selected(select: Select) -> Fragment:
    """Return how many tokens a query selects, or chooses for the layers above; inf in other layers.

    For a count computed by each query it is a finite number larger than any text.
    """
    count = _at_least_one(select.count if select.measured is None else Number(value=_MANY))
    return fragment("given.inside({}, low=chooser, high=chooser)", count) if select.choosing else _inside(count, select)


def _count(expr: Expr) -> Fragment:
    return fragment("given.count({})", _RESOLVE(expr))


def _some(expr: Expr) -> Fragment:
    return fragment("given.some({})", _RESOLVE(expr))


def _at_least_one(expr: Expr) -> Fragment:
    return fragment("given.count({}, low=1)", _RESOLVE(expr))


def _inside(count: Fragment, layers: LayerRange | Select | None) -> Fragment:
    """Return a count inside a range of layers; inf outside."""
    if layers is None or (layers.low is None and layers.high is None):
        return count
    ends = {name: _RESOLVE(end) for name, end in (("low", layers.low), ("high", layers.high)) if end is not None}
    return fragment(f"given.inside({{}}, {', '.join(f'{name}={{}}' for name in ends)})", count, *ends.values())


def _bounds(policy: Policy) -> dict[str, tuple[float, float]]:
    """Return the bounds of params that are used directly as a count or decay; the checker applies them to defaults."""
    sketch = policy.sketch
    counts = [policy.trigger, policy.slack, policy.max_drop, policy.pages_after, *(keep.count for keep in policy.keeps)]
    some = [policy.pages, policy.prefill_block, policy.block, *(column.size for column in policy.columns)]
    some += [node.args[1] for expr in _evaluated(policy) for node in walk(expr) if is_call(node, *POOLS)]
    some += [] if policy.select is None else [policy.select.count]
    some += [] if sketch is None else [sketch.count, sketch.every]
    bounded = [
        *((expr, 0.0, math.inf) for expr in counts),
        *((expr, 1.0, math.inf) for expr in some),
        *((column.decay, 0.0, 1.0) for column in policy.columns),
    ]
    found = dict[str, tuple[float, float]]()
    for expr, low, high in bounded:
        if isinstance(expr, ParamRef):
            known = found.get(expr.name, (low, high))
            found[expr.name] = max(known[0], low), min(known[1], high)
    return found


def _given(param: Param, bounds: Mapping[str, tuple[float, float]]) -> Fragment:
    method = "tokens" if param.name == "budget" else "number"
    low, high = bounds.get(param.name, (-math.inf, math.inf)) if method == "number" else (-math.inf, math.inf)
    low = max(low, -math.inf if param.low is None else param.low)
    high = min(high, math.inf if param.high is None else param.high)
    limits = "".join(
        f", {side}={print_number(bound)}" for side, bound in (("low", low), ("high", high)) if math.isfinite(bound)
    )
    return fragment(f'given.{method}("{param.name}", {{}}{limits})', _RESOLVE(param.default))


def _decays(policy: Policy) -> Iterator[Fragment]:
    """Check computed decays, which lie between 0 and 1."""
    for decay in dict.fromkeys(column.decay for column in policy.columns if column.decay is not None):
        if decay.kind not in ("number", "param"):
            yield fragment("given.check_decay({})", _RESOLVE(decay))


def _fits(policy: Policy) -> Iterator[Fragment]:
    """Check that `keep first` and `keep last` leave room for a candidate."""
    static = [keep for keep in policy.keeps if keep.row.place]
    if not static:
        return
    keeps = Fragment(json.dumps(", ".join(print_keep(keep) for keep in static)))
    if policy.budget:
        yield fragment("given.check_fits({}, {}, {}, {})", *_at_ends(policy), _inside(_CAPACITY, policy.layers), keeps)
    if policy.select:
        yield fragment("given.check_fits({}, {}, select, {}, selected=True)", *_at_ends(policy), keeps)


def _at_ends(policy: Policy) -> list[Fragment]:
    """Print the number of protected tokens at each end. Keeps of one kind overlap."""
    return [_largest(keep.count for keep in policy.keeps if keep.scope == end) for end in ENDS]


def _largest(counts: Iterable[Expr | None]) -> Fragment:
    printed = [_RESOLVE(count) for count in counts if count is not None]
    return fragment(f"given.largest({', '.join('{}' for _ in printed)})", *printed)


def _numbers(policy: Policy) -> Iterator[tuple[str, Fragment]]:
    """Yield names and texts of the numbers that kernels read per row, in the order of the table."""
    exprs = list(_evaluated(policy))
    names = (spelled(param.name) for param in policy.params if _refers(exprs, param.name))
    yield from ((name, Fragment(name)) for name in names)
    read = {name for name in _RESOLVE.inputs if any(reads(expr, name) for expr in exprs)}
    if any(one.source == "turn" for one in policy.given):
        read.add("turns")  # a new token reads its turn there
    yield from ((name, Fragment(text)) for name, text in _RESOLVE.inputs.items() if name in read)
    if policy.budget:
        yield "capacity", _inside(_CAPACITY, policy.layers)
        yield from _staging(policy)
    yield from _floors(policy)
    if policy.select:
        yield "select", Fragment("select")
        if policy.select.choosing:
            yield "chooser", Fragment("chooser")
    if policy.pages:
        yield "page", _at_least_one(policy.pages)
    if policy.pages_after:
        yield "page_after", _count(policy.pages_after)
    if policy.sketch:
        yield "sketch_dims", _at_least_one(policy.sketch.count)
        yield "sketch_every", _at_least_one(policy.sketch.every)
    if policy.prefill_block:
        yield "prefill_block", _at_least_one(policy.prefill_block)
    if policy.storage == "blocks" and policy.block:
        yield "block", _at_least_one(policy.block)
    yield from ((size_of(column.name), _at_least_one(column.size)) for column in policy.columns if column.size is not None)


def _floors(policy: Policy) -> Iterator[tuple[str, Fragment]]:
    """Yield what heads or layers keep in any case if they share a budget."""
    layers = policy.across_layers
    if policy.one_pool and layers is not None:
        yield "floor", fragment("given.share(capacity, {})", _RESOLVE(layers.floor))
    elif layers is not None:
        share = fragment("given.share(capacity, {})", _RESOLVE(layers.floor))
        yield "layer_floor", fragment("given.largest({}, {} + {})", share, *_at_ends(policy))
        if policy.across:
            yield "head_floor", fragment("given.rate({})", _RESOLVE(policy.across))
    elif policy.across:
        yield "floor", fragment("given.share(capacity, {})", _RESOLVE(policy.across))


def _evaluated(policy: Policy) -> Iterator[Expr]:
    """Yield the expressions that kernels evaluate."""
    for column in policy.columns:
        yield column.body
        if column.decay is not None:
            yield column.decay
    yield from (keep.count for keep in policy.keeps if keep.count is not None)
    yield from (expr for _, expr in policy.statements())
    if policy.select is not None and policy.select.measured is not None:
        yield from _ends(policy.select)
    if policy.measured is not None:
        yield from _ends(policy.layers)


def _ends(layers: LayerRange | Select | None) -> Iterator[Expr]:
    """Yield the layers in which a data-dependent number applies, and the input to compare them with."""
    ends = [] if layers is None else [end for end in (layers.low, layers.high) if end is not None]
    yield from [*ends, Input(name="layer")] if ends else []


def _staging(policy: Policy) -> Iterator[tuple[str, Fragment]]:
    """Yield the numbers of lazy pruning that differ from their defaults."""
    for name, made in (("trigger", _some), ("slack", _count), ("max_drop", _some)):
        value: Expr = getattr(policy, name)
        if value != Number(value=STAGES[name]) or (name == "slack" and policy.max_drop != Number(value=0)):
            yield name, made(value)


def _refers(exprs: list[Expr], name: str) -> bool:
    return any(has(expr, ParamRef, name=name) for expr in exprs)
