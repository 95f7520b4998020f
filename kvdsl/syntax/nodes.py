"""A file's syntax as dataclasses with spans, before any checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from kvdsl.source import SourceFile, Span

# -- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A name and its place."""

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
    """An operator between two expressions."""

    span: Span
    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Member:
    """`j.position` or `j.(dot(k, k))`: a value of the slot j from `over slots as j`."""

    span: Span
    owner: Word
    value: Expr


@dataclass(frozen=True)
class Over:
    """The range of a reduction.

    Attributes:
        last: the N of `over last N queries`.
        after: the N of `over text after N`.
        name: the j of `over slots as j`.
    """

    span: Span
    axis: Word
    last: Expr | None = None
    after: Expr | None = None
    name: Word | None = None


@dataclass(frozen=True)
class Argument:
    """One argument of a call.

    Attributes:
        only: the condition of `x where c`.
        key: the key of `x over slots by key`.
        ranges: the span of `over`, `where` and `by`.
    """

    span: Span
    value: Expr
    keyword: Word | None = None
    over: Over | None = None
    only: Expr | None = None
    key: Expr | None = None
    ranges: Span | None = None


@dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    span: Span
    function: Word
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Broken:
    """An expression with an error that was already reported."""

    span: Span


Expr = Constant | Name | Unary | Binary | Call | Member | Broken

# -- statements ------------------------------------------------------------------------------------------------------


WORDS = {
    "victims": ("nobody", "heads", "layers"),
    "cap": ("soft", "hard"),
    "when": ("both", "prefill", "decode"),
    "group": ("mean", "max", "sum", "each"),
    "positions": ("original", "compact"),
    "storage": ("in_place", "blocks"),
    "rope": ("fused", "cached"),
    "prefill": ("whole", "blocks"),
}
"""The words of settings, the default first."""

AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "across": (("heads", "layers"),),
    "sketch": (("dims",), ("queries",)),
    "over_last": (("queries",),),
    "input_span": (("NAME",), ("spans",)),
}
"""Axes and other fixed words in rules of the grammar: for each place in a rule, its allowed words."""


@dataclass(frozen=True)
class Range:
    """`LO..HI`; either end may be missing."""

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
    keyword: ClassVar[Literal["param"]] = "param"


@dataclass(frozen=True)
class Parameter:
    """A function's parameter, possibly with a default."""

    span: Span
    name: Word
    default: Expr | None


@dataclass(frozen=True)
class Let:
    """`let NAME = EXPR`; a function if it has `parameters`."""

    span: Span
    name: Word
    parameters: tuple[Parameter, ...] | None
    value: Expr
    override: bool = False
    keyword: ClassVar[Literal["let"]] = "let"


@dataclass(frozen=True)
class Tensor:
    """`tensor NAME [AXIS, ...] from "FILE"`."""

    span: Span
    name: Word
    axes: tuple[Word, ...]
    file: Word
    override: bool = False
    keyword: ClassVar[Literal["tensor"]] = "tensor"


@dataclass(frozen=True)
class Given:
    """`input NAME [= EXPR]`, in edition 1 `given`; with a `source` `input NAME from spans`."""

    span: Span
    name: Word
    default: Expr | None
    override: bool = False
    source: Word | None = None
    keyword: ClassVar[Literal["given"]] = "given"


Named = Param | Let | Tensor | Given
"""The statements that define a name."""


@dataclass(frozen=True)
class Keep:
    """`keep first|last|top|where`; scope `nothing` is the bare `override keep`."""

    span: Span
    scope: Literal["first", "last", "top", "where", "nothing"]
    count: Expr | None = None
    by: Expr | None = None
    override: bool = False
    keyword: ClassVar[Literal["keep"]] = "keep"


@dataclass(frozen=True)
class Setting:
    """A statement that may occur once and holds an expression (`score`, `slack`), a word (`group`), or both (`storage`)."""

    span: Span
    keyword: str
    value: Expr | None = None
    word: Word | None = None
    override: bool = False


@dataclass(frozen=True)
class Across:
    """`across heads [floor RATIO]` of a `budget`."""

    span: Span
    floor: Expr | None


@dataclass(frozen=True)
class AcrossLayers:
    """`across layers [by EXPR] [floor RATIO]` at the end of a `budget`."""

    span: Span
    by: Expr | None
    floor: Expr | None


@dataclass(frozen=True)
class Budget:
    """`budget EXPR [at most EXPR] [across heads [floor RATIO]] [across layers [by EXPR] [floor RATIO]]`."""

    span: Span
    value: Expr
    most: Expr | None
    across: Across | None
    across_layers: AcrossLayers | None
    override: bool = False
    keyword: ClassVar[str] = "budget"


@dataclass(frozen=True)
class Select:
    """`select (top N by EXPR | where COND) [weight EXPR] [in layers A..B | from layers (A, B)]`.

    Without a count, `by` is a condition.
    """

    span: Span
    count: Expr | None
    by: Expr
    weight: Expr | None
    range: Range | None
    choosing: tuple[Expr, ...] = ()
    override: bool = False
    keyword: ClassVar[str] = "select"


@dataclass(frozen=True)
class Sketch:
    """`sketch top D dims by EXPR every U queries`."""

    span: Span
    count: Expr
    by: Expr
    every: Expr
    override: bool = False
    keyword: ClassVar[str] = "sketch"


@dataclass(frozen=True)
class Pages:
    """`pages N [after N]`."""

    span: Span
    value: Expr
    after: Expr | None
    override: bool = False
    keyword: ClassVar[str] = "pages"


@dataclass(frozen=True)
class Layers:
    """`layers A..B`."""

    span: Span
    range: Range
    override: bool = False
    keyword: ClassVar[str] = "layers"


