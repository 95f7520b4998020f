"""A step of a policy, decided once for all targets: place, observe, rank, protect, select.

Targets have code for the expressions of a step, or refuse them. Only this module decides which columns exist and in which rows, which
loops rank slots, what is protected and how many slots are evicted, so that targets agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from kvdsl.ir.nodes import (
    Axis,
    Call,
    Column,
    Expr,
    Given,
    Input,
    Keep,
    LayerRange,
    Node,
    Number,
    Policy,
    Reduce,
    Tensor,
    call,
    is_call,
    is_reduction,
)
from kvdsl.ir.ops import POOLS
from kvdsl.ir.visitors import has, parts_of
from kvdsl.lower.expression import NotLowerable, Target
from kvdsl.lower.numbers import STAGES, NumbersPlan
from kvdsl.passes.normal import in_parts

START: Mapping[str, float] = {"max": -math.inf, "min": math.inf, "fold": math.nan, "prune": math.nan}
"""A column's initial value, by rule, if it is not 0."""


class Pass(NamedTuple):
    """One loop over the slots of a KV head that has to evict.

    Attributes:
        rows: what slots rank by, and the name of its work row: `score`, and `top_1`, ... for each `keep` that ranks.
        conditions: the conditions that protect slots.
        columns: the columns that a prune updates, in the last loop.
    """

    rows: dict[str, Expr]
    conditions: tuple[Expr, ...]
    columns: tuple[Column, ...]

    @property
    def values(self) -> list[Expr]:
        """Every expression that the loop evaluates. Reductions over slots in them are computed before it, inner ones first."""
        return [*self.rows.values(), *self.conditions, *(column.body for column in self.columns)]


class Protection(Node):
    """The slots protected from eviction, which a query also always selects: the union of the `keep` lines.

    Attributes:
        ends_last: whether `keep first` and `keep last` yield only after all other slots.
    """

    keeps: tuple[Keep, ...]
    ends_last: bool

    def counts(self, scope: str) -> list[Expr]:
        """Return the counts of a scope's lines."""
        return [keep.count for keep in self.keeps if keep.scope == scope and keep.count is not None]

    @property
    def ranks(self) -> dict[str, Expr]:
        """What lines rank slots by, and the names of their work rows."""
        ranking = [keep for keep in self.keeps if keep.row.ranks]
        return {f"{keep.scope}_{n}": keep.by for n, keep in enumerate(ranking, 1) if keep.by is not None}

    @property
    def conditions(self) -> tuple[Expr, ...]:
        """The conditions of lines."""
        return tuple(keep.by for keep in self.keeps if keep.row.holds and keep.by is not None)

    @property
    def ends(self) -> tuple[Keep, ...]:
        """The lines that depend on a token's position."""
        return tuple(keep for keep in self.keeps if keep.row.place)

    @property
    def overprotects(self) -> bool:
        """Whether it may protect more than a budget holds. The checker rules that out for the ends."""
        return len(self.ends) < len(self.keeps)


class Eviction(Node):
    """Eviction from the cache.

    Attributes:
        score: the lowest is evicted first.
        columns: columns updated by an eviction, which it reads as they were before.
        budget: a data-dependent number of tokens to keep; infinite in layers that keep everything.
        stated: the numbers besides the capacity, of those that decide how many slots to evict, in the table; see `overflow`.
        by: which heads evict together: each KV head alone, a layer's `heads`, or all `layers`.
        heads_share, layers_share: whether a layer's KV heads, or the layers, share one budget.
        decodes, prompts: whether a decode step evicts, and the end of a prompt. hard: whether it evicts before a token is placed.
    """

    score: Expr
    columns: tuple[Column, ...]
    budget: Expr | None
    stated: tuple[str, ...]
    by: Literal["own", "heads", "layers"]
    heads_share: bool
    layers_share: bool
    decodes: bool
    prompts: bool
    hard: bool

    @property
    def alone(self) -> bool:
        """Whether each KV head decides alone."""
        return self.by == "own" and not (self.heads_share or self.layers_share)

    @property
    def pools(self) -> bool:
        """Whether the score pools. Pools depend on protection, so such a score is computed after everything else."""
        return any(has(self.score, Call, op=pool) for pool in POOLS)

    @property
    def overflow(self) -> dict[str, int | None]:
        """The arguments that decide how many slots to evict, in order: a number of the table (None), or a constant."""
        stages = {name: None if name in self.stated else default for name, default in STAGES.items()}
        return {"capacity": None, **stages}


