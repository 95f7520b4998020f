"""The intermediate representation of a checked policy.

Nodes are immutable, hashable and compared by value. Only the checker makes a `Policy`, so later stages need no checks. Nodes have
no positions in the source: only earlier stages report on it.

An expression sees one KV head of one layer. Its axes (`kvdsl.ir.visitors`) are those it varies over: queries (the tokens that attend),
slots (the cached tokens) and dims (of a key, value or query vector).
"""

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from kvdsl.ir import ops
from kvdsl.ir.ops import Axis as Axis
from kvdsl.ir.ops import KeepRow
from kvdsl.tensorfile import AXES


class Node(BaseModel):
    """An immutable value."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _ByKind:
    """Validates a child by its `kind` only.

    pydantic's union would copy the schemas of all nodes into each of them, which takes longer than checking a policy.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_expression)


def _expression(value: Any) -> Any:
    """Return an expression, given as a node or as `model_dump` writes it."""
    match value:
        case Expression():
            return value
        case {"kind": str(kind)} if kind in _KINDS:
            return _KINDS[kind].model_validate(value)
    raise ValueError(f"an expression has one of the kinds {', '.join(_KINDS)}")


if TYPE_CHECKING:
    Expr: TypeAlias = "Number | ParamRef | TensorRef | GivenRef | Input | Call | Reduce | Rank | Other | Fold | ColumnRef"
else:
    Expr = Annotated[Any, _ByKind]


# -- expressions -----------------------------------------------------------------------------------------------------


def _row_of(table: Container[str]) -> AfterValidator:
    """Validate that a name is in one of the tables of `kvdsl.ir.ops`."""

    def known(name: str) -> str:
        if name not in table:
            raise ValueError(f"there is no `{name}` in kvdsl.ir.ops")
        return name

    return AfterValidator(known)


Within = Literal["all", "page", "next", "sketch", "text", "self"]
InputName = Annotated[str, _row_of(ops.INPUTS)]
Operation = Annotated[str, _row_of(ops.OPERATIONS)]
ReduceOp = Annotated[str, _row_of(ops.REDUCTIONS)]
ColumnRule = Annotated[str, _row_of(ops.RULES)]
TensorAxis = Annotated[str, _row_of(AXES)]


class Expression(Node):
    """A node of an expression. `kind` is its type, and `operands` are the fields that hold expressions, if set."""

    operands: ClassVar[tuple[str, ...]] = ()
    kind: str


class Number(Expression):
    """A literal."""

    kind: Literal["number"] = "number"
    value: float


class ParamRef(Expression):
    """The value of a param."""

    kind: Literal["param"] = "param"
    name: str


class TensorRef(Expression):
    """A tensor's value for the KV head and layer: a number, or with `dims` a vector over the dims of a key.

    With `group` each query head has its own.
    """

    kind: Literal["tensor"] = "tensor"
    name: str
    dims: bool
    group: bool = False


class GivenRef(Expression):
    """A `given` value of a token for the KV head. Passes turn it into a column.

    `marked`: the value is a span. Spans can be marked while the token is cached, so no column is made of it.
    """

    kind: Literal["given"] = "given"
    name: str
    marked: bool = False


class Input(Expression):
    """An input: a probability, a vector, a position or a count.

    `observed` is the number of queries that could see the slot while it was cached, written `count()`. `prev` is the previous value in
    the body of a fold.
    """

    kind: Literal["input"] = "input"
    name: InputName


class Call(Expression):
    """An operation on the values of `args`, by its name in `kvdsl.ir.ops.OPERATIONS`.

    Functions and operators are elementwise: `where(c, a, b)` is a where c holds, else b; comparisons and logic give 0 or 1. The others:

    - `random()`: a counter-based number in [0, 1) per slot, keyed by (seed, layer, KV head, position, newest position). Inside a
      reduction over queries the newest position is the query's own, so each query draws a number for each slot.
    - `project(x, matrix)`: a vector over the dims of a key, projected onto the `rank` of a matrix.
    - `turn(x, n)`: a vector over the dims of a key, rotated by n more positions, as the model rotates.
    - `ahead(x, n)`: the mean of x rotated back by the positions newest + 1, ..., newest + n; with a factor, by newest + 1,
      newest + factor, newest + factor ** 2 and so on, n in all.
    - `pairs(x)`: at each dim the L2 norm of its RoPE pair; the magnitude of a dim that is not rotated.
    - `leverage(x, ridge)`: xᵀ (XᵀX + ridge I)⁻¹ x for each row x of the slots' vectors X; NaN if there is no inverse.
    - `enough(x, share, by)`: the smallest number of slots, in order of falling `by`, whose x sum to `share` of the total, at least one.
      It ranges over the slots of a `Reduce` over slots. Among equals the newer comes first, NaN last. If the sum is never reached, as
      with a NaN in x, it is all slots. Only counts read it: a budget, or the count of `select`.
    - `max_pool(x, n)`, `mean_pool(x, n)`: at each unprotected slot the largest (or mean) x of the unprotected slots at most n // 2
      places before or after it, in the order of the text without protected slots. A protected slot has its own x. Only a score pools.
    - `begun(held, start)`: held, or start where held is NaN. Only passes make it, to read a fold's column.
    """

    kind: Literal["call"] = "call"
    op: Operation
    args: tuple[Expr, ...] = ()


