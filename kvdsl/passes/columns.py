"""Find the state columns: what a kernel must remember per slot to evaluate reductions over queries.

A reduction over queries ranges over a slot's whole life, but a kernel sees one query at a time. So `mean(attn)` becomes
`sum_attn / observed`, and `std(attn)` an expression of `sum_attn`, `sum_attn_squared` and `observed`; both share columns. `ema` is one
number that every query updates. A reduction over the last N queries needs a `ring` of N numbers per slot, shared by all such
reductions of one body. A fold is a column that its own body reads. Values of a token's own key and value, tensors of files and the
caller's values (`norm1(v)`, `dot(filter, k)`, `importance`) are computed once, when the token is placed. `observed` needs no column:
every query since the token's own has seen the slot, or the last `window` queries in a layer with a sliding window.

What ranks slots or dims for one query (`select`, `sketch`) needs columns only for the caller's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdsl.ir.nodes import (
    PREVIOUS,
    Axis,
    Call,
    Column,
    ColumnRef,
    Expr,
    Fold,
    GivenRef,
    Input,
    Keep,
    Policy,
    Reduce,
    call,
    is_call,
)
from kvdsl.ir.ops import FUNCTIONS, OPERATORS, REDUCTIONS
from kvdsl.ir.visitors import axes_of, mapped, rewrite, walk, with_policy
from kvdsl.passes.fold import fold
from kvdsl.passes.normal import from_formula, normal, plain

_MAX_NAME = 40


def add_columns(policy: Policy) -> Policy:
    """Rewrite a policy's expressions to read state columns, and list these in `policy.columns`. Folds constants."""
    policy = mapped(fold(normal(policy)), plain)
    table = _Columns()
    score = None if policy.score is None else table.lower(policy.score)
    keeps = tuple(
        keep if keep.by is None else Keep(scope=keep.scope, count=keep.count, by=table.lower(keep.by))
        for keep in policy.keeps
    )
    measured = None if policy.measured is None else table.lower(policy.measured)
    select, sketch = policy.select, policy.sketch
    if select is not None:
        count = None if select.measured is None else table.with_given(select.measured)
        weight = None if select.weight is None else table.with_given(select.weight)
        select = select.model_copy(update={"by": table.with_given(select.by), "measured": count, "weight": weight})
    if sketch is not None:
        sketch = sketch.model_copy(update={"by": table.with_given(sketch.by)})
    shared = policy.across_layers
    if shared is not None and shared.by is not None:
        shared = shared.model_copy(update={"by": table.lower(shared.by)})
    return with_policy(
        policy,
        measured=measured,
        score=score,
        keeps=keeps,
        across_layers=shared,
        select=select,
        sketch=sketch,
        columns=table.columns,
    )


