"""The operations of the language and the forms of `keep`, one row each.

The checker, the passes, the printer, the targets, the documents and the tests' random policies read these tables, so a new
operation starts here. `kvdsl.interp` defines its result, by name, and each target its code (`CAN` in `kvdsl/lower/*.py`). A consumer
that lacks an operation fails; it never uses another one.

This module imports quickly: no pydantic, no NumPy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol, TypeVar


class Axis(str, Enum):
    """An axis of an expression."""

    QUERY = "query"
    SLOT = "slot"
    DIM = "dim"
    OTHER = "other slot"  # in a reduction over others, the slot that a slot is compared with
    HEAD = "KV head"  # of a layer; only a reduction over heads reads several


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Row = TypeVar("_Row", bound=_Named)


def _table(rows: Iterable[_Row]) -> dict[str, _Row]:
    return {row.name: row for row in rows}


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputRow:
    """An input of expressions.

    Attributes:
        doc: one line, for the language's reference.
        reads: the tensor that it needs besides positions, in words.
        fixed: whether it is a number that is fixed once the prompt is known.
        per_token: whether the cache receives it with each token, and stores it in a column if something reads it.
        written: its spelling, if it is not its name.
    """

    name: str
    axes: frozenset[Axis]
    doc: str
    reads: str = ""
    fixed: bool = False
    per_token: bool = False
    written: str = ""


_QUERY_SLOT, _QUERY_DIM, _SLOT_DIM = (
    frozenset({a, b}) for a, b in ((Axis.QUERY, Axis.SLOT), (Axis.QUERY, Axis.DIM), (Axis.SLOT, Axis.DIM))
)
_SLOT: frozenset[Axis] = frozenset({Axis.SLOT})
_NONE: frozenset[Axis] = frozenset()

INPUTS = _table(
    [
        InputRow(
            "attn",
            _QUERY_SLOT,
            "the softmax probability that the query gives the slot, reduced over the query heads of the KV head's group",
            "attention probabilities",
        ),
        InputRow(
            "logit",
            _QUERY_SLOT,
            "the scaled score before the softmax, reduced in the same way",
            "attention scores before the softmax",
        ),
        InputRow(
            "q",
            _QUERY_DIM,
            "the query vector; what reads it is evaluated per query head, and the result is reduced over the group",
            "query vectors",
        ),
        InputRow(
            "query_head",
            frozenset({Axis.QUERY}),
            "the query head's number in the layer, from 0, in what `select` reads: evaluated per query head, as `q` is",
        ),
        InputRow("k", _SLOT_DIM, "the cached key", "key vectors"),
        InputRow("v", _SLOT_DIM, "the cached value", "value vectors"),
        InputRow("position", _SLOT, "the token's place in the row's text, padding not counted"),
        InputRow("age", _SLOT, "newest position minus `position`"),
        InputRow("token", _SLOT, "the token's id: `token == 198`", per_token=True),
        InputRow("turn", _SLOT, "the turn of the chat in which the token came, from 0", per_token=True),
        InputRow("turns", _NONE, "how many turns have ended: `turn < turns` holds for tokens of earlier turns"),
        InputRow(
            "budget", _NONE, "the number of tokens to keep; in the statement `budget` the param of that name", fixed=True
        ),
        InputRow("live", _NONE, "each row's cached tokens"),
        InputRow(
            "seen",
            _NONE,
            "each row's tokens so far, padding not counted: a budget that reads it grows with the text",
        ),
        InputRow("prompt", _NONE, "each row's tokens up to the end of its last prompt, padding not counted", fixed=True),
        InputRow("layer", _NONE, "the layer's number, from 0", fixed=True),
        InputRow("layers", _NONE, "the number of layers", fixed=True),
        InputRow("everything", _NONE, "unlimited: a KV head with this budget keeps every token", fixed=True),
        InputRow("query_position", frozenset({Axis.QUERY}), "the query's own place in the text"),
        InputRow("scaling", _NONE, "the softmax scale"),
        InputRow("observed", _SLOT, "how many queries could see the slot while it was cached", written="count()"),
        InputRow("prev", _SLOT, "in the body of a fold, its previous value", written="prev"),
    ]
)

OF_QUERY_HEADS = ("q", "query_head")
"""The inputs that differ between the query heads of a GQA group."""

FIXED = tuple(row.name for row in INPUTS.values() if row.fixed)
"""The inputs that a budget or a count may read, besides params."""

TABLED = (*FIXED, "turns")
"""The inputs that kernels read from a row's table of numbers, besides params."""