class Reduce(Expression):
    """A reduction of `body` over one axis.

    - Queries: those that could see the slot while it was cached, its own token's included; with `last`, only those among the row's
      newest `last` queries. `ema` starts with the slot's first query and continues as d * ema + (1 - d) * value, with `argument` as d.
      Within `text`, all queries of the prompt except the first `after`, whether they saw the slot or not.
    - Slots: those that the query sees (inside a reduction over queries), or the live slots. Within `page` each slot gets the value of
      its page (`Policy.pages`), within `next` that of the following page.
    - Dims: all, or within `sketch` those of the sketch.
    - Others: for each live slot, all other live slots of its KV head (`Other`); within `self` the slot itself as well.
    - Heads: the layer's KV heads, one number each. Only a layer's weight (`AcrossLayers`), a selection and scores of heads that share
      a budget use it.

    `where` filters what is reduced. With `by` each slot gets the reduction of the slots with its key. `std` and `var` are the
    population's.
    """

    operands = ("body", "last", "argument", "after", "where", "by")
    kind: Literal["reduce"] = "reduce"
    op: ReduceOp
    axis: Axis
    body: Expr
    last: Expr | None = None
    argument: Expr | None = None
    within: Within = "all"
    after: Expr | None = None
    where: Expr | None = None
    by: Expr | None = None

    @property
    def over(self) -> str:
        """The name of its range in `kvdsl.ir.ops.RANGES`."""
        return ops.range_of(self.axis, self.within, last=self.last is not None)


class Other(Expression):
    """The other slot's value of `body`, in a reduction over others."""

    operands = ("body",)
    kind: Literal["other"] = "other"
    body: Expr


class Fold(Expression):
    """A recurrence: `body` computes the next value from the previous one (the input `prev`), starting with `start`.

    Over queries it is updated by every query that sees the slot; another fold in its body has its value before that query. Over prunes
    it is computed in a settle, and stored if the KV head evicts tokens in it. A NaN restarts the fold.
    """

    operands = ("body", "start")
    kind: Literal["fold"] = "fold"
    body: Expr
    start: Expr
    over: Literal["queries", "prunes"] = "queries"


class Rank(Expression):
    """The number of slots with a lower `body`: 0 for the lowest, NaN below every number, among equals the older first.

    The slots are those that the query sees (inside a reduction over queries, or in a selection), or the live slots; within `page`
    those of the slot's page; within `heads` the live slots of all KV heads of the layer, among equals the older, then the lower head's.
    With `by` they are those with the slot's key.
    """

    operands = ("body", "by")
    kind: Literal["rank"] = "rank"
    body: Expr
    within: Literal["all", "page", "heads"] = "all"
    by: Expr | None = None


class ColumnRef(Expression):
    """A slot's value of a state column, or with `op` a reduction of its ring. Only `kvdsl.passes.columns` makes it."""

    operands = ("argument",)
    kind: Literal["column"] = "column"
    name: str
    op: ReduceOp | None = None
    argument: Expr | None = None


_KINDS: dict[str, type[Node]] = {node.model_fields["kind"].default: node for node in Expression.__subclasses__()}


PREVIOUS = Input(name="prev")


def call(op: str, *args: Expr) -> Call:
    """Return an operation on these operands."""
    return Call(op=op, args=args)


def is_expression(value: object) -> TypeGuard[Expr]:
    """Return whether a value is an expression."""
    return isinstance(value, Expression)


def is_call(expr: Expr | None, *ops: str) -> TypeGuard[Call]:
    """Return whether an expression is one of these operations."""
    return isinstance(expr, Call) and expr.op in ops


def is_reduction(expr: Expr, *axes: Axis) -> TypeGuard[Reduce]:
    """Return whether an expression is a reduction over one of these axes."""
    return isinstance(expr, Reduce) and expr.axis in axes


