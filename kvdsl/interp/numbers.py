"""The numbers of a policy: its params and its budget, for one row, layer and KV head."""

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

Value = Callable[[Expr | None, float], float]
"""What an expression of a policy's numbers comes to, or the number beside it where there is none."""


@dataclass(frozen=True)
class Numbers:
    """What a policy's numbers are for one row and layer: for all its KV heads, or where they read tensors, for one of them.

    Attributes:
        params: the params by name; a `budget` that was given as a ratio of the prompt is in tokens here.
        budget: the tokens kept after a settle (the soft capacity C), floored; inf keeps everything.
        prompt: the row's tokens up to the end of its last prompt, padding excluded, or as many as are expected (see
            `kvdsl.interp.text`).
        prompt_end: the same without what is only expected.
        turns: how many turns have ended.
        tensors: what the policy's tensors have for the KV head, [1, dims or 1] each.
        layer, layers: the layer, counted from 0, and how many there are.
        trigger: prune only once live - C reaches this; 0 never.
        slack, max_drop: the target of a prune is C, or with max_drop d > 0 min(max(live - d, C), C + slack).
        evicts: whether the layer is one of those where the policy evicts.
        floor: the slots that a head keeps whatever the layer's other heads hold, under a budget across heads.
        share: what the layer got of the budgets that all layers share, per KV head; None where they do not, or not yet.
        layer_floor: what a layer keeps at least per head, where the layers share their budgets by what they are worth.
        floor_rate: `floor` as a part of the budget.
        select: the tokens that a decode query attends to, floored; inf attends to everything.
        selects: whether the layer is one of those where queries select.
        chooser: the layer that chooses what this one attends to, itself where it chooses for those above; -1 where there is none.
        page: the tokens of a page; 1 without pages. `page_after`: those before the page from which pages are counted.
        sketch_dims, sketch_every: the sketch's dims, and the decode queries from one sketch to the next.
        prefill_block: a prompt settles after each so many tokens of the row; inf: at the end of each forward.
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
    floor_rate: float = 0
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
        """The same where the layer gets so many of what all layers share; `budget` in expressions stays what it was."""
        return replace(self, share=tokens, floor=counted(self.floor_rate * tokens))

    @property
    def capacity(self) -> float:
        """The tokens kept after a settle of this layer: `budget`, or its share of all layers', where it evicts, elsewhere inf."""
        kept = self.budget if self.share is None else self.share
        return kept if self.evicts else math.inf

    @property
    def chooses(self) -> bool:
        """Whether the layer chooses for those above, and attends to everything itself."""
        return self.chooser == self.layer

    @property
    def takes_over(self) -> bool:
        """Whether the layer attends to what one below has chosen."""
        return 0 <= self.chooser < self.layer

    @cached_property
    def inputs(self) -> Mapping[str, Array]:
        """The inputs that are the same for every slot and moment."""
        known = {name: number(getattr(self, name)) for name in ("budget", "prompt", "layer", "layers", "turns")}
        return {**known, "everything": number(math.inf)}

    def value(self, expr: Expr) -> float:
        """The value of an expression without axes: of params, these numbers, and tensors that have one for the KV head."""
        return evaluate_number(expr, Scope(0, 0, self.inputs, self.params, self.tensors))


def resolve(
    policy: Policy, given: Mapping[str, float | None] | None = None, prompt: float = 0, layer: int = 0, layers: int = 1,
    *, expected: float = 0, turns: float = 0, head: int = 0, tensors: Tensors = NO_TENSORS,
) -> Numbers:  # fmt: skip
    """Evaluate the policy's numbers: params as given or by default, the budget and what else counts tokens, floored.

    Args:
        given: values of params by name; None stands for the default. Of `budget` an int is tokens, a float up to 1.0 a rate.
        prompt: the row's tokens up to the end of its last prompt.
        expected: as how many they count at least.
        turns: how many turns have ended.
        head: the KV head's index, for which a budget that reads tensors is asked.
        tensors: what the policy's files hold, if its numbers read that.

    Raises:
        ValueError: if a given name is none of the policy's params, or a given budget none.
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

    def most(scope: str) -> float:
        return max((counted(value(keep.count, 0)) for keep in policy.keeps if keep.scope == scope), default=0)

    evicts, sketch, layers_share = policy.layers, policy.sketch, policy.across_layers
    pool = layers_share if policy.one_pool else None
    floor_rate = value(policy.across if pool is None else pool.floor, 0)
    at_ends = 0.0 if layers_share is None else most("first") + most("last")
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
        floor=counted(floor_rate * budget) if floor_rate else 0,
        floor_rate=floor_rate,
        layer_floor=max(counted(value(layers_share.floor, 0) * budget), at_ends) if layers_share is not None else 0,
        select=math.inf if select is None else floored(value(select.count, math.inf)),
        selects=select is not None,
        chooser=chooser,
        page=at_least_one(value(policy.pages, 1)),
        page_after=counted(value(policy.pages_after, 0)),
        sketch_dims=at_least_one(value(sketch.count, 1) if sketch is not None else 1),
        sketch_every=at_least_one(value(sketch.every, 1) if sketch is not None else 1),
        prefill_block=math.inf if policy.prefill_block is None else at_least_one(value(policy.prefill_block, 1)),
    )


def _selection(select: Select | None, value: Value, layer: int) -> tuple[Select | None, int]:
    """What the layer itself selects by, and the layer that chooses for it, -1 for none."""
    if select is None:
        return None, -1
    choosing = [floored(value(one, -1)) for one in select.choosing]
    chooser = int(max((one for one in choosing if one <= layer), default=-1))
    own = _is_within(select, value, layer) and (not choosing or chooser == layer)
    return (select if own else None), chooser


def _is_within(range_: LayerRange | Select, value: Value, layer: int) -> bool:
    return value(range_.low, -math.inf) <= layer <= value(range_.high, math.inf)


def resolve_heads(policy: Policy, *where: Any, heads: int, head_offset: int = 0, **more: Any) -> list[Numbers]:
    """`resolve` for every KV head of a layer; its other arguments."""
    return [resolve(policy, *where, head=head_offset + head, **more) for head in range(heads)]


class _Params(dict[str, float]):
    """The params' values, each found when it is first read."""

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