class Selection(Node):
    """What a decode query attends to.

    Attributes:
        by: what it ranks slots by.
        count: a data-dependent number of tokens in these `layers`; in others the number `select` is infinite.
        weight: how many times each selected slot counts in the softmax.
        reuses: whether layers use the selection of another layer.
        paged: whether it selects pages. whole: whether pages start with the text and nothing is ever evicted, so that the token at
            position p is in slot p.
    """

    by: Expr
    count: Expr | None
    layers: LayerRange
    weight: Expr | None
    reuses: bool
    paged: bool
    whole: bool

    @property
    def votes(self) -> tuple[Reduce, ...]:
        """The reductions over all KV heads of the layer."""
        return tuple(dict.fromkeys(parts_of(self.by, Reduce, axis=Axis.HEAD)))

    @property
    def of_head(self) -> Expr:
        """What a KV head computes per slot; the last vote reduces it."""
        return self.votes[-1].body if self.votes else self.by

    @property
    def of_votes(self) -> Expr | None:
        """What each KV head computes from a vote; None if it uses the vote directly, or has none."""
        return None if self.votes in ((), (self.by,)) else self.by

    @property
    def form(self) -> str:
        """The fast form of what a KV head computes; `expression` if kernels have none. See `form_of`."""
        form = form_of(self.of_head)
        return form if self.whole or not form.startswith("page") else "expression"


class Step(Node):
    """Everything that the phases of a step evaluate; missing parts are None or empty.

    Attributes:
        numbers: names of the numbers in the table, in order. heads_differ: whether it has a row for each KV head.
        columns: all per-slot state: single numbers first, in the order of the table, then rings.
        observe: the columns updated by queries. place: the columns computed when a token is placed.
        forgets: whether state about queries is dropped after each prompt, so that a decode step observes nothing.
        evict, protect: eviction and protection.
        share: the weight of a layer for its share of the budget.
        select: what a query attends to. sketch: what ranks the dims of the sketch.
        group: the reduction over a group's query heads. compact: whether keys are rotated by their rank among the live slots.
        pages_after: whether tokens lie before the first page.
    """

    numbers: tuple[str, ...]
    heads_differ: bool
    tensors: tuple[Tensor, ...]
    given: tuple[Given, ...]
    columns: tuple[Column, ...]
    forgets: bool
    evict: Eviction | None
    protect: Protection
    share: Expr | None
    select: Selection | None
    sketch: Expr | None
    group: str
    compact: bool
    pages_after: bool

    def ruled(self, *rules: str) -> tuple[Column, ...]:
        """Return the columns with one of these rules."""
        return tuple(column for column in self.columns if column.rule in rules)

    @property
    def place(self) -> tuple[Column, ...]:
        """The columns computed when a token is placed."""
        return self.ruled("token")

    @property
    def observe(self) -> tuple[Column, ...]:
        """The columns updated by queries."""
        return tuple(column for column in self.columns if column.rule not in ("token", "prune"))

    @property
    def singles(self) -> tuple[str, ...]:
        """The columns of one number per slot, each a row of the table."""
        return tuple(column.name for column in self.columns if column.rule != "ring")

    @property
    def rings(self) -> tuple[str, ...]:
        """The columns of N numbers per slot, which follow the others."""
        return tuple(column.name for column in self.columns if column.rule == "ring")

    @property
    def rank(self) -> tuple[Pass, ...]:
        """The loops that rank slots, into work rows; protection is known after the first of them."""
        if self.evict is None:
            return ()
        score = {"score": self.evict.score}
        ranks, conditions = self.protect.ranks, self.protect.conditions
        if self.evict.pools:
            return Pass(ranks, conditions, ()), Pass(score, (), self.evict.columns)
        return (Pass(score | ranks, conditions, self.evict.columns),)


