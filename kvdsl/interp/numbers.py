"""The numbers of a policy, such as params and budget, for one row, layer and KV head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvdsl.budget import is_rate, tokens_or_rate
from kvdsl.interp.evaluate import Array, Scope, at_least_one, counted, evaluate_number, floored, number, some
from kvdsl.interp.inputs import NO_TENSORS, Tensors, rows_of
from kvdsl.ir.nodes import Expr, LayerRange, Policy, Select
from kvdsl.ir.ops import ENDS

Value = Callable[[Expr | None, float], float]
"""Evaluates an optional expression; returns the second argument without one."""


@dataclass(frozen=True)
class Numbers:
    """A policy's numbers for one row and layer, and for one KV head if they read tensors.

    Attributes:
        params: the params by name; a `budget` given as a ratio of the prompt is in tokens.
        budget: the tokens kept after a settle (the soft capacity C), rounded down; inf keeps everything.
        prompt: the row's tokens up to the end of its last prompt, without padding, or the number expected (see
            `kvdsl.interp.text`).
        prompt_end: the same without the expected ones.
        turns: the number of ended turns.
        tensors: the tensors' values for the KV head, [1, dims or 1] each.
        layer, layers: the layer, counted from 0, and the number of layers.
        trigger: prune only once live - C reaches this; 0 never.
        slack, max_drop: the target of a prune is C, or with max_drop d > 0 min(max(live - d, C), C + slack).
        evicts: whether the policy evicts in this layer.
        floor: the slots that a head keeps in any case under a budget across heads.
        share: the layer's share of all layers' budgets, per KV head; None if they are not shared, or not yet.
        layer_floor: the least that a layer keeps per head if layers share their budgets by weight.
        floor_ratio: `floor` as a ratio of the budget.
        select: the tokens that a decode query attends to, rounded down; inf attends to everything.
        selects: whether queries select in this layer.
        chooser: the layer whose selection this one uses, itself if others use its own; -1 for none.
        page: the tokens of a page; 1 without pages. `page_after`: the tokens before the first page.
        sketch_dims, sketch_every: the number of the sketch's dims, and the interval of sketches in decode queries.
        prefill_block: a prompt settles after every so many tokens of the row; inf: at the end of each forward.
    """

    params: dict[str, float]
    budget: float
    prompt: float = 0
    layer: int = 0
    layers: int = 1
    trigger: float = 1
    slack: float = 0
    max_drop: float = 0
    evicts: bool = True
    floor: float = 0
    share: float | None = None
    layer_floor: float = 0
    floor_ratio: float = 0
    select: float = math.inf
    selects: bool = False
    chooser: int = -1
    page: float = 1
    page_after: float = 0
    sketch_dims: float = 1
    sketch_every: float = 1
    prefill_block: float = math.inf
    prompt_end: float = 0
    turns: float = 0
    tensors: Mapping[str, Array] = field(default_factory=dict)

    def with_share(self, tokens: float) -> Numbers:
        """Return the numbers with a share of all layers' budgets; `budget` in expressions does not change."""
        return replace(self, share=tokens, floor=counted(self.floor_ratio * tokens))

    @property
    def capacity(self) -> float:
        """The tokens that this layer keeps after a settle: `budget` or its share; inf if it does not evict."""
        kept = self.budget if self.share is None else self.share
        return kept if self.evicts else math.inf

    @property
    def chooses(self) -> bool:
        """Whether the layer selects for those above, and attends to everything itself."""
        return self.chooser == self.layer

    @property
    def takes_over(self) -> bool:
        """Whether the layer uses the selection of a layer below."""
        return 0 <= self.chooser < self.layer

    @cached_property
    def inputs(self) -> Mapping[str, Array]:
        """The inputs that are the same for every slot and moment."""
        known = {name: number(getattr(self, name)) for name in ("budget", "prompt", "layer", "layers", "turns")}
        return {**known, "everything": number(math.inf)}

    def value(self, expr: Expr) -> float:
        """Return the value of an expression without axes, which reads params, these numbers, and the KV head's tensors."""
        return evaluate_number(expr, Scope(0, 0, self.inputs, self.params, self.tensors))


