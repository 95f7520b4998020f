"""A step of a policy, decided once for all targets: place, observe, rank, protect, select.

A target has code for the expressions that stand here, or refuses them. What is remembered and in which rows, which loops find who leaves,
what protects, and how many must leave is said here alone, so that targets agree on it.
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
)
from kvdsl.ir.ops import POOLS
from kvdsl.ir.visitors import has, parts_of
from kvdsl.lower.expression import NotLowerable, Target
from kvdsl.lower.numbers import STAGES, NumbersPlan
from kvdsl.passes.normal import in_parts

START: Mapping[str, float] = {"max": -math.inf, "min": math.inf, "fold": math.nan, "prune": math.nan}
"""What a column holds of a token that has just come, by its rule, where that is not 0."""


class Pass(NamedTuple):
    """One loop over the slots of a KV head that must lose tokens.

    Attributes:
        rows: what slots rank by, and what the work row is called that gets it: `score`, and `top_1`, `top_2`, ... of each `keep top`.
        conditions: what `keep where` asks.
        columns: what is remembered of who left, in the last loop.
    """

    rows: dict[str, Expr]
    conditions: tuple[Expr, ...]
    columns: tuple[Column, ...]

    @property
    def values(self) -> list[Expr]:
        """All that it evaluates. What these reduce over slots is hoisted: it is found before, inner reductions first."""
        return [*self.rows.values(), *self.conditions, *(column.body for column in self.columns)]


class Protection(Node):
    """What may not leave, and what a query always attends to: the union of the `keep` lines.

    Attributes:
        ends_last: whether `keep first` and `keep last` yield only when nothing else is left.
    """

    keeps: tuple[Keep, ...]
    ends_last: bool

    def counts(self, scope: str) -> list[Expr]:
        """How many tokens each line of a scope protects."""
        return [keep.count for keep in self.keeps if keep.scope == scope and keep.count is not None]

    def by(self, scope: str) -> tuple[Expr, ...]:
        """What the lines of a scope ask of a slot."""
        return tuple(keep.by for keep in self.keeps if keep.scope == scope and keep.by is not None)

    @property
    def ends(self) -> tuple[Keep, ...]:
        """The lines that go by a token's place."""
        return tuple(keep for keep in self.keeps if keep.scope in ("first", "last"))

    @property
    def overprotects(self) -> bool:
        """Whether it may protect more than a budget has room for; the checker knows that the ends do not."""
        return len(self.ends) < len(self.keeps)


class Eviction(Node):
    """Who leaves.

    Attributes:
        score: the lowest leaves first.
        columns: what is remembered of it. Before, these hold what the last one gave.
        budget: the tokens to keep, where that reads the data: no end in layers that keep everything.
        stated: which of the numbers that say how many must leave the table has beside the capacity; see `overflow`.
        by: who decides together: each KV head alone, a layer's `heads`, all `layers`.
        heads_share, layers_share: whether a layer's KV heads, or the layers, lose tokens to each other.
        decodes, prompts: whether tokens leave in a decode step, and behind a prompt. hard: whether room is made before a token is placed.
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
        """Whether each KV head decides by itself."""
        return self.by == "own" and not (self.heads_share or self.layers_share)

    @property
    def pools(self) -> bool:
        """Whether the score pools. A pool goes by what may not leave, so that the score is found behind all else."""
        return any(has(self.score, Call, op=pool) for pool in POOLS)

    @property
    def overflow(self) -> dict[str, int | None]:
        """What says how many must leave, in this order: a number of the table (None), or what it is otherwise."""
        stages = {name: None if name in self.stated else default for name, default in STAGES.items()}
        return {"capacity": None, **stages}


class Selection(Node):
    """What a decode query attends to.

    Attributes:
        by: what it ranks slots by.
        count: how many tokens, where that reads the data, in these `layers`: the number `select` is infinite in others.
        weight: how often what is attended to counts.
        reuses: whether layers take over what another one's queries choose.
        paged: whether it goes by pages. whole: whether these begin with the text and none of it ever leaves, so that the token at position
            p is in slot p.
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
        """What a query goes by of all KV heads of the layer."""
        return tuple(dict.fromkeys(parts_of(self.by, Reduce, axis=Axis.HEAD)))

    @property
    def of_head(self) -> Expr:
        """What a KV head finds of a slot by itself, which the last vote reduces."""
        return self.votes[-1].body if self.votes else self.by

    @property
    def of_votes(self) -> Expr | None:
        """What each KV head makes of a vote; None where it goes by that as it is, or where there is none."""
        return None if self.votes in ((), (self.by,)) else self.by

    @property
    def form(self) -> str:
        """The fast form of what a KV head finds; `expression` if kernels have none for it. See `form_of`."""
        form = form_of(self.of_head)
        return form if self.whole or not form.startswith("page") else "expression"


