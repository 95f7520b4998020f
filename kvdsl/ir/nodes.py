"""The whole intermediate representation: what a checked policy is.

Nodes are immutable, hashable and compared by value. A `Policy` exists only after the checker has accepted its source, so
nothing in here has to be checked again. Positions in the source are not part of the IR: every message about the source
comes from the stages before it.

Expressions see one KV head of one layer. The axes of an expression (`kvdsl.ir.axes`) say over what it varies:
queries (the tokens that attend), slots (the cached tokens) and dims (of a key, value or query vector).
"""

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from kvdsl.ir import ops
from kvdsl.ir.ops import Axis as Axis
from kvdsl.tensorfile import AXES


class Node(BaseModel):
    """An immutable value."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _ByKind:
    """Checks a child by its `kind`, and says nothing of what is in it.

    pydantic's own union of the nodes would write all of them into the schema of each, which takes longer than a policy takes to check.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_expression)


def _expression(value: Any) -> Any:
    """An expression, also from what `model_dump` made of one."""
    if isinstance(value, Expression):
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"an expression has one of the kinds {', '.join(_KINDS)}")
    return _KINDS[kind].model_validate(value)


if TYPE_CHECKING:
    Expr: TypeAlias = "Number | ParamRef | TensorRef | GivenRef | Input | Call | Reduce | Rank | Other | Fold | ColumnRef"
else:
    Expr = Annotated[Any, _ByKind]


# -- expressions -----------------------------------------------------------------------------------------------------


def _row_of(table: Container[str]) -> AfterValidator:
    """A name that stands in one of the tables of `kvdsl.ir.ops`."""

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
    """A node of an expression; `kind` says which, and `operands` which of its fields are expressions themselves, if they are there."""

    operands: ClassVar[tuple[str, ...]] = ()
    kind: str


class Number(Expression):
    """A literal."""

    kind: Literal["number"] = "number"
    value: float


class ParamRef(Expression):
    """The value of one of the policy's params."""

    kind: Literal["param"] = "param"
    name: str


class TensorRef(Expression):
    """What one of the policy's tensors has for the KV head and its layer: a number, or with `dims` one for each dim of a key.

    With `group` each query head has its own.
    """

    kind: Literal["tensor"] = "tensor"
    name: str
    dims: bool
    group: bool = False


class GivenRef(Expression):
    """What the cache was told of a token, for the KV head: one of the policy's `given` values. Passes make a column of it.

    `marked`: it is a span, which may be marked while the token is cached, so that nothing is made of it when the token comes.
    """

    kind: Literal["given"] = "given"
    name: str
    marked: bool = False


class Input(Expression):
    """Something the kernel sees: a probability, a vector, a position, a count.

    `observed` is the number of queries that could see the slot while it was cached; `count()` means it. `prev` is, in the body of a fold,
    what it came to before.
    """

    kind: Literal["input"] = "input"
    name: InputName


class Call(Expression):
    """An operation on the values of `args`, by its name in `kvdsl.ir.ops.OPERATIONS`.

    Functions and operators work on each number by itself: `where(c, a, b)` is a where c holds, else b; comparisons and logic give 0 or 1.
    The others:

    - `random()`: a counter-based number in [0, 1) per slot, keyed by (seed, layer, KV head, position, newest position). Inside a reduction
      over queries the newest position is the query's own, so that each query draws for each slot.
    - `project(x, matrix)`: a vector over the dims of a key as one over the `rank` of a matrix.
    - `turn(x, n)`, of a vector over the dims of a key: rotated on by n places, as the model rotates. `ahead(x, n)`: the mean of it turned
      back by the places newest + 1, ..., newest + n; with a factor, newest + 1, newest + factor, newest + factor ** 2 and so on.
      `pairs(x)`: at each dim the length of the pair that is rotated together; of a dim that is not rotated its own.
    - `leverage(x, ridge)`, of each slot's vector: x times the inverse of (the sum of x xᵀ over slots + ridge times the identity) times x.
      NaN where there is no inverse.
    - `enough(x, share, by)`: how many slots it takes, the highest `by` first, until their x come to a share of the sum over all: one at
      least. It ranges over the slots that a `Reduce` over slots would. Of equals the newer is first, a NaN last; where the sum is never
      reached, which a NaN among the values makes so, it takes all slots. Only counts read it: a budget, and how many are selected.
    - `max_pool(x, n)`, `mean_pool(x, n)`: at every unprotected slot the largest (or mean) x of the unprotected slots at most n // 2 places
      before or behind. Places are counted among the unprotected slots in the order of the text; a protected slot has its own x. Only a
      score pools.
    - `begun(held, start)`: what is held, or start where that is NaN. Only passes make it, of the column of a fold.
    """

    kind: Literal["call"] = "call"
    op: Operation
    args: tuple[Expr, ...] = ()