# -- functions and operators -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionRow:
    """An elementwise function.

    Attributes:
        value: its value in float64; raises an error if there is none.
        arguments: the number of arguments of a call; None for unary operators.
        doc: one line; functions that share it share a line of the language's reference.
        code: the function's name in each target (`cpp`, `torch`, `triton`). Other targets refuse it, unless their printer handles it.
    """

    name: str
    value: Callable[..., float]
    arguments: int | None
    doc: str
    code: Mapping[str, str] = field(default_factory=dict)


_AS_IN_MATHEMATICS = "as in mathematics"
_OF_SEVERAL = "the larger or smaller of two or more"


def _mathematical(name: str, value: Callable[[float], float], **code: str) -> FunctionRow:
    """Make a row for a function with the same name in every target, except those in `code`."""
    named = {"torch": f"torch.{name}", "cpp": f"std::{name}", "triton": f"tl.{name}"}
    return FunctionRow(name, value, 1, _AS_IN_MATHEMATICS, named | code)


def _extreme(name: str) -> dict[str, str]:
    return {"torch": f"torch.{name}", "cpp": f"kvdsl::{name}", "triton": f"ops.{name}"}


FUNCTIONS = _table(
    [
        FunctionRow("neg", lambda a: -a, None, "-x"),
        FunctionRow("not", lambda a: float(a == 0), None, "not x"),
        FunctionRow("max", max, 2, _OF_SEVERAL, _extreme("maximum")),
        FunctionRow("min", min, 2, _OF_SEVERAL, _extreme("minimum")),
        FunctionRow("where", lambda c, a, b: a if c != 0 else b, 3, "a where c holds, else b"),
        _mathematical("abs", abs, cpp="std::fabs"),
        _mathematical("sqrt", math.sqrt),
        _mathematical("exp", math.exp),
        _mathematical("log", math.log),
        _mathematical("acos", math.acos, triton="ops.acos"),
        _mathematical("floor", lambda a: float(math.floor(a))),
        _mathematical("ceil", lambda a: float(math.ceil(a))),
    ]
)

ELEMENTWISE = {row.name: row.arguments for row in FUNCTIONS.values() if row.arguments is not None}
"""The functions that are called by name, with their number of arguments; `max` and `min` also take more."""


class Strength(IntEnum):
    """How tightly an expression binds: a weaker operand is put in parentheses."""

    OR, AND, NOT, COMPARE, SUM, PRODUCT, FACTOR, POWER, ATOM = range(9)


class Kind(Enum):
    """The operands and result of an operator."""

    ARITHMETIC = "numbers, a number"
    COMPARISON = "numbers, a condition"
    LOGICAL = "conditions, a condition"


@dataclass(frozen=True)
class OperatorRow:
    """A binary operator.

    Attributes:
        name: its spelling.
        word: its name in a column's name.
        value: its value in float64; raises an error if there is none.
        code: as in `FunctionRow`, for targets in which it is a function.
    """

    name: str
    word: str
    kind: Kind
    strength: Strength
    value: Callable[[float, float], float]
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[Strength, Strength]:
        """The least strengths of its operands: `a - b - c` groups left, comparisons do not chain, and `**` groups right."""
        if self.strength is Strength.POWER:
            return Strength.ATOM, Strength.FACTOR
        above = Strength(self.strength + 1)
        return above if self.strength is Strength.COMPARE else self.strength, above


