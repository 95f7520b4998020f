"""What a file says, as dataclasses with their places. Nothing in here has been checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvdsl.source import SourceFile, Span

# -- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A name where it stands."""

    span: Span
    text: str


@dataclass(frozen=True)
class Constant:
    """A number."""

    span: Span
    value: float


@dataclass(frozen=True)
class Name:
    """A name that is read."""

    span: Span
    name: str


@dataclass(frozen=True)
class Unary:
    """`-x` or `not x`."""

    span: Span
    op: str
    operand: Expr


@dataclass(frozen=True)
class Binary:
    """An operator between two expressions; `op_span` is where it stands."""

    span: Span
    op: str
    op_span: Span
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Over:
    """`over slots`; `last` is the N of `over last N queries`."""

    span: Span
    axis: Word
    last: Expr | None = None


@dataclass(frozen=True)
class Argument:
    """One argument of a call."""

    span: Span
    value: Expr
    keyword: Word | None = None
    over: Over | None = None


@dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    span: Span
    function: Word
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Broken:
    """An expression that was already complained about."""

    span: Span


Expr = Constant | Name | Unary | Binary | Call | Broken

# -- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """`LO..HI`, either of which may be missing."""

    span: Span
    low: Expr | None
    high: Expr | None


@dataclass(frozen=True)
class Param:
    """`param NAME [unit] = EXPR [in LO..HI]`."""

    span: Span
    name: Word
    unit: Word | None
    value: Expr
    range: Range | None
    override: bool = False


@dataclass(frozen=True)
class Let:
    """`let NAME = EXPR`, or with `names` a function."""

    span: Span
    name: Word
    names: tuple[Word, ...] | None
    value: Expr
    override: bool = False


@dataclass(frozen=True)
class Keep:
    """`keep first|last|top|where`; scope `nothing` is the bare `override keep`."""

    span: Span
    scope: Literal["first", "last", "top", "where", "nothing"]
    count: Expr | None = None
    by: Expr | None = None
    override: bool = False


@dataclass(frozen=True)
class Setting:
    """A statement that may stand once and holds an expression (`score`, `budget`, `slack`) or a word (`group`)."""

    span: Span
    keyword: str
    value: Expr | None = None
    word: Word | None = None
    override: bool = False


@dataclass(frozen=True)
class Later:
    """A statement, or a form of one, that the language has and this version does not compile."""

    span: Span
    keyword: str
    override: bool = False


Statement = Param | Let | Keep | Setting | Later

# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edition:
    """`kv 1`."""

    span: Span
    text: str


@dataclass(frozen=True)
class Import:
    """`import "other.kv"`."""

    span: Span
    path: Word


@dataclass(frozen=True)
class Policy:
    """A policy. `broken` is what its statements with syntax errors would have defined or set."""

    span: Span
    name: Word
    parent: Word | None
    doc: Word | None
    statements: tuple[Statement, ...]
    broken: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Module:
    """A file."""

    file: SourceFile
    editions: tuple[Edition, ...] = ()
    imports: tuple[Import, ...] = ()
    lets: tuple[Let, ...] = ()
    policies: tuple[Policy, ...] = ()
    broken: bool = field(default=False)
