"""What all targets share in printing expressions: precedence, parentheses and conditions."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeAlias, TypeGuard, TypeVar

from kvdsl.ir.nodes import (
    Axis,
    Call,
    Column,
    ColumnRef,
    Expr,
    GivenRef,
    Input,
    Number,
    Other,
    Rank,
    Reduce,
    TensorRef,
    call,
    is_call,
)
from kvdsl.ir.ops import COMPARISONS, CONDITIONS, LOGICAL, POOLS, RANGES
from kvdsl.ir.visitors import axes_of, children, has, reads

T = TypeVar("T")

ATOM = 100
INT_MAX = 2**31 - 1

OfAllSlots: TypeAlias = Reduce | Rank | Call
"""What is computed from all slots at once: a reduction, a rank, or a pool."""


def is_of_all_slots(expr: Expr) -> TypeGuard[OfAllSlots]:
    """Return whether an expression is computed from all slots at once."""
    return expr.kind in ("reduce", "rank") or is_call(expr, *POOLS)


def is_condition(expr: Expr) -> bool:
    """Return whether an expression is a condition rather than a number."""
    return is_call(expr, *CONDITIONS) or (expr.kind == "other" and is_condition(expr.body))


def reads_vectors(expr: Expr, *names: str) -> bool:
    """Return whether an expression reads one of the inputs, or a tensor with dims."""
    return reads(expr, *names) or has(expr, TensorRef, dims=True)


def dims_of(body: Expr) -> str:
    """Return whose dims a reduction over dims ranges over: `v` if its body varies over those, else `k`; empty if it has none."""
    match body:
        case Input(name="v"):
            return "v"
        case Input(name="k" | "q") | TensorRef(dims=True):
            return "k"
        case Reduce(axis=Axis.DIM):
            return ""
    return max((dims_of(child) for child in children(body)), default="")


def is_vector(expr: Reduce) -> bool:
    """Return whether a reduction over slots has a value per dim."""
    return expr.axis is Axis.SLOT and dims_of(expr.body) != ""


def of_slot_and_other(expr: Reduce) -> tuple[Expr, Other] | None:
    """Return the factors of a product of a slot's vector and another slot's, which is a matrix product; None for other reductions."""
    body = expr.body
    if expr.op != "sum" or not is_call(body, "*"):
        return None
    for left, right in (body.args, body.args[::-1]):
        if axes_of(left) == {Axis.SLOT, Axis.DIM} and right.kind == "other" and axes_of(right.body) == {Axis.SLOT, Axis.DIM}:
            return left, right
    return None


class Use(NamedTuple):
    """Something that a fragment needs from its context.

    Attributes:
        kind: `input`, `number`, `column` and `ring` (reduced by `op`) with the language's or the column's name; `index` of a loop;
            `helper` of the target.
    """

    kind: str
    name: str
    op: str = ""


@dataclass(frozen=True)
class Fragment:
    """A piece of a target's text, with what it needs.

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
        """Return whether it needs one of these."""
        return any(use.kind == kind and use.name in names for use in self.uses)


def fragment(template: str, *parts: Fragment, binds: int = ATOM, uses: Iterable[Use] = ()) -> Fragment:
    """Fill fragments into the places `{}` of a template; the result needs what they need."""
    return Fragment(template.format(*(part.text for part in parts)), binds, uses_of(*parts, Fragment("", uses=tuple(uses))))


def uses_of(*parts: Fragment) -> tuple[Use, ...]:
    """Return what several fragments need."""
    return tuple(dict.fromkeys(use for part in parts for use in part.uses))


def names_of(uses: Iterable[Use], kind: str) -> tuple[str, ...]:
    """Return the names of a kind of needs, each once."""
    return tuple(dict.fromkeys(use.name for use in uses if use.kind == kind))


def texts(lines: Iterable[Fragment]) -> tuple[str, ...]:
    """Return the texts of lines."""
    return tuple(line.text for line in lines)


class NotLowerable(Exception):
    """The target has no code for something; the text says what and why."""


@dataclass(frozen=True)
class Target:
    """The reductions of a target, by range (over queries: column rules), and its forms of `keep`. Everything else is refused."""

    reduces: Mapping[str, Iterable[str]]
    keeps: Iterable[str]

    def knows(self, expr: Reduce) -> bool:
        """Return whether there is code for a reduction as it stands."""
        return expr.op in self.reduces.get(expr.over, ())

    def check(self, op: str, over: str) -> None:
        """Check that there is code for a reduction over a range.

        Raises:
            NotLowerable: if there is none.
        """
        if op not in self.reduces.get(over, ()):
            raise NotLowerable(f"`{op} {RANGES[over]}`")

    def check_columns(self, columns: Iterable[Column]) -> None:
        """Check that there is code for the columns' rules.

        Raises:
            NotLowerable: if there is none.
        """
        for column in columns:
            if column.rule not in self.reduces["queries"]:
                raise NotLowerable("`fold(x over prunes, start)`" if column.rule == "prune" else f"`{column.rule}`")