Single = Setting | Budget | Select | Sketch | Pages | Layers
"""The statements that may occur once in a policy."""

Statement = Named | Keep | Single


Part = TypeVar("Part")


def parts_of(node: object, kind: type[Part]) -> Iterator[Part]:
    """Yield the nodes of a kind in a tree, outermost first."""
    if isinstance(node, kind):
        yield node
    for part in _fields(node):
        if hasattr(part, "__dataclass_fields__") and not isinstance(part, (Span, Word)):
            yield from parts_of(part, kind)


def operands(node: object) -> Iterator[Expr]:
    """Yield the outermost expressions in a node, without the node itself."""
    for part in _fields(node):
        match part:
            case Constant() | Name() | Unary() | Binary() | Call() | Member() | Broken():
                yield part
            case Argument() | Over() | Range() | Across() | AcrossLayers():
                yield from operands(part)


def _fields(node: object) -> Iterator[object]:
    """Yield a node's fields, and the items of tuples one by one."""
    for value in vars(node).values():
        yield from value if isinstance(value, tuple) else (value,)


def of_kind(nodes: Iterable[object], kind: type[Part]) -> list[Part]:
    """Return the nodes of a kind, in order."""
    return [node for node in nodes if isinstance(node, kind)]


# -- tests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Numbers, such as `0.4, nan`; `rest` fills the gap after the first `rest_at` values."""

    span: Span
    values: tuple[float, ...]
    rest: float | None = None
    rest_at: int = 0

    def fits(self, count: int) -> bool:
        """Return whether the row can have so many numbers."""
        return len(self.values) == count or (self.rest is not None and len(self.values) < count)

    def of(self, count: int) -> tuple[float, ...]:
        """Return `count` numbers, which must fit."""
        rest = () if self.rest is None else (self.rest,) * (count - len(self.values))
        return (*self.values[: self.rest_at], *rest, *self.values[self.rest_at :])


@dataclass(frozen=True)
class Places:
    """Positions in the text, `0, 4..9`, as ranges that include both ends; none for `nothing`."""

    span: Span
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Brought:
    """A token's `attend`, `query`, `key`, `value` or given value, with one tuple per KV head.

    Only a `query` has several rows in it, one per query head. `name` is the given value's.
    """

    span: Span
    kind: str
    heads: tuple[tuple[Row, ...], ...]
    name: Word | None = None


@dataclass(frozen=True)
class Incoming:
    """A token, `attend ROW` or `token query ROW`, repeated `times` times."""

    span: Span
    brought: tuple[Brought, ...]
    times: int = 1

    @property
    def tokens(self) -> tuple[Incoming, ...]:
        """The token as a tuple, like a prompt's tokens."""
        return (self,)


@dataclass(frozen=True)
class Prompt:
    """`prompt { ... }`: tokens that arrive together."""

    span: Span
    tokens: tuple[Incoming, ...]


@dataclass(frozen=True)
class Use:
    """`use POLICY`; in edition 1 also `at layer N of N`."""

    span: Span
    policy: Word
    layer: Constant | None = None
    layers: Constant | None = None
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Set:
    """`set PARAM = NUMBER`."""

    span: Span
    name: Word
    value: Constant
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Expect:
    """`expect WHAT ...`, per KV head or once for all; `word` is the column of `state` or the text of `error`."""

    span: Span
    what: str
    heads: tuple[Row | Places, ...] = ()
    word: Word | None = None
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Turn:
    """`turn`: the end of a turn of the chat."""

    span: Span
    tokens: ClassVar[tuple[Incoming, ...]] = ()


Step = Use | Set | Prompt | Incoming | Turn | Expect


@dataclass(frozen=True)
class Test:
    """`test "TITLE" { ... }`; `broken` if steps with syntax errors are missing."""

    span: Span
    title: Word
    steps: tuple[Step, ...]
    broken: bool = False

    def of(self, kind: type[Part]) -> list[Part]:
        """Return the steps of a kind, in order."""
        return of_kind(self.steps, kind)

    @property
    def texts(self) -> list[Prompt | Incoming]:
        """The steps in which tokens arrive."""
        return [step for step in self.steps if isinstance(step, (Prompt, Incoming))]

    @property
    def expected_error(self) -> Expect | None:
        """The step `expect error`, if there is one."""
        return next((step for step in self.of(Expect) if step.what == "error"), None)


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edition:
    """`kv 1`."""

    span: Span
    text: str


@dataclass(frozen=True)
class Import:
    """`import roco`, a shipped policy; or `import "other.kv"`, a file."""

    span: Span
    name: Word
    shipped: bool


@dataclass(frozen=True)
class Policy:
    """A policy.

    Attributes:
        clauses: whether it is `= PARENT with` clauses, which replace what they name, rather than `extends PARENT`.
        broken: what statements with syntax errors may have defined.
    """

    span: Span
    name: Word
    parent: Word | None
    doc: Word | None
    statements: tuple[Statement, ...]
    broken: frozenset[str] = frozenset()
    clauses: bool = False

    def of(self, kind: type[Part]) -> list[Part]:
        """Return the statements of a kind, in order."""
        return of_kind(self.statements, kind)

    @property
    def heading(self) -> str:
        """The text before its statements."""
        if self.parent is None:
            return f"policy {self.name.text}"
        return f"policy {self.name.text} {f'= {self.parent.text} with' if self.clauses else f'extends {self.parent.text}'}"


@dataclass(frozen=True)
class Module:
    """A file."""

    file: SourceFile
    editions: tuple[Edition, ...] = ()
    imports: tuple[Import, ...] = ()
    lets: tuple[Let, ...] = ()
    policies: tuple[Policy, ...] = ()
    tests: tuple[Test, ...] = ()
    broken: bool = field(default=False)