class Step(Node):
    """A step: what each phase evaluates. What is not there is None or empty.

    Attributes:
        numbers: names of the numbers in the table, in its order. heads_differ: whether it has a row for each KV head.
        columns: all that is remembered per slot: single numbers first, in the order of the table, then rings.
        observe: those that queries are folded into. place: those that a token has by itself.
        forgets: whether all that is known of queries goes with the prompt that they are of, so that a decode step observes nothing.
        evict, protect: who leaves.
        share: what a layer's share of the budget goes by.
        select: what a query attends to. sketch: what ranks the dims; the query looks at the highest few.
        group: how a group's query heads are reduced. compact: whether keys are rotated by their rank among the live slots.
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
        """The columns that are kept by one of these rules."""
        return tuple(column for column in self.columns if column.rule in rules)

    @property
    def place(self) -> tuple[Column, ...]:
        """The columns that a token has by itself."""
        return self.ruled("token")

    @property
    def observe(self) -> tuple[Column, ...]:
        """The columns that queries are folded into."""
        return tuple(column for column in self.columns if column.rule not in ("token", "prune"))

    @property
    def singles(self) -> tuple[str, ...]:
        """The columns of one number a slot, each a row of the table."""
        return tuple(column.name for column in self.columns if column.rule != "ring")

    @property
    def rings(self) -> tuple[str, ...]:
        """The columns of one number a slot for each of the newest queries, which lie behind the others."""
        return tuple(column.name for column in self.columns if column.rule == "ring")

    @property
    def rank(self) -> tuple[Pass, ...]:
        """The loops that find what slots rank by, in work rows; what `keep` protects is known behind the first of them."""
        if self.evict is None:
            return ()
        score = {"score": self.evict.score}
        tops = {f"top_{n}": by for n, by in enumerate(self.protect.by("top"), 1)}
        conditions = self.protect.by("where")
        if self.evict.pools:
            return Pass(tops, conditions, ()), Pass(score, (), self.evict.columns)
        return (Pass(score | tops, conditions, self.evict.columns),)


def step_of(policy: Policy, numbers: NumbersPlan) -> Step:
    """The step of a policy whose state columns are known."""
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
    """The step in the reductions that a target has.

    Args:
        refused: statements that it has no kernels for, and whether they are stated.

    Raises:
        NotLowerable: if one of these is, or if a column is kept by a rule that it does not have.
    """
    found = [statement for statement, stated in refused.items() if stated]
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
    """The count in the layers of a range, ends included; in the others no end."""
    bounds = () if layers is None else (("<", layers.low), (">", layers.high))
    outside = [call(op, Input(name="layer"), end) for op, end in bounds if end is not None]
    if count is None or not outside:
        return count
    return call("where", outside[0] if len(outside) == 1 else call("or", *outside), Number(value=math.inf), count)


def form_of(by: Expr) -> str:
    """The fast form of what a query ranks slots by, if it has one.

    Returns:
        `dot` of q and k, `sketch_dot` of the same over the sketch's dims, `page_bound` of what a key in the page could give at
        most (Quest), `page_mean` of q and the mean of the page's keys, else `expression`.
    """
    if not (isinstance(by, Reduce) and by.op == "sum" and by.axis is Axis.DIM):
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