Code: TypeAlias = Mapping[str, Callable[..., Fragment]]
"""Functions that print a node, given a printer."""


class Printer(ABC):
    """Prints expressions for one target in one context.

    `code` maps operations and inputs by name, and other nodes by kind, to functions. Missing ones are refused.
    """

    can: ClassVar[Target]
    # Binding strength of the target's binary operators; higher binds tighter. Conditions use & and |, which vectorize.
    strength: ClassVar[dict[str, int]]
    unary: ClassVar[int]
    functions: ClassVar[Mapping[str, str]]  # the target's names; each function needs `library`
    library: ClassVar[tuple[Use, ...]] = ()
    squared: ClassVar[str]
    raised: ClassVar[str]
    inversion: ClassVar[str] = "~"
    zero: ClassVar[str] = "0"

    def __call__(self, expr: Expr, at_least: int = 0) -> Fragment:
        """Print an expression, in parentheses if it binds less tightly than `at_least`."""
        made = self.parts(expr)
        return made if made.binds >= at_least else fragment("({})", made)

    def parts(self, expr: Expr) -> Fragment:
        """Print an expression without parentheses around it."""
        code = self.code.get(_name(expr))
        if code is None:
            raise NotLowerable(missing(expr))
        return code(self, expr)

    @abstractmethod
    def number(self, value: float) -> Fragment:
        """Print a literal."""

    @abstractmethod
    def as_number(self, condition: Fragment) -> Fragment:
        """Print a condition as 0 or 1."""

    @abstractmethod
    def reduce(self, expr: Reduce) -> Fragment:
        """Print a reduction that the target has code for."""

    def value(self, expr: Expr, at_least: int = 0) -> Fragment:
        """Print an expression as a number; a condition becomes 0 or 1."""
        if is_condition(expr):
            return self.as_number(self(expr))
        return self(expr, at_least)

    def truth(self, expr: Expr, at_least: int = 0) -> Fragment:
        """Print an expression as a condition; a number is true unless it is 0."""
        if is_condition(expr):
            return self(expr, at_least)
        return fragment(f"({{}} != {self.zero})", self(expr, self.strength["!="] + 1))

    def operand(self, side: Expr, whole: Call) -> Fragment:
        """Print an operand of `&` or `|`. They bind tighter than comparisons in Python, so all but atoms get parentheses."""
        return self.truth(side, ATOM)

    def function(self, expr: Call) -> Fragment:
        """Print a call. `min` and `max` have two operands in targets."""
        args = pair(expr) if expr.op in ("min", "max") else expr.args
        places = ", ".join("{}" for _ in args)
        return fragment(f"{self.functions[expr.op]}({places})", *map(self.value, args), uses=self.library)

    def power(self, expr: Call) -> Fragment:
        """Print a power; squares are products."""
        base, exponent = expr.args
        if exponent == Number(value=2):
            return fragment(f"{self.squared}({{}})", self.value(base))
        return fragment(f"{self.raised}({{}}, {{}})", self.value(base), self.value(exponent))

    def _literal(self, expr: Number) -> Fragment:
        return replace(self.number(expr.value), binds=self.unary if expr.value < 0 else ATOM)

    def _known_reduction(self, expr: Reduce) -> Fragment:
        self.can.check(expr.op, expr.over)
        return self.reduce(expr)

    def read_column(self, expr: ColumnRef) -> Fragment:
        if expr.op is None:
            return self.column(expr.name)
        self.can.check(expr.op, "history")
        return self.ring(expr.name, expr.op, *(self.value(part) for part in children(expr)))

    def column(self, name: str) -> Fragment:
        """Print a slot's value of a column."""
        raise AssertionError("no columns are read here")

    def ring(self, name: str, op: str, *argument: Fragment) -> Fragment:
        """Print the reduction of a slot's ring, possibly with an argument."""
        raise AssertionError("no rings are read here")

    def binary(self, expr: Call) -> Fragment:
        """Print a left-associative operator; comparisons do not chain."""
        binds = self.strength[expr.op]
        chained = 1 if expr.op in COMPARISONS else 0
        left, right = self.value(expr.args[0], binds + chained), self.value(expr.args[1], binds + 1)
        return fragment(f"{{}} {expr.op} {{}}", left, right, binds=binds)

    def _logical(self, expr: Call) -> Fragment:
        left, right = (self.operand(side, expr) for side in expr.args)
        return fragment(f"{{}} {'&' if expr.op == 'and' else '|'} {{}}", left, right, binds=self.strength[expr.op])

    def _negative(self, expr: Call) -> Fragment:
        return fragment("-{}", self.value(expr.args[0], self.unary + 1), binds=self.unary)  # never --x

    def _not(self, expr: Call) -> Fragment:
        return fragment(self.inversion + "{}", self.truth(expr.args[0], ATOM), binds=self.unary)

    code: ClassVar[Code] = {
        "number": _literal,
        "reduce": _known_reduction,
        "neg": _negative,
        "not": _not,
        **dict.fromkeys(("+", "-", "*", "/", "%", *COMPARISONS), binary),
        **dict.fromkeys(LOGICAL, _logical),
    }


