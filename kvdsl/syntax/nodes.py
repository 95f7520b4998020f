"""A file's syntax as dataclasses with spans, before any checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from kvdsl.source import SourceFile, Span


@dataclass(frozen=True)
class Node:
    """A part of a file, with its place."""

    span: Span


# -- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word(Node):
    """A name and its place."""

    text: str


@dataclass(frozen=True)
class Constant(Node):
    """A number."""

    value: float


@dataclass(frozen=True)
class Name(Node):
    """A name that is read."""

    name: str


@dataclass(frozen=True)
class Unary(Node):
    """`-x` or `not x`."""

    op: str
    operand: Expr


@dataclass(frozen=True)
class Binary(Node):
    """An operator between two expressions."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Member(Node):
    """`j.position` or `j.(dot(k, k))`: a value of the slot j from `over slots as j`."""

    owner: Word
    value: Expr


@dataclass(frozen=True)
class Over(Node):
    """The range of a reduction.

    Attributes:
        last: the N of `over last N queries`.
        after: the N of `over text after N`.
        name: the j of `over slots as j`.
    """

    axis: Word
    last: Expr | None = None
    after: Expr | None = None
    name: Word | None = None


@dataclass(frozen=True)
class Argument(Node):
    """One argument of a call.

    Attributes:
        only: the condition of `x where c`.
        key: the key of `x over slots by key`.
        ranges: the span of `over`, `where` and `by`.
    """

    value: Expr
    keyword: Word | None = None
    over: Over | None = None
    only: Expr | None = None
    key: Expr | None = None
    ranges: Span | None = None


@dataclass(frozen=True)
class Call(Node):
    """A function with its arguments."""

    function: Word
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Broken(Node):
    """An expression with an error that was already reported."""


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
class Range(Node):
    """`LO..HI`; either end may be missing."""

    low: Expr | None
    high: Expr | None


@dataclass(frozen=True)
class Param(Node):
    """`param NAME [unit] = EXPR [in LO..HI]`."""

    name: Word
    unit: Word | None
    value: Expr
    range: Range | None
    override: bool = False
    keyword: ClassVar[Literal["param"]] = "param"


@dataclass(frozen=True)
class Parameter(Node):
    """A function's parameter, possibly with a default."""

    name: Word
    default: Expr | None


@dataclass(frozen=True)
class Let(Node):
    """`let NAME = EXPR`; a function if it has `parameters`."""

    name: Word
    parameters: tuple[Parameter, ...] | None
    value: Expr
    override: bool = False
    keyword: ClassVar[Literal["let"]] = "let"


@dataclass(frozen=True)
class Tensor(Node):
    """`tensor NAME [AXIS, ...] from "FILE"`."""

    name: Word
    axes: tuple[Word, ...]
    file: Word
    override: bool = False
    keyword: ClassVar[Literal["tensor"]] = "tensor"


@dataclass(frozen=True)
class Given(Node):
    """`input NAME [= EXPR]`, in edition 1 `given`; with a `source` `input NAME from spans`."""

    name: Word
    default: Expr | None
    override: bool = False
    source: Word | None = None
    keyword: ClassVar[Literal["given"]] = "given"


Named = Param | Let | Tensor | Given
"""The statements that define a name."""


@dataclass(frozen=True)
class Keep(Node):
    """A form of `keep`; scope `nothing` is the bare `override keep`."""

    scope: str
    count: Expr | None = None
    by: Expr | None = None
    override: bool = False
    keyword: ClassVar[Literal["keep"]] = "keep"


@dataclass(frozen=True)
class Setting(Node):
    """A statement that may occur once and holds an expression (`score`, `slack`), a word (`group`), or both (`storage`)."""

    keyword: str
    value: Expr | None = None
    word: Word | None = None
    override: bool = False


@dataclass(frozen=True)
class Across(Node):
    """`across heads [floor RATIO]` of a `budget`."""

    floor: Expr | None