class _Columns:
    """The columns found so far, one for each meaning."""

    def __init__(self) -> None:
        self._by_meaning: dict[tuple[str, Expr, Expr | None], Column] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        # A column may read another one's value at the same slot. Tokens' columns come first, because they are placed first; rings come
        # last, because they take many rows.
        order = {"token": 0, "ring": 2}
        return tuple(sorted(self._by_meaning.values(), key=lambda column: order.get(column.rule, 1)))

    def lower(self, expr: Expr) -> Expr:
        """Replace every reduction over queries, and every value of a token, by columns."""
        return rewrite(expr, self._rule)

    def with_given(self, expr: Expr) -> Expr:
        """Replace only the caller's values by columns."""
        return rewrite(expr, lambda part: self._rule(part) if part.kind == "given" else None)

    def _rule(self, expr: Expr) -> Expr | None:
        match expr:
            case GivenRef():
                return ColumnRef(name=self._column("token", expr))
            case Fold():
                return self._fold(expr)
            case Reduce(axis=Axis.QUERY) if expr.within != "text":
                return self._over_queries(expr, self.lower(expr.body))
            case Reduce(axis=Axis.DIM) if _is_of_token(expr):
                return ColumnRef(name=self._column("token", expr))
        return None

    def _fold(self, expr: Fold) -> Expr:
        """Return the expression that reads a fold. One over prunes is evaluated in the settle that reads it, and stored afterwards."""
        rule = "fold" if expr.over == "queries" else "prune"
        body, start = self.lower(expr.body), self.lower(expr.start)
        meaning = (rule, body, start)
        if meaning not in self._by_meaning:
            name = self._fresh(_slug(rule, body))
            before = call("begun", ColumnRef(name=name), start)
            made = rewrite(body, lambda part: before if part == PREVIOUS else None)
            self._by_meaning[meaning] = Column(name=name, rule=rule, body=made)
        column = self._by_meaning[meaning]
        if rule == "prune":
            return column.body
        held = ColumnRef(name=column.name)
        return held if Axis.QUERY in axes_of(start) else call("begun", held, start)

    def _over_queries(self, expr: Reduce, body: Expr) -> Expr:
        if expr.last is not None:
            return ColumnRef(name=self._column("ring", body, size=expr.last), op=expr.op, argument=expr.argument)
        return self._of_columns(expr.op, body, expr.argument)

    def _of_columns(self, op: str, body: Expr, decay: Expr | None) -> Expr:
        """Return a reduction as a column, or as its row's formula in columns."""
        formula = REDUCTIONS[op].columns if op in REDUCTIONS else None
        if formula is None:
            return ColumnRef(name=self._column(op, body, decay=decay))
        return from_formula(formula, body, lambda inner, of: self._of_columns(inner, of, None))

    def _column(self, rule: str, body: Expr, *, decay: Expr | None = None, size: Expr | None = None) -> str:
        """Return the name of the column with this meaning."""
        meaning = (rule, body, decay or size)
        if meaning not in self._by_meaning:
            name = self._fresh(_slug(rule, body))
            self._by_meaning[meaning] = Column(name=name, rule=rule, body=body, decay=decay, size=size)
        return self._by_meaning[meaning].name

    def _fresh(self, name: str) -> str:
        taken = {column.name for column in self._by_meaning.values()}
        stem = name if len(name) <= _MAX_NAME else name[:_MAX_NAME].rpartition("_")[0]
        numbered = (f"{stem}_{n}" for n in range(2, len(taken) + 3))
        return next(free for free in (stem, *numbered) if free not in taken)


def _is_of_token(expr: Expr) -> bool:
    """Return whether a value belongs to the token and is fixed once it is placed. Params may still change with the prompt."""
    return axes_of(expr) == {Axis.SLOT} and all(map(_stays, walk(expr)))


def _stays(part: Expr) -> bool:
    """Return whether a node reads only what belongs to a token."""
    if part.kind == "call":
        return part.op in FUNCTIONS or part.op in OPERATORS
    if part.kind == "reduce":
        return part.axis is Axis.DIM and part.within == "all"
    if part.kind == "given":
        return not part.marked
    return part.kind == "number" or (part.kind == "tensor" and not part.group) or part in _OF_TOKEN


_OF_TOKEN = (Input(name="k"), Input(name="v"))


def _slug(rule: str, body: Expr) -> str:
    """Return a name for a column, such as `sum_attn_squared`, `norm1_v`, `last_attn` or `attn_ring`."""
    if rule == "token":
        return _token_slug(body)
    if rule == "squares":
        return f"sum_{_words(body)}_squared"
    if rule == "ring":
        words = _words(body)
        return f"{words}_ring" if words[0].isalpha() else f"ring_{words}"  # a name cannot begin with a digit
    return f"{rule}_{_words(body)}"


def _token_slug(body: Expr) -> str:
    if body.kind == "given":
        return f"given_{body.name}"
    if body.kind == "reduce" and body.op == "sum" and is_call(body.body, "abs"):
        return f"norm1_{_words(body.body.args[0])}"
    return _words(body)


def _words(expr: Expr) -> str:
    return _WORDS[expr.kind](expr)


def _words_of_call(expr: Call) -> str:
    words = [_words(arg) for arg in expr.args]
    if expr.op in OPERATORS:
        return f"_{OPERATORS[expr.op].word}_".join(words)
    if expr.op == "project":
        return "_in_".join(words)
    if expr.op == "begun":
        return words[0]
    return "_".join([expr.op, *words]) if expr.op in FUNCTIONS else "random"


_WORDS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("input", "param", "tensor", "given"), lambda expr: expr.name),
    "number": lambda expr: f"{expr.value:g}".replace("-", "minus").replace(".", "p").replace("+", ""),
    "call": _words_of_call,
    "reduce": lambda expr: f"{expr.op}_{_words(expr.body)}",
    "rank": lambda expr: f"rank_{_words(expr.body)}",
    "other": lambda expr: f"other_{_words(expr.body)}",
    "column": lambda expr: expr.name if expr.op is None else "random",
    "fold": lambda _: "random",
}