def _name(expr: Expr) -> str:
    """Return a node's key in `code`."""
    match expr:
        case Call(op=name) | Input(name=name):
            return name
        case TensorRef(group=True):
            return "vectors"
    return expr.kind


def missing(expr: Expr) -> str:
    """Return what a target has no code for, as text for a refusal."""
    match expr:
        case TensorRef(name=name, group=group):
            return f"tensors {'with vectors of query heads' if group else 'of files'}, as `{name}` is one"
        case GivenRef(name=name):
            return f"values from the caller, as `{name}` is one"
    return f"`{_name(expr)}`"


def hoist(
    exprs: Iterable[Expr],
    compute: Callable[[OfAllSlots, str, dict[Expr, str]], T | None],
    known: Mapping[Expr, str] = MappingProxyType({}),
) -> tuple[list[T], dict[Expr, str]]:
    """Compute what has to come before a loop over the expressions, and name it.

    Args:
        compute: receives a reduction, rank or pool, its name, and the names of inner ones; returns its computation, or None if it
            stays in the loop.
        known: names of values that are already computed.

    Returns:
        The computations, inner ones first, and all names including the known ones.
    """
    computed: list[T] = []
    names = dict(known)

    def visit(expr: Expr) -> None:
        if expr in names:
            return
        for child in children(expr):
            visit(child)
        if is_of_all_slots(expr):
            name = f"{_called(expr)}_{len(names) + 1}"
            found = compute(expr, name, names)
            if found is not None:
                computed.append(found)
                names[expr] = name

    for expr in exprs:
        visit(expr)
    return computed, names


def _called(expr: OfAllSlots) -> str:
    return f"{expr.op}_{RANGES[expr.over].replace(' ', '_')}" if expr.kind == "reduce" else _name(expr)


def whole(count: float) -> int:
    """Return a literal count of tokens: rounded down, within the range of an int."""
    return int(max(0, min(count // 1, INT_MAX)))


def pair(extreme: Call) -> tuple[Expr, Expr]:
    """Return the two operands of `min` or `max`; further ones are nested."""
    first, *rest = extreme.args
    return first, rest[0] if len(rest) == 1 else call(extreme.op, *rest)


_LARGEST = (2 - 2.0**-23) * 2.0**127


def as_float32(value: float) -> float:
    """Return the number, or an infinity if it is too large for float32, where such a literal would be an error."""
    return value if abs(value) <= _LARGEST or math.isnan(value) else math.copysign(math.inf, value)


_TAKEN = frozenset({"torch", "given", "Number", "Column", "Ring", "Tensor", "Given", "math_errhandling"})
_NUMBERS = frozenset({"capacity", "trigger", "slack", "max_drop", "floor", "select", "page", "page_after"})
_NUMBERS |= {"sketch_dims", "sketch_every", "prefill_block", "block", "chooser"}
_SIZE = "size_"
_LIKE_A_MACRO = re.compile(r"[A-Z][A-Z0-9_]+|[a-z]*_?errhandling|linux|unix|stdin|stdout|stderr")


def spelled(name: str) -> str:
    """Return a param's name in generated code; different names stay different."""
    plain = name.rstrip("_")
    taken = plain in _TAKEN | _NUMBERS or plain.startswith(_SIZE) or _LIKE_A_MACRO.fullmatch(plain)
    return name + "_" if taken else name


def size_of(ring: str) -> str:
    """Return the name of the number that is a ring's size."""
    return _SIZE + ring