def children(expr: Expr) -> tuple[Expr, ...]:
    """Return the direct operands of an expression."""
    if isinstance(expr, Call):
        return expr.args
    return tuple(part for name in expr.operands if (part := getattr(expr, name)) is not None)


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield the expression and everything in it, outermost first."""
    yield expr
    for child in children(expr):
        yield from walk(child)


Kind = TypeVar("Kind", bound=Expression)


def parts_of(expr: Expr, kind: type[Kind], **having: object) -> Iterator[Kind]:
    """Yield the nodes of a kind in an expression whose fields have these values, outermost first."""
    for part in walk(expr):
        if isinstance(part, kind) and all(getattr(part, name) == value for name, value in having.items()):
            yield part


def has(expr: Expr, kind: type[Expression], **having: object) -> bool:
    """Return whether an expression has such a node."""
    return next(parts_of(expr, kind, **having), None) is not None


# -- policies --------------------------------------------------------------------------------------------------------


class Param(Node):
    """A number that the user can set. `default` may read the params before it."""

    name: str
    default: Expr
    unit: str | None = None
    low: float | None = None
    high: float | None = None


class Tensor(Node):
    """Numbers from a file, by some of layer, KV head, dim and others, in the order of `axes`.

    Attributes:
        name: the name in the policy and in the file.
        file: the path as written, relative to the folder of the .kv file.
        path: the resolved path at the time of the check.
    """

    name: str
    axes: tuple[TensorAxis, ...]
    file: str
    path: str


class Given(Node):
    """A number per token from outside, or its `default`; None if it is required.

    `source`: `caller` for a function called per KV head; `spans` for 1 where the caller marks the token under this name, else 0; or the
    name of an input that the cache provides itself.
    """

    name: str
    default: float | None = None
    source: str = "caller"


class Keep(Node):
    """Tokens to protect; `scope` is a form of `keep`."""

    scope: Annotated[str, _row_of(ops.KEEPS)]
    count: Expr | None = None
    by: Expr | None = None

    @property
    def row(self) -> KeepRow:
        """The row of its form."""
        return ops.KEEPS[self.scope]


class Select(Node):
    """Attend to the top `count` tokens by `by` (axes query and slot) only, in layers `low` to `high` inclusive.

    With `measured` each query computes the count, up to `count`.

    With `choosing` these layers select and attend to everything themselves. Every other layer attends, head by head, to the choice of
    the nearest such layer below; layers below all of them attend to everything.

    With pages the unit is a page. Units with a token that `keep first` or `keep last` protects are always selected, and count
    (other forms protect from eviction only). Decode queries select; a prompt's queries attend to everything.

    With `weight` (axes query and slot) each token counts that many times in the softmax; one without a positive weight has no share.
    """

    count: Expr
    by: Expr
    measured: Expr | None = None
    weight: Expr | None = None
    low: Expr | None = None
    high: Expr | None = None
    choosing: tuple[Expr, ...] = ()


class AcrossLayers(Node):
    """How layers share their budgets after the prompt.

    With `by`, one number per layer, each layer gets a share in proportion to it, and at least `floor` of its own budget. Without `by`
    the lowest scores of all layers and heads are evicted, and each head keeps at least floor(floor * budget).
    """

    by: Expr | None = None
    floor: Expr = Number(value=0)


class Sketch(Node):
    """The top `count` dims by `by` (axes query and dim), computed at the last prompt query and at every `every`-th decode query."""

    count: Expr
    by: Expr
    every: Expr


class LayerRange(Node):
    """Layers `low` to `high` inclusive, counted from 0; None is open."""

    low: Expr | None = None
    high: Expr | None = None


class Column(Node):
    """Per-slot state that kernels update: one float32, or with the rule `ring` `size` of them.

    `sum`, `squares` (the sum of squares), `max`, `min`, `last` and `ema` (with `decay`) fold `body` (axes query and slot) over the queries
    that see the slot. `ring` holds the body of the query at position p at index p modulo `size`. `fold` is `body`, which reads the
    column's value before the query. `prune` is `body` (axis slot) at the last prune. `token` is `body` (axis slot, from k and v) when
    the token is placed.
    """

    name: str
    rule: ColumnRule
    body: Expr
    decay: Expr | None = None
    size: Expr | None = None


class Policy(Node):
    """A checked policy.

    Attributes:
        name: the published spelling; the cache class is `<name>Cache`.
        stem: the file's stem, used for the package and on the command line.
        tensors: the tensors that are read.
        given: the given values that are read.
        budget: tokens kept per KV head after a settle (the soft capacity C); None keeps everything.
        measured: a data-dependent budget, evaluated at every settle on the slots before it. C is then the smaller of it and `budget`,
            rounded down, at least 1.
        across: if set, the heads of a layer share heads * budget tokens, each keeping at least floor(across * budget).
        across_layers: how the layers share their budgets; None if each has its own.
        score: one number per slot; the lowest is evicted first. None exactly if `budget` is None.
        ends_last: whether tokens of `keep first` and `keep last` yield after all others, rather than like any protected token
            (edition 1). False, too, if the policy has no other `keep`, where both mean the same.
        victims: who shares victims: each head has its own, a layer's heads agree, or the heads of all layers.
        trigger: prune only once live - C reaches this; 0 never.
        slack, max_drop: the target of a prune is C, or with max_drop d > 0 min(max(live - d, C), C + slack).
        cap: `hard` evicts before a token is placed that would exceed C + slack.
        select, sketch, pages: what a decode query attends to; None for everything.
        pages_after: the number of tokens before the first page; None for none.
        layers: the layers that evict; None for all. The cache of other layers grows.
        when: the phase in which tokens are evicted.
        group: the reduction over a GQA group's query heads; `each` if every query head selects for itself.
        positions: the position that rotates a key: its place in the text, or its rank among the live slots.
        storage, block, rope: memory layout and how compact positions are computed; they do not change results.
        prefill, prefill_block: one settle per prompt forward, or one after every `prefill_block`-th token of a row.
        columns: the state columns; empty before `kvdsl.passes.columns`.
    """

    name: str
    stem: str
    doc: str = ""
    params: tuple[Param, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    given: tuple[Given, ...] = ()
    budget: Expr | None = None
    measured: Expr | None = None
    across: Expr | None = None
    across_layers: AcrossLayers | None = None
    score: Expr | None = None
    keeps: tuple[Keep, ...] = ()
    ends_last: bool = False
    victims: Literal["own", "heads", "layers"] = "own"
    trigger: Expr = Number(value=1)
    slack: Expr = Number(value=0)
    max_drop: Expr = Number(value=0)
    cap: Literal["soft", "hard"] = "soft"
    select: Select | None = None
    sketch: Sketch | None = None
    pages: Expr | None = None
    pages_after: Expr | None = None
    layers: LayerRange | None = None
    when: Literal["both", "prefill", "decode"] = "both"
    group: Literal["mean", "max", "sum", "each"] = "mean"
    positions: Literal["original", "compact"] = "original"
    storage: Literal["in_place", "blocks"] = "in_place"
    block: Expr | None = None
    rope: Literal["fused", "cached"] = "fused"
    prefill: Literal["whole", "blocks"] = "whole"
    prefill_block: Expr | None = None
    columns: tuple[Column, ...] = ()

    def statements(self) -> Iterator[tuple[str, Expr]]:
        """Yield each expression that ranks, marks or counts tokens or dims, with its statement as `explain` names it."""
        found = [("budget", self.measured), ("score", self.score)]
        found += [(f"keep {keep.scope}", keep.by) for keep in self.keeps]
        found += [] if self.across_layers is None else [("across layers", self.across_layers.by)]
        if self.select is not None:
            found += [("select", self.select.by), ("select", self.select.measured), ("weight", self.select.weight)]
        found += [] if self.sketch is None else [("sketch", self.sketch.by)]
        yield from ((name, expr) for name, expr in found if expr is not None)

    @property
    def one_pool(self) -> bool:
        """Whether all layers and heads compete for one pool of slots."""
        return self.across_layers is not None and self.across_layers.by is None

    @property
    def heads_vote(self) -> bool:
        """Whether the KV heads of a layer select together."""
        return self.select is not None and has(self.select.by, Reduce, axis=Axis.HEAD)

    @property
    def reuses(self) -> bool:
        """Whether layers reuse the selection of another layer."""
        return self.select is not None and bool(self.select.choosing)

    @property
    def weighs(self) -> bool:
        """Whether selected tokens have weights in the softmax."""
        return self.select is not None and self.select.weight is not None

    @property
    def reads_text(self) -> bool:
        """Whether the score reads the queries of the whole prompt."""
        return self.score is not None and has(self.score, Reduce, within="text")

    @property
    def settles_turns(self) -> bool:
        """Whether the end of a turn can evict tokens: the budget depends on the data, and something reads `turns`."""
        exprs = (self.measured, self.score, *(keep.by for keep in self.keeps))
        reads = any(has(expr, Input, name="turns") for expr in exprs if expr is not None)
        return reads and self.measured is not None and self.when == "both"

    @property
    def rotates(self) -> bool:
        """Whether an expression reads the model's rotation."""
        exprs = [*(expr for _, expr in self.statements()), *(column.body for column in self.columns)]
        return any(is_call(part, "turn", "ahead", "pairs") for expr in exprs for part in walk(expr))

    @property
    def remembers_prompts(self) -> bool:
        """Whether reductions `over last N queries` count only the current prompt's queries, because nothing else reads them."""
        return self.when == "prefill" and self.select is None

    @property
    def forgets(self) -> bool:
        """Whether all state about queries can be dropped after each prompt."""
        rules = {column.rule for column in self.columns}
        return self.remembers_prompts and "ring" in rules and rules <= {"ring", "token"}

    @property
    def heads_share(self) -> bool:
        """Whether the KV heads of a layer share one budget and may keep different numbers of tokens."""
        return self.across is not None or self.one_pool
