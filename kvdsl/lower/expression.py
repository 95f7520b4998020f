"""Printing expressions: what every target shares. Precedence, parentheses and conditions are decided here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    Column,
    ColumnRef,
    Enough,
    Expr,
    Fold,
    FoldRef,
    GivenRef,
    Input,
    Leverage,
    Number,
    Other,
    ParamRef,
    Policy,
    Pool,
    Previous,
    Project,
    Random,
    Rank,
    Reduce,
    RingRef,
    Rotate,
    TensorRef,
)
from kvdsl.ir.ops import COMPARISONS, LOGICAL, RANGES
from kvdsl.ir.visitors import children, walk

T = TypeVar("T")

ATOM = 100

Leaf = Number | ParamRef | TensorRef | GivenRef | Input | Random | ColumnRef | RingRef


def is_condition(expr: Expr) -> bool:
    """Whether the expression is true or false rather than a number."""
    if isinstance(expr, Binary):
        return expr.op in COMPARISONS | LOGICAL
    if isinstance(expr, Other):
        return is_condition(expr.body)
    return isinstance(expr, Call) and expr.function == "not"


def reads(expr: Expr, *names: str) -> bool:
    """Whether the expression reads one of the inputs."""
    return any(isinstance(node, Input) and node.name in names for node in walk(expr))


def reads_vectors(expr: Expr, *names: str) -> bool:
    """Whether the expression reads one of the inputs, or a tensor that has a number for every dim."""
    return reads(expr, *names) or any(isinstance(node, TensorRef) and node.dims for node in walk(expr))


def dims_of(body: Expr) -> str:
    """Through whose dims a reduction over dims goes: `v`'s if its body varies over those, else `k`'s; `` if over none."""
    if isinstance(body, TensorRef):
        return "k" if body.dims else ""
    if isinstance(body, Input):
        return body.name if body.name in ("k", "v") else "k" if body.name == "q" else ""
    if isinstance(body, Reduce) and body.axis is Axis.DIM:
        return ""
    return max((dims_of(child) for child in children(body)), default="")


def is_vector(expr: Reduce) -> bool:
    """Whether a reduction over slots has a number for every dim."""
    return expr.axis is Axis.SLOT and dims_of(expr.body) != ""


def form_of_select(by: Expr) -> str:
    """The fast form of what a query ranks slots by, if it has one.

    Returns:
        `dot` of q and k, `sketch_dot` of the same over the sketch's dims, `page_bound` of what a key in the page could give at
        most (Quest), else `expression`.
    """
    if not (isinstance(by, Reduce) and by.op == "sum" and by.axis is Axis.DIM):
        return "expression"
    if _factors(by.body) == {Input(name="q"), Input(name="k")}:
        return "dot" if by.within == "all" else "sketch_dot"
    if by.within == "all" and isinstance(by.body, Call) and by.body.function == "max" and len(by.body.args) == 2:
        bounds = [Reduce(op=op, axis=Axis.SLOT, body=Input(name="k"), within="page") for op in ("min", "max")]
        if {frozenset(_factors(arg)) for arg in by.body.args} == {frozenset({Input(name="q"), bound}) for bound in bounds}:
            return "page_bound"
    return "expression"


def bounds_pages(policy: Policy) -> bool:
    """Whether a query goes by the bounds of pages that kernels keep: of a policy that keeps all tokens, so that the one at position p is in
    slot p.
    """
    select, apart = policy.select, policy.budget is None and policy.pages_after is None
    return apart and select is not None and form_of_select(select.by) == "page_bound"


def _factors(expr: Expr) -> set[Expr]:
    return {expr.left, expr.right} if isinstance(expr, Binary) and expr.op == "*" else set()


def of_slot_and_other(expr: Reduce) -> tuple[Expr, Other] | None:
    """The vectors of a product of a slot's and another one's, which is one of matrices."""
    body = expr.body
    if expr.op != "sum" or not (isinstance(body, Binary) and body.op == "*"):
        return None
    for left, right in ((body.left, body.right), (body.right, body.left)):
        if (
            axes_of(left) == {Axis.SLOT, Axis.DIM}
            and isinstance(right, Other)
            and axes_of(right.body) == {Axis.SLOT, Axis.DIM}
        ):
            return left, right
    return None


class Use(NamedTuple):
    """Something that a fragment needs of what surrounds it.

    Attributes:
        kind: `input`, `number`, `column` and `ring` (reduced by `op`) by the language's or the column's name; `index` of a loop;
            `helper`, what the target's own surroundings have.
    """

    kind: str
    name: str
    op: str = ""


@dataclass(frozen=True)
class Fragment:
    """A piece of a target's text, and what it needs.

    Attributes:
        binds: how tightly its outermost operator binds.
        uses: each once, in the order of the text.
    """

    text: str
    binds: int = ATOM
    uses: tuple[Use, ...] = ()

    def __str__(self) -> str:
        return self.text

    def needs(self, kind: str, *names: str) -> bool:
        """Whether it needs one of these."""
        return any(use.kind == kind and use.name in names for use in self.uses)


def fragment(template: str, *parts: Fragment, binds: int = ATOM, uses: Iterable[Use] = ()) -> Fragment:
    """A text with fragments in its places, `{}`, which needs what they need."""
    return Fragment(template.format(*(part.text for part in parts)), binds, uses_of(*parts, Fragment("", uses=tuple(uses))))


def uses_of(*parts: Fragment) -> tuple[Use, ...]:
    """What several fragments need."""
    return tuple(dict.fromkeys(use for part in parts for use in part.uses))


def names_of(uses: Iterable[Use], kind: str) -> tuple[str, ...]:
    """The names of what is needed of a kind, each once."""
    return tuple(dict.fromkeys(use.name for use in uses if use.kind == kind))


def texts(lines: Iterable[Fragment]) -> tuple[str, ...]:
    """What a template places."""
    return tuple(line.text for line in lines)


class NotLowerable(Exception):
    """The target has no code for this expression; the text says which and why."""


@dataclass(frozen=True)
class Target:
    """What a target has code for, by the names of `kvdsl.ir.ops`. What is not named here is refused, whatever the printer says.

    Attributes:
        reduces: the reductions, by what they range over; over queries these are the rules of columns.
        functions, operators, pools: as the language has them.
        ranks: whether slots can be ranked inside of an expression. `projects`: whether vectors can be.
        tensors: whether tensors of files are read. `given`: whether what the caller gives is.
        counts: whether numbers are counted that read the data.
        rotates: whether vectors can be rotated, and what goes with it: a query's own place, the factor of products.
        leverages: whether slots' vectors can be measured by each other.
    """

    reduces: Mapping[str, Iterable[str]]
    functions: Iterable[str]
    operators: Iterable[str]
    pools: Iterable[str] = ()
    ranks: bool = False
    projects: bool = False
    tensors: bool = False
    given: bool = False
    counts: bool = False
    rotates: bool = False
    leverages: bool = False

    def knows(self, expr: Reduce) -> bool:
        """Whether there is code for a reduction as it stands."""
        return expr.op in self.reduces.get(expr.over, ())

    def check(self, expr: Expr) -> None:
        """Whether there is code for an operation, whatever its operands are.

        Raises:
            NotLowerable: if not.
        """
        missing = None
        if isinstance(expr, Reduce) and not self.knows(expr):
            missing = f"{expr.op} {RANGES[expr.over]}"
        elif isinstance(expr, RingRef) and expr.op not in self.reduces.get("history", ()):
            missing = f"{expr.op} {RANGES['history']}"
        elif isinstance(expr, Call) and expr.function not in self.functions:
            missing = expr.function
        elif isinstance(expr, Binary) and expr.op not in self.operators:
            missing = expr.op
        elif isinstance(expr, Enough) and not self.counts:
            missing = "enough"
        elif isinstance(expr, Pool) and expr.op not in self.pools:
            missing = f"{expr.op}_pool"
        elif isinstance(expr, Rank) and not self.ranks:
            missing = "rank"
        elif isinstance(expr, Project) and not self.projects:
            missing = "project"
        elif isinstance(expr, Rotate) and not self.rotates:
            missing = expr.op
        elif isinstance(expr, Input) and expr.name in ("query_position", "scaling") and not self.rotates:
            missing = expr.name
        elif isinstance(expr, Other) and "others" not in self.reduces:
            missing = "other"
        elif isinstance(expr, Leverage) and not self.leverages:
            missing = "leverage"
        elif isinstance(expr, TensorRef) and expr.group and not self.rotates:
            raise NotLowerable(f"tensors with vectors of query heads, as `{expr.name}` is one")
        elif isinstance(expr, TensorRef) and not self.tensors:
            raise NotLowerable(f"tensors of files, as `{expr.name}` is one")
        elif isinstance(expr, GivenRef) and not self.given:
            raise NotLowerable(f"values from the caller, as `{expr.name}` is one")
        if missing is not None:
            raise NotLowerable(f"`{missing}`")

    def check_columns(self, columns: Iterable[Column]) -> None:
        """Whether there is code for the columns' rules.

        Raises:
            NotLowerable: if not.
        """
        for column in columns:
            if column.rule not in self.reduces["queries"]:
                raise NotLowerable("`fold(x over prunes, start)`" if column.rule == "prune" else f"`{column.rule}`")


class Printer(ABC):
    """Prints an expression for one target in one context. Subclasses say how leaves, functions and reductions look."""

    can: ClassVar[Target]
    # Binding strength of the target's binary operators; higher binds tighter.
    strength: ClassVar[dict[str, int]]
    spelling: ClassVar[dict[str, str]]
    negation: ClassVar[tuple[str, int]]
    zero: ClassVar[str] = "0"

    def __call__(self, expr: Expr, at_least: int = 0) -> Fragment:
        """The expression, in parentheses if it binds less tightly than `at_least`."""
        self.can.check(expr)
        made = self.parts(expr)
        return made if made.binds >= at_least else fragment("({})", made)

    def parts(self, expr: Expr) -> Fragment:
        """The expression without parentheses around it."""
        if isinstance(expr, Binary):
            return self.binary(expr)
        if isinstance(expr, Call):
            if expr.function == "neg":
                sign, binds = self.negation
                return fragment(sign + "{}", self.value(expr.args[0], binds + 1), binds=binds)  # never --x
            return self.call(expr)
        if isinstance(expr, Reduce):
            return self.reduce(expr)
        if isinstance(expr, Other):
            return self.other(expr)
        if isinstance(expr, FoldRef):
            return self.fold(expr)
        if isinstance(expr, Project):
            return self.project(expr)
        if isinstance(expr, Rotate):
            return self.rotate(expr)
        if isinstance(expr, Leverage):
            return self.leverage(expr)
        if isinstance(expr, Rank):
            return self.rank(expr)
        if isinstance(expr, Enough):
            return self.enough(expr)
        if isinstance(expr, Pool):
            return self.pool(expr)
        assert not isinstance(expr, (Fold, Previous)), "made columns of before"
        below_zero = isinstance(expr, Number) and expr.value < 0
        return replace(self.leaf(expr), binds=self.negation[1] if below_zero else ATOM)

    def binary(self, expr: Binary) -> Fragment:
        """Left-associative: the right operand needs parentheses at equal strength; comparisons do not chain."""
        binds = self.strength[expr.op]
        chained = 1 if expr.op in COMPARISONS else 0
        operand = self.truth if expr.op in LOGICAL else self.value
        left, right = operand(expr.left, binds + chained), operand(expr.right, binds + 1)
        return fragment(f"{{}} {self.spelling.get(expr.op, expr.op)} {{}}", left, right, binds=binds)

    def value(self, expr: Expr, at_least: int = 0) -> Fragment:
        """The expression as a number: a condition counts 0 or 1."""
        if is_condition(expr):
            return self.as_number(self(expr))
        return self(expr, at_least)

    def truth(self, expr: Expr, at_least: int = 0) -> Fragment:
        """The expression as a condition: a number holds where it is not 0."""
        if is_condition(expr):
            return self(expr, at_least)
        return fragment(f"({{}} != {self.zero})", self(expr, self.strength["!="] + 1))

    @abstractmethod
    def as_number(self, condition: Fragment) -> Fragment: ...

    @abstractmethod
    def leaf(self, expr: Leaf) -> Fragment: ...

    @abstractmethod
    def call(self, expr: Call) -> Fragment: ...

    @abstractmethod
    def reduce(self, expr: Reduce) -> Fragment: ...

    def other(self, expr: Other) -> Fragment:
        """What the other slot has."""
        raise NotLowerable("`other`")

    def fold(self, expr: FoldRef) -> Fragment:
        """What a fold has come to."""
        raise NotLowerable("`fold`")

    def project(self, expr: Project) -> Fragment:
        """A vector in other dims."""
        raise NotLowerable("`project`")

    def rotate(self, expr: Rotate) -> Fragment:
        """A vector, rotated."""
        raise NotLowerable(f"`{expr.op}`")

    def leverage(self, expr: Leverage) -> Fragment:
        """A vector, measured by those of all slots."""
        raise NotLowerable("`leverage`")

    def rank(self, expr: Rank) -> Fragment:
        """A place in the order of a value."""
        raise NotLowerable("`rank`")

    def enough(self, expr: Enough) -> Fragment:
        """How many slots are enough."""
        raise NotLowerable("`enough`")

    def pool(self, expr: Pool) -> Fragment:
        """A value pooled along the text."""
        raise NotLowerable(f"`{expr.op}_pool`")


def hoist(
    exprs: Iterable[Expr],
    compute: Callable[[Reduce | Rank | Pool, str, dict[Expr, str]], T | None],
    known: Mapping[Expr, str] = MappingProxyType({}),
) -> tuple[list[T], dict[Expr, str]]:
    """What has to be computed before a loop in which the expressions stand, and the names that it has there.

    Args:
        compute: from a reduction, a rank or a pool, its name, and the names of those within it, to what computes it; None where it stays
            in the loop.
        known: names of what has been computed already.

    Returns:
        What computes reductions, inner ones first, and their names, with those that are known.
    """
    computed: list[T] = []
    names = dict(known)

    def visit(expr: Expr) -> None:
        if expr in names:
            return
        for child in children(expr):
            visit(child)
        if isinstance(expr, (Reduce, Rank, Pool)):
            name = f"{_called(expr)}_{len(names) + 1}"
            found = compute(expr, name, names)
            if found is not None:
                computed.append(found)
                names[expr] = name

    for expr in exprs:
        visit(expr)
    return computed, names


def _called(expr: Reduce | Rank | Pool) -> str:
    if isinstance(expr, Reduce):
        return f"{expr.op}_{RANGES[expr.over].replace(' ', '_')}"
    return "rank" if isinstance(expr, Rank) else f"{expr.op}_pool"


def in_layers(count: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """The count in the layers from `low` to `high`, ends included; in the others no end."""
    layer = Input(name="layer")
    ends = [Binary(op=op, left=layer, right=end) for op, end in (("<", low), (">", high)) if end is not None]
    if not ends:
        return count
    outside = ends[0] if len(ends) == 1 else Binary(op="or", left=ends[0], right=ends[1])
    return Call(function="where", args=(outside, Number(value=math.inf), count))


def pair(call: Call) -> tuple[Expr, Expr]:
    """The operands of `min` or `max`, of which targets have functions of two."""
    first, *rest = call.args
    return first, rest[0] if len(rest) == 1 else Call(function=call.function, args=tuple(rest))


_LARGEST = (2 - 2.0**-23) * 2.0**127


def as_float32(value: float) -> float:
    """The number, or the infinity that it is in float32: a literal that is too large would be an error there."""
    return value if abs(value) <= _LARGEST or math.isnan(value) else math.copysign(math.inf, value)
