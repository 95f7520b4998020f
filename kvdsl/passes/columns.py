"""Find the state columns: what a kernel must remember per slot so that reductions over queries can be evaluated.

A reduction over queries ranges over the whole life of a slot, of which a kernel sees one query at a time. So
`mean(attn)` becomes `sum_attn / observed`, `std(attn)` becomes an expression of `sum_attn`, `sum_attn_squared` and
`observed`, and both share their columns. What only reads a token's own key and value (`norm1(v)`) is computed once, when the
token is placed. `observed` needs no column: every query since the token's own has seen the slot, or the last `window`
queries of a layer with a sliding window.
"""

from __future__ import annotations

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Binary, Call, Column, ColumnRef, Expr, Input, Keep, Number, ParamRef, Policy, Reduce
from kvdsl.ir.visitors import rewrite, walk, with_policy

_OBSERVED = Input(name="observed")
_MAX_NAME = 40


def add_columns(policy: Policy) -> Policy:
    """Rewrite the policy's expressions so that they read state columns, and list those in `policy.columns`."""
    table = _Columns()
    score = None if policy.score is None else table.lower(policy.score)
    keeps = tuple(
        keep if keep.by is None else Keep(scope=keep.scope, count=keep.count, by=table.lower(keep.by))
        for keep in policy.keeps
    )
    return with_policy(policy, score=score, keeps=keeps, columns=table.columns)


class _Columns:
    """The columns found so far, each (rule, body) once."""

    def __init__(self) -> None:
        self._by_meaning: dict[tuple[str, Expr], Column] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        # A column may read another one's value at the same slot; tokens' columns come first, as they are placed first.
        found = self._by_meaning.values()
        return tuple(sorted(found, key=lambda column: column.rule != "token"))

    def lower(self, expr: Expr) -> Expr:
        """The expression with every reduction over queries, and every value of a token, read from columns."""
        return rewrite(expr, self._rule)

    def _rule(self, expr: Expr) -> Expr | None:
        if not isinstance(expr, Reduce):
            return None
        if expr.axis is Axis.QUERY:
            return self._over_queries(expr.op, self.lower(expr.body))
        if expr.axis is Axis.DIM and _is_of_token(expr):
            return self._column("token", expr)
        return None

    def _over_queries(self, op: str, body: Expr) -> Expr:
        if op == "count":
            return _OBSERVED
        if op == "mean":
            return _quotient(self._column("sum", body))
        if op in ("var", "std"):
            squares = self._column("squares", body)
            mean = _quotient(self._column("sum", body))
            square = Binary(op="**", left=mean, right=Number(value=2))
            # Rounding can leave the difference below zero, where no deviation exists (reference: E1).
            variance = Call(function="max", args=(Binary(op="-", left=_quotient(squares), right=square), Number(value=0)))
            return variance if op == "var" else Call(function="sqrt", args=(variance,))
        return self._column(op, body)

    def _column(self, rule: str, body: Expr) -> ColumnRef:
        known = self._by_meaning.get((rule, body))
        if known is None:
            known = Column(name=self._fresh(_slug(rule, body)), rule=rule, body=body)  # type: ignore[arg-type]  # a checked op
            self._by_meaning[rule, body] = known
        return ColumnRef(name=known.name)

    def _fresh(self, name: str) -> str:
        taken = {column.name for column in self._by_meaning.values()}
        if name not in taken and len(name) <= _MAX_NAME:
            return name
        stem = name[: _MAX_NAME - 4].rstrip("_")
        return next(f"{stem}_{n}" for n in range(2, len(taken) + 3) if f"{stem}_{n}" not in taken)


def _quotient(total: Expr) -> Expr:
    return Binary(op="/", left=total, right=_OBSERVED)


def _is_of_token(expr: Expr) -> bool:
    """Whether the value is the token's own: fixed from the moment it is placed. Params may still change with the prompt."""
    leaves = [node for node in walk(expr) if not isinstance(node, (Call, Binary, Reduce))]
    reads_vector = axes_of(expr) == {Axis.SLOT}
    return reads_vector and all(
        isinstance(leaf, Number) or (isinstance(leaf, Input) and leaf.name in ("k", "v")) for leaf in leaves
    )


_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "over", "%": "mod", "**": "to", "<": "lt", "<=": "le", ">": "gt"}
_WORDS |= {">=": "ge", "==": "eq", "!=": "ne", "and": "and", "or": "or"}


def _slug(rule: str, body: Expr) -> str:
    """A name that says what the column holds: `sum_attn_squared`, `norm1_v`, `last_attn`."""
    if rule == "token":
        return _token_slug(body)
    if rule == "squares":
        return f"sum_{_words(body)}_squared"
    return f"{rule}_{_words(body)}"


def _token_slug(body: Expr) -> str:
    if isinstance(body, Reduce) and body.op == "sum" and isinstance(body.body, Call) and body.body.function == "abs":
        return f"norm1_{_words(body.body.args[0])}"
    return _words(body)


def _words(expr: Expr) -> str:
    if isinstance(expr, (Input, ParamRef, ColumnRef)):
        return expr.name
    if isinstance(expr, Number):
        return f"{expr.value:g}".replace("-", "minus").replace(".", "p").replace("+", "")
    if isinstance(expr, Reduce):
        return f"{expr.op}_{_words(expr.body)}"
    if isinstance(expr, Call):
        return "_".join([expr.function, *map(_words, expr.args)])
    if isinstance(expr, Binary):
        return f"{_words(expr.left)}_{_WORDS[expr.op]}_{_words(expr.right)}"
    return "random"