OPERATORS = _table(
    [
        OperatorRow("+", "plus", Kind.ARITHMETIC, Strength.SUM, lambda a, b: a + b),
        OperatorRow("-", "minus", Kind.ARITHMETIC, Strength.SUM, lambda a, b: a - b),
        OperatorRow("*", "times", Kind.ARITHMETIC, Strength.PRODUCT, lambda a, b: a * b),
        OperatorRow("/", "over", Kind.ARITHMETIC, Strength.PRODUCT, lambda a, b: a / b),
        OperatorRow(
            "%",
            "mod",
            Kind.ARITHMETIC,
            Strength.PRODUCT,
            lambda a, b: a % b,
            {"cpp": "kvdsl::modulo", "triton": "ops.modulo"},
        ),
        OperatorRow("**", "to", Kind.ARITHMETIC, Strength.POWER, math.pow),
        OperatorRow("<", "lt", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a < b)),
        OperatorRow("<=", "le", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a <= b)),
        OperatorRow(">", "gt", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a > b)),
        OperatorRow(">=", "ge", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a >= b)),
        OperatorRow("==", "eq", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a == b)),
        OperatorRow("!=", "ne", Kind.COMPARISON, Strength.COMPARE, lambda a, b: float(a != b)),
        OperatorRow("and", "and", Kind.LOGICAL, Strength.AND, lambda a, b: float(a != 0 and b != 0)),
        OperatorRow("or", "or", Kind.LOGICAL, Strength.OR, lambda a, b: float(a != 0 or b != 0)),
    ]
)

COMPARISONS = frozenset(row.name for row in OPERATORS.values() if row.kind is Kind.COMPARISON)
LOGICAL = frozenset(row.name for row in OPERATORS.values() if row.kind is Kind.LOGICAL)
CONDITIONS = COMPARISONS | LOGICAL | {"not"}
"""The operations that give a condition rather than a number."""


# -- reductions --------------------------------------------------------------------------------------------------------

RANGES = {
    "queries": "over queries",
    "history": "over the last N queries",
    "slots": "over slots",
    "dims": "over dims",
    "sketch": "over sketch",
    "page": "over page",
    "next": "over next page",
    "others": "over others",
    "heads": "over heads",
    "text": "over text",
}
"""The ranges of reductions, and their names in sentences."""


FARTHEST, MOST_STEPS = 65_536, 32
"""The most positions that `ahead` looks ahead, one by one, and with a factor."""


def range_of(axis: Axis, within: str = "all", *, last: bool = False) -> str:
    """Return the name in `RANGES` of an axis, a part of it, or the last queries."""
    if last:
        return "history"
    words = {Axis.QUERY: "queries", Axis.SLOT: "slots", Axis.DIM: "dims", Axis.OTHER: "others", Axis.HEAD: "heads"}
    return words[axis] if within in ("all", "self") else within


Formula = float | str | tuple[object, ...]
"""A reduction made of others: a number, `x` for the body, `count` for the number of queries that saw the slot, or a tuple of a
function, operator or reduction and its operands. Inner reductions have the range of the whole; over queries each is a column."""


@dataclass(frozen=True)
class ReductionRow:
    """A reduction of one value.

    Attributes:
        doc: one line, for the language's reference.
        over: the ranges that it supports.
        argument: the name of its second argument, a number from 0 to 1; empty if it takes none.
        rises: whether it is monotonic in each value, so that bounds of the values bound it.
        of_nothing: its value if no query of the range saw the slot, for a missing page, and without other slots.
        columns: its formula in columns (`RULES`), one query at a time; None if it is a rule itself.
        parts: its formula in simpler reductions over slots or dims, for targets without code for it; None if there is none.
    """

    name: str
    doc: str
    over: tuple[str, ...]
    argument: str = ""
    rises: bool = True
    of_nothing: float = math.nan
    columns: Formula | None = None
    parts: Formula | None = None


_EVERYWHERE = ("queries", "history", "slots", "dims", "sketch", "page", "next", "others", "heads", "text")
_ROOT: Formula = ("sqrt", ("var", "x"))
_SQUARED_DISTANCE: Formula = ("**", ("-", "x", ("mean", "x")), 2)

