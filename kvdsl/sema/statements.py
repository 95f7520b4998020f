"""Check a policy's statements one by one; `kvdsl.sema.combinations` checks them against each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean, listed
from kvdsl.helps import both, instead, offer
from kvdsl.ir import nodes as ir
from kvdsl.ir.visitors import walk
from kvdsl.sema import values
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.needs import (
    SELECTED,
    is_fixed,
    is_measured,
    is_per_slot,
    looks_back,
    of_counts,
    of_query_heads_at_once,
    ranks_across,
    reads_data,
    reads_heads,
    reads_text,
    selects,
    sketches,
    weighs_a_layer,
)
from kvdsl.sema.params import Params
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.scope import Bound, Definition, Scope
from kvdsl.sema.statics import Bounded, Part
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn

COUNTS = ("trigger", "slack", "max_drop")
PER_HEAD = ("budget", "measured", *COUNTS, "select.count")
"""Numbers of the IR that may differ between the KV heads of a layer, like the counts of `keep`."""

MAX_HEAD_SIZE = 256

SCORE, BUDGET, WEIGHT = "a score", "the budget", "the weight of a layer"
RANKS, WEIGHS = "what `select` ranks by", "what `select` weighs by"
SELECTION = (RANKS, SELECTED, WEIGHS)
"""Names of values in messages; what a value may read depends on its name."""

_BLOCKS = {"storage": ("block", "storage blocks 16"), "prefill": ("prefill_block", "prefill blocks of 512")}


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


class Statements:
    """Checks the statements of one policy.

    Args:
        scope: returns the scope of a statement.
    """

    def __init__(
        self, flat: FlatPolicy, params: Params, expressions: Expressions, scope: Callable[[Placed], Scope], sink: Sink
    ) -> None:
        self.flat, self.params, self.expressions, self.scope, self.sink = flat, params, expressions, scope, sink
        self.parts = Parts()

    def check(self) -> Parts:
        """Check all statements."""
        if "pages" in self.flat.settings:
            self._pages(self.flat.settings["pages"][-1])
        self._budget()
        for keyword in self.flat.settings:
            placed = self.flat.settings[keyword][-1]
            match placed.statement:
                case syn.Select() as statement:
                    self._select(statement, placed)
                case syn.Sketch() as statement:
                    self._sketch(statement, placed)
                case syn.Layers(range=layers):
                    self._range("layers", "`layers`", layers, placed)
                case syn.Setting() as statement:
                    self._setting(statement, placed)
        for keyword, known in syn.WORDS.items():
            self.parts.words.setdefault(keyword, known[0])
        self.parts.keeps = [keep for placed in self.flat.keeps if (keep := self._keep(placed)) is not None]
        self._pages_of_keys()
        return self.parts

    # -- what statements are made of ---------------------------------------------------------------------------------

    def _value(self, node: syn.Expr, placed: Placed, what: str) -> Value | None:
        """Return an expression per slot or dim, or None after a report."""
        value = self.expressions.check(node, self.scope(placed))
        return value if value is not None and self._may_read(value, node.span, what) else None

    def _may_read(self, value: Value, span: Span, what: str) -> bool:
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

    def _orders_slots(self, value: Value, span: Span, what: str) -> bool:
        """Return whether slots can be ranked by a value, and its reductions over queries remembered; report it otherwise."""
        return self._remembers_numbers(value) and is_per_slot(value, span, what, self.sink)

    def _number(self, name: str, node: syn.Expr, placed: Placed, what: str, low: float = 0, high: float = math.inf) -> None:
        """Add a number and its bounds to a field of the IR."""
        part = self._part(node, placed, what, per_head=name in PER_HEAD)
        if part is not None:
            self.parts.exprs[name] = part
            self.parts.bounded.append(Bounded(what, part, low, high, counts=name in COUNTS))

    def _part(self, node: syn.Expr, placed: Placed, what: str, *, per_head: bool = False) -> Part | None:
        value = self.expressions.check(node, self.scope(placed))
        is_number = value is not None and is_fixed(value, node.span, what, self.sink.report, per_head=per_head)
        return Part(value.expr, node.span) if value is not None and is_number else None

    def _range(self, name: str, what: str, range_: syn.Range, placed: Placed) -> None:
        """Add the ends of a range of layers, which may not depend on the layer or the row."""
        for end, node in (("low", range_.low), ("high", range_.high)):
            if node is not None:
                last = f"the {'first' if end == 'low' else 'last'} layer of {what}"
                self._layer(f"{name}.{end}", node, placed, f"the range of {what}", last)

    def _layer(self, name: str, node: syn.Expr, placed: Placed, what: str, bounded: str) -> None:
        """Add a layer's number to a field of the IR; messages call it `what`, or `bounded`."""
        part = self._part(node, placed, what)
        if part is None:
            return
        varying = sorted(self.params.inputs_of(part.expr) - {"layers"})
        if varying:
            message = f"{what} cannot depend on `{varying[0]}`"
            self.sink.report(codes.NOT_HERE, part.span, message, "it can read `layers`, and params that do not depend on it")
            return
        self.parts.exprs[name] = part
        self.parts.bounded.append(Bounded(bounded, part))

    # -- single statements -------------------------------------------------------------------------------------------

    def _setting(self, statement: syn.Setting, placed: Placed) -> None:
        keyword = statement.keyword
        if statement.word is not None:
            self._word(keyword, statement.word, statement.value, placed)
        elif statement.value is not None and keyword == "score":
            self._score(statement.value, placed)
        elif statement.value is not None:
            self._number(keyword, statement.value, placed, f"`{keyword}`")

    def _word(self, keyword: str, word: syn.Word, value: syn.Expr | None, placed: Placed) -> None:
        known = syn.WORDS[keyword]
        self.parts.words[keyword] = word.text
        if word.text not in known:
            meant = habits.SETTINGS.get(keyword, {}).get(word.text)
            help = did_you_mean(word.text, known) if meant is None else offer(f"write `{meant}`")
            help = help or both(f"`{keyword}` is ", offer(listed(known)))
            self.sink.report(codes.OPTION, word.span, f"`{keyword}` cannot be `{word.text}`", help)
        elif word.text == "blocks" and value is None:
            help = offer(f"for example `{_BLOCKS[keyword][1]}`", at=placed.statement.span)
            self.sink.report(codes.BLOCKS, word.span, f"`{keyword} blocks` needs the number of tokens in a block", help)
        elif keyword == "when" and value is not None:
            self.parts.words["prefill"] = "blocks"
            self._number("prefill_block", value, placed, "the size of a prompt's blocks", 1)
        elif word.text == "blocks" and value is not None:
            self._number(_BLOCKS[keyword][0], value, placed, f"the size of `{keyword} blocks`", 1)
        elif value is not None:
            message = f"`{keyword} {word.text}` takes no number"
            help = offer(f"did you mean `{_BLOCKS[keyword][1]}`?", at=placed.statement.span)
            self.sink.report(codes.BLOCKS, value.span, message, help)

    def _budget(self) -> None:
        """Evaluate the `budget` statements from the base on, or without any the param `budget`."""
        value = values.read_param("budget") if "budget" in self.flat.names else None
        span = self.flat.names["budget"].statement.span if value is not None else None
        measured: Value | None = None
        most: Part | None = None
        for placed in self.flat.settings.get("budget", []):
            statement = cast(syn.Budget, placed.statement)
            names: dict[str, Definition] = {} if value is None else {"budget": Bound(value)}
            span = statement.value.span
            found = self._bounded_budget(statement, Scope(names, self.scope(placed)))
            if found is None:
                self.flat.broken.add("budget")
                return
            measured, value, most = found
            for name in ("across", "across_layers.by", "across_layers.floor"):
                self.parts.exprs.pop(name, None)
            if statement.across is not None:
                self._across("across", statement.across, placed)
            if statement.across_layers is not None:
                self._across_layers(statement.across_layers, placed)
        if value is not None and span is not None:
            checked = self.params.checked.get("budget")
            is_param = not self.flat.settings.get("budget")
            self.parts.exprs["budget"] = Part(value.expr, checked.span if is_param and checked is not None else span)
            if measured is not None:
                self.parts.exprs["measured"] = Part(measured.expr, span)
                self.parts.exprs["budget"] = most or Part(ir.Input(name="everything"), span)

    def _bounded_budget(self, statement: syn.Budget, scope: Scope) -> tuple[Value | None, Value, Part | None] | None:
        """Return a budget's data-dependent value if it has one, the tokens it keeps, and its `at most`. None after a report."""
        span = statement.value.span
        value = self.expressions.check(statement.value, scope)
        most = None if statement.most is None else self.expressions.check(statement.most, scope)
        if value is None or (most is None) != (statement.most is None):
            return None
        measured = value if reads_data(value.expr) else None
        if not (self._is_budget(value, span) if measured is None else self._is_measured(measured, span)):
            return None
        if measured is not None and statement.most is None and (bounded := _bounded(measured)) is not None:
            return bounded[0], value, Part(bounded[1], span)
        if most is None or statement.most is None:
            return measured, value, None
        if not self._is_budget(most, statement.most.span):
            return None
        return measured, values.call("min", value, most), Part(most.expr, statement.most.span)

    def _is_measured(self, value: Value, span: Span) -> bool:
        """Return whether a data-dependent value can be a budget; report it otherwise."""
        if "budget" in self.params.inputs_of(value.expr):
            self._is_cyclic(span)
            return False
        return (
            self._may_read(value, span, BUDGET)
            and is_measured(value, span, BUDGET, self.sink.report)
            and self._remembers_numbers(value)
        )

    def _remembers_numbers(self, value: Value) -> bool:
        """Return whether a value's reductions over queries can be remembered; report them otherwise."""
        vectors = [report for expr, report in self.expressions.vectors.items() if expr in walk(value.expr)]
        for report in vectors[:1]:
            report()
        return not vectors

    def _is_budget(self, value: Value, span: Span) -> bool:
        if not is_fixed(value, span, BUDGET, self.sink.report, per_head=True):
            return False
        if "budget" in self.params.inputs_of(value.expr):
            self._is_cyclic(span)
            return False
        return True

    def _is_cyclic(self, span: Span) -> None:
        has_param = "budget" in self.flat.names
        help = (
            "only in this line `budget` means the param: inline the `let` or param that reads `budget`"
            if has_param
            else None
        )
        help = help or "add `param budget = 512` and read that: only in this line `budget` means the param"
        self.sink.report(codes.BUDGET_CYCLE, span, "the budget is computed from itself", help)

    def _across(self, name: str, across: syn.Across | syn.AcrossLayers, placed: Placed) -> None:
        """Add the floor of heads or layers that share a budget."""
        if across.floor is None:
            self.parts.exprs[name] = Part(ir.Number(value=0), across.span)
        else:
            self._number(name, across.floor, placed, "the floor", 0, 1)

    def _across_layers(self, across: syn.AcrossLayers, placed: Placed) -> None:
        self._across("across_layers.floor", across, placed)
        if across.by is None:
            return
        value = self._value(across.by, placed, WEIGHT)
        if value is None:
            self.flat.broken.add("budget")
        elif weighs_a_layer(value, across.by.span, self.sink):
            self.parts.exprs["across_layers.by"] = Part(value.expr, across.by.span)

    def _score(self, node: syn.Expr, placed: Placed) -> None:
        value = self._value(node, placed, SCORE)
        mean = None if value is None else _mean_over_heads(value)
        if value is not None and mean is not None and not {"across", "across_layers.floor"} & self.parts.exprs.keys():
            self.parts.words["victims"] = "heads"
            value = replace(value, expr=mean.body)
        if value is not None and self._orders_slots(value, node.span, SCORE):
            self.parts.exprs["score"] = Part(value.expr, node.span)
        else:
            self.flat.broken.add("score")

    def _select(self, statement: syn.Select, placed: Placed) -> None:
        if statement.count is not None:
            self._select_count(statement.count, placed)
        value = self._value(statement.by, placed, RANKS)
        if (
            value is not None
            and selects(value, statement.by.span, self.sink, RANKS)
            and (statement.count is not None or self._holds_of_slots(value, statement.by.span))
        ):
            self.parts.exprs["select.by"] = Part(value.expr, statement.by.span)
            if statement.count is None:
                self.parts.exprs["select.count"] = Part(ir.Input(name="everything"), statement.by.span)
        if statement.weight is not None:
            self._select_weight(statement.weight, placed)
        if statement.range is not None:
            self._range("select", "`select`", statement.range, placed)
        for index, node in enumerate(statement.choosing):
            self._layer(
                f"select.choosing.{index}", node, placed, "a layer that chooses", "a layer that chooses for those above"
            )

    def _holds_of_slots(self, value: Value, span: Span) -> bool:
        """Return whether `select where` can use a value; report it otherwise."""
        return self.expressions.condition(value, span, "`select where`") and self._asks_no_heads(
            value, span, "`select where`"
        )

    def _asks_no_heads(self, value: Value, span: Span, what: str) -> bool:
        if reads_heads(value.expr):
            message = f"{what} is for the tokens of one KV head, and cannot read `over heads`"
            self.sink.report(codes.ACROSS, span, message, "write `select top N by ...`, with which heads choose together")
            return False
        return True

    def _select_weight(self, node: syn.Expr, placed: Placed) -> None:
        value = self._value(node, placed, WEIGHS)
        if (
            value is None
            or not selects(value, node.span, self.sink, WEIGHS)
            or not self._asks_no_heads(value, node.span, WEIGHS)
        ):
            return
        self.parts.exprs["select.weight"] = Part(value.expr, node.span)

    def _select_count(self, node: syn.Expr, placed: Placed) -> None:
        """Add the number of selected tokens: fixed, or computed by each query."""
        value = self.expressions.check(node, self.scope(placed))
        if value is None or not reads_data(value.expr):
            self._number("select.count", node, placed, SELECTED, 1)
        elif self._may_read(value, node.span, SELECTED) and self._asks_ahead(value, node.span, SELECTED):
            self.parts.exprs["select.measured"] = Part(value.expr, node.span)
            self.parts.exprs["select.count"] = Part(ir.Input(name="everything"), node.span)

    def _asks_ahead(self, value: Value, span: Span, what: str) -> bool:
        """Return whether a query can compute a count before it attends; report it otherwise."""
        return not looks_back(value, span, what, self.sink) and is_measured(
            replace(value, axes=value.axes - {ir.Axis.QUERY}), span, what, self.sink.report
        )

    def _sketch(self, statement: syn.Sketch, placed: Placed) -> None:
        self._number("sketch.count", statement.count, placed, "the count of `sketch`", 1, MAX_HEAD_SIZE)
        self._number("sketch.every", statement.every, placed, "the interval of `sketch`", 1)
        value = self._value(statement.by, placed, "what `sketch` ranks by")
        if value is not None and value.spaces - {""}:
            self.expressions.reductions.mixed(statement.by.span, value)
        elif value is not None and sketches(value, statement.by.span, self.sink):
            self.parts.exprs["sketch.by"] = Part(value.expr, statement.by.span)

    def _pages(self, placed: Placed) -> None:
        statement = cast(syn.Pages, placed.statement)
        self._number("pages", statement.value, placed, "`pages`", 1)
        if statement.after is not None:
            self._number("pages_after", statement.after, placed, "the beginning of `pages`")
        size, after = (self.parts.expr(name) for name in ("pages", "pages_after"))
        self.expressions.ranges.pages = None if size is None else (size, after)

    def _pages_of_keys(self) -> None:
        """Add the pages that ranges use, if no statement defines them."""
        if self.expressions.ranges.pages is None or self.expressions.ranges.pages_span is None:
            return
        span = self.expressions.ranges.pages_span
        for name, expr, least in zip(("pages", "pages_after"), self.expressions.ranges.pages, (1, 0), strict=True):
            if expr is not None:
                self.parts.exprs[name] = Part(expr, span)
                self.parts.bounded.append(
                    Bounded("the size of a page" if least else "the first page's beginning", Part(expr, span), least)
                )

    # -- keeps -------------------------------------------------------------------------------------------------------

    def _keep(self, placed: Placed) -> CheckedKeep | None:
        statement = cast(syn.Keep, placed.statement)
        scope = cast(Literal["first", "last", "top", "where"], statement.scope)
        count = by = None
        if statement.count is not None:
            count = self._part(statement.count, placed, f"the count of `keep {scope}`", per_head=True)
        if statement.by is not None:
            by = self._keep_by(statement.by, placed, scope)
        if (statement.count is not None and count is None) or (statement.by is not None and by is None):
            return None
        if count is not None:
            self.parts.bounded.append(Bounded(f"`keep {scope}`", count, counts=True))
        keep = ir.Keep(scope=scope, count=None if count is None else count.expr, by=None if by is None else by.expr)
        return CheckedKeep(keep, count, by, statement.span)

    def _keep_by(self, node: syn.Expr, placed: Placed, scope: str) -> Part | None:
        what = "what `keep top` ranks by" if scope == "top" else "a condition on slots"
        value = self._value(node, placed, what)
        if value is None or (scope == "where" and not self.expressions.condition(value, node.span, "`keep where`")):
            return None
        return Part(value.expr, node.span) if self._orders_slots(value, node.span, what) else None


def _mean_over_heads(value: Value) -> ir.Reduce | None:
    """Return a score that is a mean over heads, so that all KV heads of a layer evict the same tokens; None for others."""
    match value.expr:
        case ir.Reduce(op="mean", axis=ir.Axis.HEAD, where=None) as mean if ir.Axis.SLOT in value.axes:
            return mean
    return None


def _bounded(measured: Value) -> tuple[Value, ir.Expr] | None:
    """Split `min(x, n)`, where only x depends on the data, into both; None for other values."""
    expr = measured.expr
    if not ir.is_call(expr, "min"):
        return None
    for value, most in (expr.args, expr.args[::-1]):
        if reads_data(value) and not reads_data(most):
            return replace(measured, expr=value), most
    return None