@dataclass(frozen=True)
class AcrossLayers(Node):
    """`across layers [by EXPR] [floor RATIO]` at the end of a `budget`."""

    by: Expr | None
    floor: Expr | None


@dataclass(frozen=True)
class Budget(Node):
    """`budget EXPR [at most EXPR] [across heads [floor RATIO]] [across layers [by EXPR] [floor RATIO]]`."""

    value: Expr
    most: Expr | None
    across: Across | None
    across_layers: AcrossLayers | None
    override: bool = False
    keyword: ClassVar[str] = "budget"


@dataclass(frozen=True)
class Select(Node):
    """`select (top N by EXPR | where COND) [weight EXPR] [in layers A..B | from layers (A, B)]`.

    Without a count, `by` is a condition.
    """

    count: Expr | None
    by: Expr
    weight: Expr | None
    range: Range | None
    choosing: tuple[Expr, ...] = ()
    override: bool = False
    keyword: ClassVar[str] = "select"


@dataclass(frozen=True)
class Sketch(Node):
    """`sketch top D dims by EXPR every U queries`."""

    count: Expr
    by: Expr
    every: Expr
    override: bool = False
    keyword: ClassVar[str] = "sketch"


@dataclass(frozen=True)
class Pages(Node):
    """`pages N [after N]`."""

    value: Expr
    after: Expr | None
    override: bool = False
    keyword: ClassVar[str] = "pages"


@dataclass(frozen=True)
class Layers(Node):
    """`layers A..B`."""

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
class Row(Node):
    """Numbers, such as `0.4, nan`; `rest` fills the gap after the first `rest_at` values."""

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
class Places(Node):
    """Positions in the text, `0, 4..9`, as ranges that include both ends; none for `nothing`."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Brought(Node):
    """A token's `attend`, `query`, `key`, `value` or given value, with one tuple per KV head.

    Only a `query` has several rows in it, one per query head. `name` is the given value's.
    """

    kind: str
    heads: tuple[tuple[Row, ...], ...]
    name: Word | None = None


@dataclass(frozen=True)
class Incoming(Node):
    """A token, `attend ROW` or `token query ROW`, repeated `times` times."""

    brought: tuple[Brought, ...]
    times: int = 1

    @property
    def tokens(self) -> tuple[Incoming, ...]:
        """The token as a tuple, like a prompt's tokens."""
        return (self,)


@dataclass(frozen=True)
class Prompt(Node):
    """`prompt { ... }`: tokens that arrive together."""

    tokens: tuple[Incoming, ...]


@dataclass(frozen=True)
class Use(Node):
    """`use POLICY`; in edition 1 also `at layer N of N`."""

    policy: Word
    layer: Constant | None = None
    layers: Constant | None = None
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Set(Node):
    """`set PARAM = NUMBER`."""

    name: Word
    value: Constant
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Expect(Node):
    """`expect WHAT ...`, per KV head or once for all; `word` is the column of `state` or the text of `error`."""

    what: str
    heads: tuple[Row | Places, ...] = ()
    word: Word | None = None
    tokens: ClassVar[tuple[Incoming, ...]] = ()


@dataclass(frozen=True)
class Turn(Node):
    """`turn`: the end of a turn of the chat."""

    tokens: ClassVar[tuple[Incoming, ...]] = ()


Step = Use | Set | Prompt | Incoming | Turn | Expect


@dataclass(frozen=True)
class Test(Node):
    """`test "TITLE" { ... }`; `broken` if steps with syntax errors are missing."""

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
class Edition(Node):
    """`kv 1`."""

    text: str


@dataclass(frozen=True)
class Import(Node):
    """`import roco`, a shipped policy; or `import "other.kv"`, a file."""

    name: Word
    shipped: bool


@dataclass(frozen=True)
class Policy(Node):
    """A policy.

    Attributes:
        clauses: whether it is `= PARENT with` clauses, which replace what they name, rather than `extends PARENT`.
        broken: what statements with syntax errors may have defined.
    """

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
    broken: bool = False