REDUCTIONS = _table(
    [
        ReductionRow("sum", "the sum", _EVERYWHERE, of_nothing=0.0),
        ReductionRow("mean", "the mean", _EVERYWHERE, columns=("/", ("sum", "x"), "count")),
        ReductionRow(
            "std", "the standard deviation, of the population", _EVERYWHERE, rises=False, columns=_ROOT, parts=_ROOT
        ),
        ReductionRow(
            "var",
            "the variance, of the population",
            _EVERYWHERE,
            rises=False,
            # Rounding can make the difference negative, where no deviation exists (reference: E1).
            columns=("max", ("-", ("/", ("squares", "x"), "count"), ("**", ("mean", "x"), 2)), 0),
            parts=("mean", _SQUARED_DISTANCE),
        ),
        ReductionRow("max", "the largest", _EVERYWHERE, of_nothing=-math.inf),
        ReductionRow("min", "the smallest", _EVERYWHERE, of_nothing=math.inf),
        ReductionRow("median", "the middle one, or the mean of the middle two", ("slots", "history")),
        ReductionRow(
            "quantile",
            "the value that the ratio p of the values does not exceed, interpolated linearly: a p of 0.5 is the median",
            ("history",),
            argument="p",
        ),
        ReductionRow("last", "the value of the newest query", ("queries",)),
        ReductionRow(
            "ema",
            "the moving average: the first query gives x, each later one makes it d * ema + (1 - d) * x",
            ("queries",),
            argument="d",
        ),
    ]
)

PLAIN_REDUCTIONS = tuple(row.name for row in REDUCTIONS.values() if not row.argument)
"""The reductions of one value without a second argument."""


@dataclass(frozen=True)
class RuleRow:
    """How a state column is updated; see `kvdsl.ir.nodes.Column`.

    Attributes:
        doc: what it holds of {}, in words.
        fresh: its value before the first query.
    """

    name: str
    doc: str
    fresh: float


RULES = _table(
    [
        RuleRow("token", "{}, once, when the token comes in", 0.0),
        RuleRow("sum", "the sum of {} over the queries that see the token", 0.0),
        RuleRow("squares", "the sum of squares of {} over the queries that see the token", 0.0),
        RuleRow("max", "the largest {} over the queries that see the token", -math.inf),
        RuleRow("min", "the smallest {} over the queries that see the token", math.inf),
        RuleRow("last", "the newest {} over the queries that see the token", math.nan),
        RuleRow(
            "ema", "the moving average of {} over the queries that see the token, which keeps {decay} of itself", math.nan
        ),
        RuleRow("ring", "{}, from each of the last {size} queries", math.nan),
        RuleRow("fold", "a value that every query that sees the token updates: {}", math.nan),
        RuleRow("prune", "a value that every prune updates: {}", math.nan),
    ]
)


# -- other operations written as functions ----------------------------------------------------------------------------


Axes = frozenset[Axis]


def _of_operands(axes: Axes) -> Axes:
    return axes


def _of_slots(_: Axes) -> Axes:
    return _SLOT


@dataclass(frozen=True)
class FormRow:
    """An operation written as a function that is neither elementwise nor a reduction.

    Attributes:
        axes: the axes of the result, given those of the operands; None for what is no `Call`.
    """

    name: str
    written: str
    doc: str
    axes: Callable[[Axes], Axes] | None = None


_NEIGHBOURS = "the largest, or mean, x of the unprotected slots at most n // 2 places before or after"

