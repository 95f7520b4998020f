"""The checked parts of a policy's statements, and how an expression becomes one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.helps import instead
from kvdsl.ir import nodes as ir
from kvdsl.ir.visitors import walk
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.needs import (
    SELECTED,
    is_fixed,
    is_per_slot,
    of_counts,
    of_query_heads_at_once,
    ranks_across,
    reads_heads,
    reads_text,
)
from kvdsl.sema.params import Params
from kvdsl.sema.resolve import Placed
from kvdsl.sema.scope import Scope
from kvdsl.sema.statics import Bounded, Part
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

COUNTS = ("trigger", "slack", "max_drop")
PER_HEAD = ("budget", "measured", *COUNTS, "select.count")
"""Numbers of the IR that may differ between the KV heads of a layer, like the counts of `keep`."""

SCORE, BUDGET, WEIGHT = "a score", "the budget", "the weight of a layer"
RANKS, WEIGHS = "what `select` ranks by", "what `select` weighs by"
SELECTION = (RANKS, SELECTED, WEIGHS)
"""Names of values in messages; what a value may read depends on its name."""


@dataclass(frozen=True)
class CheckedKeep:
    """A checked `keep`; `span` covers the whole statement."""

    ir: ir.Keep
    count: Part | None
    by: Part | None
    span: Span


@dataclass
class Parts:
    """The checked statements of a policy, without those that have errors.

    Attributes:
        exprs: expressions by their field of the IR, such as `score` or `select.by`.
        words: the words of all settings, including defaults.
        bounded: the numbers that have bounds.
    """

    exprs: dict[str, Part] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    keeps: list[CheckedKeep] = field(default_factory=list)
    bounded: list[Bounded] = field(default_factory=list)

    def __iter__(self) -> Iterator[Part]:
        """Yield everything that is evaluated, except the defaults of params."""
        yield from self.exprs.values()
        for keep in self.keeps:
            yield from (part for part in (keep.count, keep.by) if part is not None)

    def expr(self, name: str) -> ir.Expr | None:
        """Return the expression of a field of the IR, or None."""
        return self.exprs[name].expr if name in self.exprs else None


class Fields:
    """Checks the expressions of statements and adds them to the fields of the IR.

    Args:
        scope: returns the scope of a statement.

    Attributes:
        parts: what was added.
    """

    def __init__(self, params: Params, expressions: Expressions, scope: Callable[[Placed], Scope], sink: Sink) -> None:
        self.params, self.expressions, self.scope, self.sink = params, expressions, scope, sink
        self.parts = Parts()

    def value(self, node: syn.Expr, placed: Placed, what: str) -> Value | None:
        """Return an expression per slot or dim, or None after a report."""
        value = self.expressions.check(node, self.scope(placed))
        return value if value is not None and self.may_read(value, node.span, what) else None

    def may_read(self, value: Value, span: Span, what: str) -> bool:
        """Return whether a value reads only what `what` can read; report it otherwise.

        For example only a score pools, and only `select` reads the sketch.
        """
        if value.pools and what != SCORE:
            message = f"{what} cannot pool: pools skip protected tokens, which are known only for a score"
            self.sink.report(codes.POOL, span, message)
            return False
        if what not in (SCORE, *SELECTION) and of_query_heads_at_once(value.expr):
            message = f"{what} belongs to a KV head, and cannot read a tensor with one value per query head"
            self.sink.report(codes.NOT_HERE, span, message, "read it in the score")
            return False
        if what != SCORE and reads_text(value.expr):
            message = f"{what} cannot read `over text`: only a score can read the prompt's queries"
            self.sink.report(codes.TEXT, span, message, "read it in the score")
            return False
        if value.sketched and what not in SELECTION:
            message = f"{what} cannot read `over sketch`: a sketch is for `select`"
            whole = re.sub(r"\bover\s+sketch\b", "over dims", span.text)
            self.sink.report(codes.SKETCH_READ, span, message, instead("write `over dims`", whole))
            return False
        counts = of_counts(value.expr)
        if counts is not None and what not in (BUDGET, SELECTED) and (what != WEIGHT or counts == "seen"):
            message = f"{what} cannot read `{counts}`, which is for a budget and for how many tokens `select` takes"
            help = "write `position + age + 1` of any token for the number of tokens so far" if counts == "seen" else None
            self.sink.report(codes.NOT_HERE, span, message, help)
            return False
        if what not in SELECTION and any(part == ir.Input(name="query_head") for part in walk(value.expr)):
            message = f"{what} cannot read `query_head`, which is for `select`: the query heads of a group share its tokens"
            self.sink.report(codes.NOT_HERE, span, message)
            return False
        if what != SCORE and ranks_across(value.expr):
            message = f"{what} cannot read `rank(... over heads)`, which is for the score of heads that share a budget"
            self.sink.report(codes.ACROSS, span, message)
            return False
        if what not in (WEIGHT, RANKS, SCORE) and reads_heads(value.expr):
            message = f"{what} belongs to one KV head, and cannot read `over heads`: that is for `across layers by`, and for `select`"
            self.sink.report(codes.ACROSS, span, message)
            return False
        return True

    def orders_slots(self, value: Value, span: Span, what: str) -> bool:
        """Return whether slots can be ranked by a value, and its reductions over queries remembered; report it otherwise."""
        return self.remembers_numbers(value) and is_per_slot(value, span, what, self.sink)

    def number(self, name: str, node: syn.Expr, placed: Placed, what: str, low: float = 0, high: float = math.inf) -> None:
        """Add a number and its bounds to a field of the IR."""
        part = self.part(node, placed, what, per_head=name in PER_HEAD)
        if part is not None:
            self.parts.exprs[name] = part
            self.parts.bounded.append(Bounded(what, part, low, high, counts=name in COUNTS))

    def part(self, node: syn.Expr, placed: Placed, what: str, *, per_head: bool = False) -> Part | None:
        value = self.expressions.check(node, self.scope(placed))
        is_number = value is not None and is_fixed(value, node.span, what, self.sink.report, per_head=per_head)
        return Part(value.expr, node.span) if value is not None and is_number else None

    def range(self, name: str, what: str, range_: syn.Range, placed: Placed) -> None:
        """Add the ends of a range of layers, which may not depend on the layer or the row."""
        for end, node in (("low", range_.low), ("high", range_.high)):
            if node is not None:
                last = f"the {'first' if end == 'low' else 'last'} layer of {what}"
                self.layer(f"{name}.{end}", node, placed, f"the range of {what}", last)

    def layer(self, name: str, node: syn.Expr, placed: Placed, what: str, bounded: str) -> None:
        """Add a layer's number to a field of the IR; messages call it `what`, or `bounded`."""
        part = self.part(node, placed, what)
        if part is None:
            return
        varying = sorted(self.params.inputs_of(part.expr) - {"layers"})
        if varying:
            message = f"{what} cannot depend on `{varying[0]}`"
            self.sink.report(codes.NOT_HERE, part.span, message, "it can read `layers`, and params that do not depend on it")
            return
        self.parts.exprs[name] = part
        self.parts.bounded.append(Bounded(bounded, part))

    def remembers_numbers(self, value: Value) -> bool:
        """Return whether a value's reductions over queries can be remembered; report them otherwise."""
        vectors = [report for expr, report in self.expressions.vectors.items() if expr in walk(value.expr)]
        for report in vectors[:1]:
            report()
        return not vectors
