"""The whole intermediate representation: what a checked policy is.

Nodes are immutable, hashable and compared by value. A `Policy` exists only after the checker has accepted its source, so
nothing in here has to be checked again. Positions in the source are not part of the IR: every message about the source
comes from the stages before it.

Expressions see one KV head of one layer. The axes of an expression (`kvdsl.ir.axes`) say over what it varies:
queries (the tokens that attend), slots (the cached tokens) and dims (of a key, value or query vector).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Axis(str, Enum):
    """What an expression can vary over."""

    QUERY = "query"
    SLOT = "slot"
    DIM = "dim"


class Node(BaseModel):
    """An immutable value."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# -- expressions -----------------------------------------------------------------------------------------------------

InputName = Literal[
    "attn", "logit", "q", "k", "v", "position", "age", "budget", "live", "prompt", "layer", "layers", "observed"
]
Function = Literal["neg", "not", "abs", "sqrt", "exp", "log", "floor", "ceil", "min", "max", "where"]
Operator = Literal["+", "-", "*", "/", "%", "**", "<", "<=", ">", ">=", "==", "!=", "and", "or"]
ReduceOp = Literal["sum", "mean", "var", "std", "max", "min", "last", "count"]


class Number(Node):
    """A literal."""

    kind: Literal["number"] = "number"
    value: float


class ParamRef(Node):
    """The value of one of the policy's params."""

    kind: Literal["param"] = "param"
    name: str


class Input(Node):
    """Something the kernel sees: a probability, a vector, a position, a count.

    `observed` is the number of queries that could see the slot while it was cached; `count()` means it.
    """

    kind: Literal["input"] = "input"
    name: InputName


class Random(Node):
    """A counter-based random number in [0, 1) per slot, keyed by (seed, layer, KV head, position, newest position)."""

    kind: Literal["random"] = "random"


class Call(Node):
    """An elementwise function. `where(c, a, b)` is a where c holds, else b."""

    kind: Literal["call"] = "call"
    function: Function
    args: tuple[Expr, ...]


class Binary(Node):
    """An arithmetic, comparing (0 or 1) or logical operator."""

    kind: Literal["binary"] = "binary"
    op: Operator
    left: Expr
    right: Expr


class Reduce(Node):
    """A reduction of `body` over one axis.

    Over queries it ranges over the queries that could see the slot while it was cached, its own token's included.
    Over slots it ranges over the slots that the query sees (inside a reduction over queries), or over the live slots.
    `std` and `var` are the population's.
    """

    kind: Literal["reduce"] = "reduce"
    op: ReduceOp
    axis: Axis
    body: Expr


class ColumnRef(Node):
    """The value of a state column at a slot. Only passes make these (`kvdsl.passes.columns`)."""

    kind: Literal["column"] = "column"
    name: str


Expr = Annotated[
    Number | ParamRef | Input | Random | Call | Binary | Reduce | ColumnRef,
    Field(discriminator="kind"),
]


# -- policies --------------------------------------------------------------------------------------------------------


class Param(Node):
    """A number that the user may set. `default` may read the params before it."""

    name: str
    default: Expr
    unit: str | None = None
    low: float | None = None
    high: float | None = None


class Keep(Node):
    """What may not leave: the first or last `count` tokens, the top `count` by `by`, or the slots where `by` holds."""

    scope: Literal["first", "last", "top", "where"]
    count: Expr | None = None
    by: Expr | None = None


class Column(Node):
    """One float32 per slot that the kernels keep up to date.

    `rule` says how: `sum`, `squares` (the sum of squares), `max`, `min` and `last` fold `body` (axes query and slot) over the
    queries that see the slot; `token` is `body` (axes slot, from k and v) at the moment the token is placed.
    """

    name: str
    rule: Literal["sum", "squares", "max", "min", "last", "token"]
    body: Expr


class Policy(Node):
    """A checked policy.

    Attributes:
        name: the published spelling; the cache class is `<name>Cache`.
        stem: the file's stem: the package's and the command line's name.
        budget: tokens kept per KV head after a settle (the soft capacity C); None keeps everything.
        score: one number per slot; the lowest leaves first. None exactly when `budget` is None.
        trigger: prune only once live - C reaches this; 0 never.
        slack, max_drop: the target of a prune is C, or with max_drop d > 0 min(max(live - d, C), C + slack).
        columns: the state columns; empty until `kvdsl.passes.columns` has run.
    """

    edition: int = 1
    name: str
    stem: str
    doc: str = ""
    params: tuple[Param, ...] = ()
    budget: Expr | None = None
    score: Expr | None = None
    keeps: tuple[Keep, ...] = ()
    trigger: Expr = Number(value=1)
    slack: Expr = Number(value=0)
    max_drop: Expr = Number(value=0)
    group: Literal["mean", "max", "sum"] = "mean"
    positions: Literal["original", "compact"] = "original"
    columns: tuple[Column, ...] = ()


for _model in (Call, Binary, Reduce, Param, Keep, Column, Policy):
    _model.model_rebuild()