FORMS = _table(
    [
        FormRow("count", "count()", INPUTS["observed"].doc),
        FormRow(
            "project",
            "project(x, basis)",
            "the vector x, over the dims of a key, in the dims `rank` of a tensor: x times that matrix",
            _of_operands,
        ),
        FormRow(
            "turn",
            "turn(x, n)",
            "the key or query x, rotated by n more places; `turn(k, -position)` is the key before rotation",
            _of_operands,
        ),
        FormRow(
            "ahead",
            "ahead(x, n)",
            "the key x as seen by the next n queries: its product with an unrotated query is the mean over their positions; "
            "`ahead(x, n, 2)`: over the positions 1, 2, 4, ... after the newest token",
            _of_operands,
        ),
        FormRow(
            "pairs",
            "pairs(x)",
            "the L2 norm of each RoPE pair, at both of its dims",
            _of_operands,
        ),
        FormRow(
            "leverage",
            "leverage(x, ridge)",
            "the leverage of a slot's vector x, high if the others do not span it: "
            "x times the inverse of (the sum of x xᵀ over slots + ridge) times x",
            _of_slots,
        ),
        FormRow(
            "other",
            "other(x)",
            "the value of the other slot, where a slot is compared with each other one: `max(dot(k, other(k)) over others)`",
        ),
        FormRow(
            "rank",
            "rank(x)",
            "how many slots have a lower x: 0 for the lowest, NaN below all numbers, among equals the older first; "
            "`rank(x by key)` among those with its key, `rank(x over heads)` among the slots of all KV heads, if they share a budget",
        ),
        FormRow(
            "fold",
            "fold(x, start)",
            "x, updated by every query from its previous value `prev`, at first `start`; `fold(x over prunes, start)` at every prune",
        ),
        FormRow(
            "enough",
            "enough(x, p)",
            "the fewest tokens, the highest x first, whose x sum to the ratio p of the total; `enough(x, p, y)`: the highest y first",
            lambda axes: axes - _SLOT,
        ),
        FormRow(
            "random",
            "random()",
            "a number in [0, 1) per slot, drawn again for every query inside a reduction over queries; the same on every backend",
            _of_slots,
        ),
        FormRow("max_pool", "max_pool(x, n)", _NEIGHBOURS, _of_slots),
        FormRow("mean_pool", "mean_pool(x, n)", _NEIGHBOURS, _of_slots),
    ]
)

POOLS = ("max_pool", "mean_pool")

OPERATIONS: dict[str, Callable[[Axes], Axes]] = {
    **dict.fromkeys((*FUNCTIONS, *OPERATORS, "begun"), _of_operands),
    **{row.name: row.axes for row in FORMS.values() if row.axes is not None},
}
"""The operations of `Call`, with the axes of the result given those of the operands. Only passes make `begun`."""


def functions_of(target: str) -> dict[str, str]:
    """Return the functions and operators that a target writes as function calls, with their names there."""
    tables: tuple[Mapping[str, FunctionRow | OperatorRow], ...] = (FUNCTIONS, OPERATORS)
    return {name: row.code[target] for table in tables for name, row in table.items() if target in row.code}


PRELUDE = frozenset({"abs", "ceil", "exp", "sqrt", "var", "std", "ema", "last"})
"""Operations that the prelude defines through others, and that are recognized in any spelling (`kvdsl.passes.known`)."""

NAMED_INPUTS = frozenset(row.name for row in INPUTS.values() if not row.written)
NAMED_FUNCTIONS = frozenset({*REDUCTIONS, *ELEMENTWISE, *FORMS}) - PRELUDE
"""Every built-in name, of values and of functions."""


# -- forms of `keep` ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepRow:
    """A form of `keep`, by its word.

    Attributes:
        written: what follows the word: `count` is a number, `by` an expression per slot.
        words: what it protects, for `explain`.
        place: of an end of the text, the input that is less than `count` there.
        holds: whether `by` is a condition.
    """

    name: str
    written: str
    doc: str
    words: str
    place: str = ""
    holds: bool = False

    @property
    def parts(self) -> list[str]:
        """The names of its expressions, in order."""
        return re.findall(r"{(\w+)}", self.written)

    @property
    def ranks(self) -> bool:
        """Whether it ranks slots by `by`."""
        return "by" in self.parts and not self.holds


KEEPS = _table(
    [
        KeepRow("first", "{count}", "protects the first tokens", "first tokens", place="position"),
        KeepRow("last", "{count}", "protects the last tokens", "last tokens", place="age"),
        KeepRow("top", "{count} by {by}", "protects the tokens with the highest value", "tokens with the highest {by}"),
        KeepRow("where", "{by}", "protects tokens for which the condition holds", "tokens where {by}", holds=True),
    ]
)
ENDS = tuple(row.name for row in KEEPS.values() if row.place)
"""The forms that depend on a token's place only."""