def resolve(
    policy: Policy, given: Mapping[str, float | None] | None = None, prompt: float = 0, layer: int = 0, layers: int = 1,
    *, expected: float = 0, turns: float = 0, head: int = 0, tensors: Tensors = NO_TENSORS,
) -> Numbers:  # fmt: skip
    """Evaluate the policy's numbers: params as given or by default, and the budget and other counts, rounded down.

    Args:
        given: values of params by name; None stands for the default. A `budget` is an int of tokens, or a float up to 1.0 as a ratio.
        prompt: the row's tokens up to the end of its last prompt.
        expected: the least value of `prompt` in expressions.
        turns: the number of ended turns.
        head: the KV head's index, for numbers that read tensors.
        tensors: the contents of the policy's files, if its numbers read them.

    Raises:
        ValueError: if a given name is not a param of the policy, or a given budget is invalid.
    """
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    if "budget" in chosen:
        chosen["budget"] = tokens_or_rate(chosen["budget"])
    unknown = chosen.keys() - {param.name for param in policy.params}
    if unknown:
        raise ValueError(f"{policy.name} has no param {', '.join(sorted(unknown))}")
    counted_prompt = max(prompt, expected)
    known = {"prompt": counted_prompt, "layer": layer, "layers": layers, "everything": math.inf}
    inputs = {name: number(value) for name, value in known.items()}
    rows = rows_of(policy, tensors, layer, head) if tensors else {}
    params = _Params(policy, chosen, Scope(0, 0, inputs, {}, rows))
    # The budget reads params, other params' defaults read the budget; the checker has refused cycles.
    budget = math.inf if policy.budget is None else at_least_one(evaluate_number(policy.budget, params.scope))
    inputs["budget"] = number(budget)

    def value(expr: Expr | None, default: float) -> float:
        return default if expr is None else evaluate_number(expr, params.scope)

    evicts, sketch, layers_share = policy.layers, policy.sketch, policy.across_layers
    pool = layers_share if policy.one_pool else None
    floor_ratio = value(policy.across if pool is None else pool.floor, 0)
    kept = 0.0 if layers_share is None else at_ends(policy, lambda count: value(count, 0))
    select, chooser = _selection(policy.select, value, layer)
    return Numbers(
        params={param.name: params[param.name] for param in policy.params},
        budget=budget,
        prompt=counted_prompt,
        prompt_end=prompt,
        turns=turns,
        tensors=rows,
        layer=layer,
        layers=layers,
        trigger=some(value(policy.trigger, 1)),
        slack=counted(value(policy.slack, 0)),
        max_drop=some(value(policy.max_drop, 0)),
        evicts=evicts is None or _is_within(evicts, value, layer),
        floor=counted(floor_ratio * budget) if floor_ratio else 0,
        floor_ratio=floor_ratio,
        layer_floor=max(counted(value(layers_share.floor, 0) * budget), kept) if layers_share is not None else 0,
        select=math.inf if select is None else floored(value(select.count, math.inf)),
        selects=select is not None,
        chooser=chooser,
        page=at_least_one(value(policy.pages, 1)),
        page_after=counted(value(policy.pages_after, 0)),
        sketch_dims=at_least_one(value(sketch.count, 1) if sketch is not None else 1),
        sketch_every=at_least_one(value(sketch.every, 1) if sketch is not None else 1),
        prefill_block=math.inf if policy.prefill_block is None else at_least_one(value(policy.prefill_block, 1)),
    )


def at_ends(policy: Policy, value: Callable[[Expr], float]) -> float:
    """Return how many tokens `keep first` or `keep last` protects."""
    counts = [(keep.scope, counted(value(keep.count))) for keep in policy.keeps if keep.row.place and keep.count is not None]
    return sum(max((count for scope, count in counts if scope == end), default=0.0) for end in ENDS)


def _selection(select: Select | None, value: Value, layer: int) -> tuple[Select | None, int]:
    """Return the `select` that the layer runs itself, and the layer that selects for it, -1 for none."""
    if select is None:
        return None, -1
    choosing = [floored(value(one, -1)) for one in select.choosing]
    chooser = int(max((one for one in choosing if one <= layer), default=-1))
    own = _is_within(select, value, layer) and (not choosing or chooser == layer)
    return (select if own else None), chooser


def _is_within(range_: LayerRange | Select, value: Value, layer: int) -> bool:
    return value(range_.low, -math.inf) <= layer <= value(range_.high, math.inf)


def resolve_heads(policy: Policy, *where: Any, heads: int, head_offset: int = 0, **more: Any) -> list[Numbers]:
    """Return `resolve` for every KV head of a layer, with its other arguments."""
    return [resolve(policy, *where, head=head_offset + head, **more) for head in range(heads)]


class _Params(dict[str, float]):
    """The params' values, each evaluated at its first use."""

    def __init__(self, policy: Policy, given: Mapping[str, float], scope: Scope) -> None:
        super().__init__()
        self._defaults = {param.name: param.default for param in policy.params}
        self._given = given
        self.scope = replace(scope, params=self)

    def __missing__(self, name: str) -> float:
        if name not in self._given:
            value = evaluate_number(self._defaults[name], self.scope)
        elif name == "budget" and is_rate(self._given[name]):
            value = max(1.0, floored(self._given[name] * float(self.scope.inputs["prompt"].item())))
        else:
            value = float(self._given[name])
        self[name] = value
        return value