class Reduce(Expression):
    """A reduction of `body` over one axis.

    Over queries it ranges over the queries that could see the slot while it was cached, its own token's included; with `last` over those
    of them that are among the row's newest `last` queries. `ema` begins with the value of the slot's first query, and each later one
    gives d * ema + (1 - d) * value, with `argument` as d. Within `text` it ranges over all queries of the prompt behind the
    first `after` places, whether they saw the slot or not, and leaves no slots of its own.
    Over slots it ranges over the slots that the query sees (inside a reduction over queries), or over the live slots; within `page` it
    gives every slot the value of its page (`Policy.pages`), within `next` that of the page behind it.
    Over dims within `sketch` it ranges over the sketch's dims only.
    Over others it ranges, for each live slot, over all other live slots of its KV head (`Other`); within `self` over all of them.
    Over heads it ranges over a layer's KV heads, each of which has one number; only a layer's weight (`AcrossLayers`) does.
    With `where` only what that holds for is reduced. With `by` every slot has the reduction of the slots with the same key as its own.
    `std` and `var` are the population's.
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
        """Which of `kvdsl.ir.ops.RANGES` it ranges over."""
        return ops.range_of(self.axis, self.within, last=self.last is not None)


class Other(Expression):
    """In a reduction over others, what the other slot has of `body`."""

    operands = ("body",)
    kind: Literal["other"] = "other"
    body: Expr


class Fold(Expression):
    """A recurrence of one's own: what `body` makes of what it made before (the input `prev`), beginning with `start`.

    Over queries `body` is found at every query that sees the slot; another fold in it is read as it was before that query. Over prunes
    it is found in a settle, and remembered if the KV head loses tokens in it. Where it is NaN, a fold begins anew, as `start`.
    """

    operands = ("body", "start")
    kind: Literal["fold"] = "fold"
    body: Expr
    start: Expr
    over: Literal["queries", "prunes"] = "queries"


class Rank(Expression):
    """How many slots rank lower by `body`: 0 for the lowest, a NaN below every number, of equals the older.

    Of the slots that the query sees (inside a reduction over queries, or in a selection), or of the live slots; within a page of
    those of the slot's page; within heads of the live slots of all KV heads of the layer, of equals the older, then the lower head's. With
    `by` of those with the same key as the slot.
    """

    operands = ("body", "by")
    kind: Literal["rank"] = "rank"
    body: Expr
    within: Literal["all", "page", "heads"] = "all"
    by: Expr | None = None


class ColumnRef(Expression):
    """What a state column holds of a slot; of a ring, reduced by `op`, perhaps with an argument. Only passes make these
    (`kvdsl.passes.columns`).
    """

    operands = ("argument",)
    kind: Literal["column"] = "column"
    name: str
    op: ReduceOp | None = None
    argument: Expr | None = None


EXPRESSIONS = (Number, ParamRef, TensorRef, GivenRef, Input, Call, Reduce, Rank, Other, Fold, ColumnRef)
_KINDS: dict[str, type[Node]] = {node.model_fields["kind"].default: node for node in EXPRESSIONS}


PREVIOUS = Input(name="prev")


def call(op: str, *args: Expr) -> Call:
    """An operation on these operands."""
    return Call(op=op, args=args)


def is_call(expr: Expr | None, *ops: str) -> TypeGuard[Call]:
    """Whether an expression is one of these operations."""
    return isinstance(expr, Call) and expr.op in ops


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct operands of an expression."""
    if isinstance(expr, Call):
        return expr.args
    return tuple(part for name in expr.operands if (part := getattr(expr, name)) is not None)


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything in it, outermost first."""
    yield expr
    for child in children(expr):
        yield from walk(child)


Kind = TypeVar("Kind", bound=Expression)


def parts_of(expr: Expr, kind: type[Kind], **having: object) -> Iterator[Kind]:
    """The nodes of a kind in an expression, outermost first, whose fields have these values."""
    for part in walk(expr):
        if isinstance(part, kind) and all(getattr(part, name) == value for name, value in having.items()):
            yield part


def has(expr: Expr, kind: type[Expression], **having: object) -> bool:
    """Whether there is one."""
    return next(parts_of(expr, kind, **having), None) is not None


# -- policies --------------------------------------------------------------------------------------------------------


class Param(Node):
    """A number that the user may set. `default` may read the params before it."""

    name: str
    default: Expr
    unit: str | None = None
    low: float | None = None
    high: float | None = None


class Tensor(Node):
    """Numbers of a file: of every layer, KV head and dim, or of some of these, in the order of `axes`.

    Attributes:
        name: in the policy as in the file.
        file: as it is written, from the folder of the .kv file on.
        path: where that was when the policy was checked.
    """

    name: str
    axes: tuple[TensorAxis, ...]
    file: str
    path: str


class Given(Node):
    """A number of every token that the cache is told, or where nothing is said `default`; None: then it has to be.

    `source`: who says it. `caller`: a function, for every KV head; `spans`: 1 where the caller marks the token by this name, else 0;
    the name of an input: the cache itself.
    """

    name: str
    default: float | None = None
    source: str = "caller"


class Keep(Node):
    """What may not leave: the first or last `count` tokens, the top `count` by `by`, or the slots where `by` holds."""

    scope: Literal["first", "last", "top", "where"]
    count: Expr | None = None
    by: Expr | None = None


class Select(Node):
    """Attend to `count` tokens only, the top by `by` (axes query and slot), in layers `low` to `high`, ends included.

    With `measured` it is that many, which each query finds out, and `count` what it cannot exceed.

    With `choosing` these layers choose, and attend to everything themselves; each of the others attends to what the nearest of them
    below has chosen, head by head, and those below all of them to everything.

    With pages the unit is a page. Units with a token that `keep first` or `keep last` protects are always selected, and count
    (`keep top` and `keep where` protect from eviction only). Decode queries select; a prompt's queries attend to everything.

    With `weight` (axes query and slot) each that is attended to counts in the softmax so many times; one whose weight is no positive
    number has no share.
    """

    count: Expr
    by: Expr
    measured: Expr | None = None
    weight: Expr | None = None
    low: Expr | None = None
    high: Expr | None = None
    choosing: tuple[Expr, ...] = ()


class AcrossLayers(Node):
    """How the layers share their budgets once all have seen the prompt.

    With `by`, one number per layer, each layer gets a share of them in proportion to that, and of its own budget at least `floor`.
    Without, the lowest scores of all layers and heads leave, and each head keeps at least floor(floor * budget).
    """

    by: Expr | None = None
    floor: Expr = Number(value=0)


class Sketch(Node):
    """The top `count` dims by `by` (axes query and dim), found at the last prompt query and then at every `every`-th decode query."""

    count: Expr
    by: Expr
    every: Expr


class LayerRange(Node):
    """Layers `low` to `high`, counted from 0, ends included; None is open."""

    low: Expr | None = None
    high: Expr | None = None


class Column(Node):
    """What the kernels keep up to date per slot: one float32, or with the rule `ring` as many as `size` says.

    `rule` says how: `sum`, `squares` (the sum of squares), `max`, `min`, `last` and `ema` (with `decay`) fold `body` (axes query
    and slot) over the queries that see the slot; `ring` holds what the query at position p gave in its place p modulo `size`;
    `fold` is `body` itself, which reads the column as it was before the query; `prune` is `body` (axes slot) at the last prune;
    `token` is `body` (axes slot, from k and v) at the moment the token is placed.
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
        stem: the file's stem: the package's and the command line's name.
        tensors, given: those that something reads.
        budget: tokens kept per KV head after a settle (the soft capacity C); None keeps everything.
        measured: not None: the budget reads the data. It is found at every settle, from the slots before it, and `budget` is what it
            cannot exceed. C is then the smaller of both, floored, and 1 at least.
        across: not None: the heads of a layer share heads * budget tokens, each keeping at least floor(across * budget).
        across_layers: how the layers share their budgets; None: each has its own.
        score: one number per slot; the lowest leaves first. None exactly when `budget` is None.
        ends_last: whether what `keep first` and `keep last` protect leaves only when nothing else is left, and not as whatever is
            protected (edition 1); False, too, where the policy has no other `keep`, as it makes no difference then.
        victims: who must agree on the victims: each head by itself, a layer's heads, or the heads of all layers.
        trigger: prune only once live - C reaches this; 0 never.
        slack, max_drop: the target of a prune is C, or with max_drop d > 0 min(max(live - d, C), C + slack).
        cap: `hard` makes room before a token is placed that would exceed C + slack.
        select, sketch, pages: what a decode query attends to; None: everything.
        pages_after: how many tokens lie before the page from which pages are counted; None: none.
        layers: where the policy evicts; elsewhere the cache grows. None: everywhere.
        when: the phase in which it evicts.
        group: how a group's query heads are reduced; `each`: they are not, and every one selects for itself.
        positions: what a key's rotation tells: its place in the text, or its rank among the live slots.
        storage, block, rope: how slots lie in memory and how compact positions are served; no meaning of their own.
        prefill, prefill_block: one settle per prompt forward, or one after every `prefill_block`-th token of a row.
        columns: the state columns; empty until `kvdsl.passes.columns` has run.
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

    @property
    def one_pool(self) -> bool:
        """Whether all layers and heads lose tokens to each other."""
        return self.across_layers is not None and self.across_layers.by is None

    @property
    def heads_vote(self) -> bool:
        """Whether what a decode query attends to is chosen by what all KV heads of a layer find."""
        return self.select is not None and has(self.select.by, Reduce, axis=Axis.HEAD)

    @property
    def reuses(self) -> bool:
        """Whether layers take over what another one's queries choose."""
        return self.select is not None and bool(self.select.choosing)

    @property
    def weighs(self) -> bool:
        """Whether what a decode query attends to counts by a weight."""
        return self.select is not None and self.select.weight is not None

    @property
    def reads_text(self) -> bool:
        """Whether the score reads the queries of the whole prompt."""
        return self.score is not None and has(self.score, Reduce, within="text")

    @property
    def settles_turns(self) -> bool:
        """Whether tokens may leave when a turn ends: its budget counts what is cached, by how many turns have ended."""
        exprs = (self.measured, self.score, *(keep.by for keep in self.keeps))
        reads = any(has(expr, Input, name="turns") for expr in exprs if expr is not None)
        return reads and self.measured is not None and self.when == "both"

    @property
    def rotates(self) -> bool:
        """Whether an expression asks how the model rotates keys."""
        by = [keep.by for keep in self.keeps] + [one.body for one in self.columns]
        by += [self.score, self.measured, *(part.by for part in (self.select, self.across_layers) if part is not None)]
        by += [] if self.select is None else [self.select.measured, self.select.weight]
        return any(is_call(part, "turn", "ahead", "pairs") for expr in by if expr is not None for part in walk(expr))

    @property
    def remembers_prompts(self) -> bool:
        """Whether reductions `over last N queries` count those of the prompt that is being read: nobody else asks for them."""
        return self.when == "prefill" and self.select is None

    @property
    def forgets(self) -> bool:
        """Whether all that it knows of queries goes with the prompt that they are of."""
        rules = {column.rule for column in self.columns}
        return self.remembers_prompts and "ring" in rules and rules <= {"ring", "token"}

    @property
    def heads_share(self) -> bool:
        """Whether the KV heads of a layer may keep unequally many tokens of one budget."""
        return self.across is not None or self.one_pool