def step_of(policy: Policy, numbers: NumbersPlan) -> Step:
    """Return the step of a policy that has its state columns."""
    shared = policy.across_layers
    return Step(
        numbers=tuple(name for name, _ in numbers.numbers),
        heads_differ=numbers.heads_differ,
        tensors=policy.tensors,
        given=policy.given,
        columns=policy.columns,
        forgets=policy.forgets,
        evict=_eviction(policy, numbers),
        protect=Protection(keeps=policy.keeps, ends_last=policy.ends_last),
        share=None if shared is None else shared.by,
        select=_selection(policy),
        sketch=None if policy.sketch is None else policy.sketch.by,
        group=policy.group,
        compact=policy.positions == "compact",
        pages_after=policy.pages_after is not None,
    )


def for_target(step: Step, can: Target, refused: Mapping[str, bool]) -> Step:
    """Rewrite a step in the reductions of a target.

    Args:
        refused: statements that the target has no kernels for, and whether the policy has them.

    Raises:
        NotLowerable: if the policy has one of them, or a form of `keep` or a column whose rule the target lacks.
    """
    found = [statement for statement, stated in refused.items() if stated]
    found += [f"`keep {keep.scope}`" for keep in step.protect.keeps if keep.scope not in can.keeps]
    if found:
        raise NotLowerable(", ".join(found))
    step = in_parts(step, can.knows)
    can.check_columns(step.columns)
    return step


def _eviction(policy: Policy, numbers: NumbersPlan) -> Eviction | None:
    if policy.budget is None or policy.score is None:
        return None
    names = {name for name, _ in numbers.numbers}
    return Eviction(
        score=policy.score,
        columns=tuple(column for column in policy.columns if column.rule == "prune"),
        budget=in_layers(policy.measured, policy.layers),
        stated=tuple(name for name in STAGES if name in names),
        by=policy.victims,
        heads_share=policy.heads_share,
        layers_share=policy.across_layers is not None,
        decodes=policy.when != "prefill",
        prompts=policy.when != "decode",
        hard=policy.cap == "hard",
    )


def _selection(policy: Policy) -> Selection | None:
    select = policy.select
    if select is None:
        return None
    return Selection(
        by=select.by,
        count=select.measured,
        layers=LayerRange(low=select.low, high=select.high),
        weight=select.weight,
        reuses=policy.reuses,
        paged=policy.pages is not None,
        whole=policy.budget is None and policy.pages_after is None,
    )


def in_layers(count: Expr | None, layers: LayerRange | None) -> Expr | None:
    """Return a count inside a range of layers, ends included; infinity outside."""
    bounds = () if layers is None else (("<", layers.low), (">", layers.high))
    outside = [call(op, Input(name="layer"), end) for op, end in bounds if end is not None]
    if count is None or not outside:
        return count
    return call("where", outside[0] if len(outside) == 1 else call("or", *outside), Number(value=math.inf), count)


def form_of(by: Expr) -> str:
    """Return the fast form of what a query ranks slots by.

    Returns:
        `dot` for q and k, `sketch_dot` for the same over the sketch's dims, `page_bound` for the upper bound of q times any key of the
        page (Quest), `page_mean` for q and the mean of the page's keys, else `expression`.
    """
    if not (is_reduction(by, Axis.DIM) and by.op == "sum"):
        return "expression"
    if _factors(by.body) == {Input(name="q"), Input(name="k")}:
        return "dot" if by.within == "all" else "sketch_dot"
    if by.within != "all":
        return "expression"
    if _factors(by.body) == {Input(name="q"), _of_page("mean")}:
        return "page_mean"
    bounds = {frozenset({Input(name="q"), _of_page(op)}) for op in ("min", "max")}
    if is_call(by.body, "max") and {frozenset(_factors(arg)) for arg in by.body.args} == bounds:
        return "page_bound"
    return "expression"


def _of_page(op: str) -> Reduce:
    return Reduce(op=op, axis=Axis.SLOT, body=Input(name="k"), within="page")


def _factors(expr: Expr) -> set[Expr]:
    return {*expr.args} if is_call(expr, "*") else set()
