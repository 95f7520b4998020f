"""Check built-in functions that are neither elementwise nor reductions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.helps import instead, offer, operand
from kvdsl.ir.nodes import PREVIOUS, Axis, Expr, Fold, Input, is_call, is_reduction
from kvdsl.ir.ops import FARTHEST, FIXED, MOST_STEPS, POOLS
from kvdsl.ir.visitors import children, has, walk
from kvdsl.sema import values
from kvdsl.sema.arguments import example, how_to_call, no_argument, over_without_reduction, takes
from kvdsl.sema.needs import compares_slots, is_fixed, of_query_heads_at_once, reads_heads, reads_text
from kvdsl.sema.ranges import Ranges
from kvdsl.sema.reductions import Over, Reductions, over_queries
from kvdsl.sema.scope import Bound, Scope, TensorName
from kvdsl.sema.statics import Bounded, Part
from kvdsl.sema.uses import Uses
from kvdsl.sema.values import NO_SPACES, Value, extent
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


class Forms(ABC):
    """Checks of the calls in `FORMS`, with what all calls have in common.

    Attributes:
        bounded: numbers inside expressions, whose bounds are checked once the params are known.
    """

    def __init__(self, sink: Sink) -> None:
        self.uses = Uses(sink)
        self._report = self.uses.report
        self.reductions = Reductions(self._report)
        self.ranges = Ranges(self.uses, self.reductions, self.check, self._fixed, self.condition)
        self.bounded: list[Bounded] = []

    @abstractmethod
    def check(self, node: syn.Expr, scope: Scope) -> Value | None:
        """Return the value of an expression, or None after a report."""

    @abstractmethod
    def condition(self, value: Value, span: Span, what: str) -> bool:
        """Return whether a value is a condition, as `what` needs; report it otherwise."""

    def _arguments(self, node: syn.Call, count: int, scope: Scope) -> list[Value | None] | None:
        """Return the values of `count` arguments; None after a report of another count."""
        name, found = node.function.text, len(node.arguments)
        if not self._plain(name, node.arguments):
            return None
        if found != count:
            fewer = ", ".join(argument.value.span.quoted() for argument in node.arguments[:count])
            help = offer(f"write `{name}({fewer})`") if found > count else example(name)
            self._report(codes.ARGUMENTS, node.span, takes(name, str(count), found), help)
            return None
        return [self.check(argument.value, scope) for argument in node.arguments]

    def _plain(self, name: str, arguments: Iterable[syn.Argument]) -> bool:
        """Return whether arguments have neither names nor a range; report them otherwise."""
        for argument in arguments:
            if argument.keyword is not None:
                no_argument(name, argument.keyword, (), self._report)
                return False
            if argument.ranges is not None:
                over_without_reduction(name, argument.ranges, self._report)
                return False
        return True

    def _called(self, node: syn.Call, *counts: int) -> bool:
        """Return whether a call has one of these numbers of plain arguments; report it otherwise."""
        name, found = node.function.text, len(node.arguments)
        if not self._plain(name, node.arguments):
            return False
        if found in counts:
            return True
        self._report(codes.ARGUMENTS, node.span, takes(name, " or ".join(map(str, counts)), found), example(name))
        return False

    def _fixed(self, node: syn.Expr, scope: Scope, what: str, low: float = 0, high: float = math.inf) -> Value | None:
        """Return a number that is fixed once the prompt is known. Its bounds are checked once params are known."""
        value = self.check(node, scope)
        if value is None or not is_fixed(value, node.span, what, self._report):
            return None
        self.bounded.append(Bounded(what, Part(value.expr, self.uses.place(node.span)), low, high))
        return value

    def _without_arguments(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        if not node.arguments:
            return values.read_input("observed") if name == "count" else values.call("random")
        help = None
        if name == "count":
            text = node.arguments[0].value.span.quoted()
            help = offer(f"to count the queries for which a condition holds, sum it: `sum({text})`")
        self._report(codes.ARGUMENTS, node.span, f"`{name}()` takes no arguments", help)
        return None

    def _project(self, node: syn.Call, scope: Scope) -> Value | None:
        """Check `project(x, basis)`, where x has the dims of keys."""
        if not self._called(node, 2):
            return None
        (vector, matrix) = (argument.value for argument in node.arguments)
        body, definition = self.check(vector, scope), scope.find(matrix.name) if isinstance(matrix, syn.Name) else None
        if not isinstance(definition, TensorName) or "rank" not in definition.tensor.axes:
            message = f"`project` takes a tensor with the axes `dims` and `rank`, which `{matrix.span.quoted()}` is not"
            help = 'for example `tensor basis [layers, heads, dims, rank] from "basis.safetensors"`'
            self._report(codes.PROJECT, matrix.span, message, help)
            return None
        definition.used = True
        if body is None or self.reductions.is_of_other(node, body):
            return None
        if body.spaces != {""} or _of_values(body.expr):
            message = f"`project` takes a vector over the dims of a key, but `{vector.span.quoted()}` is not one"
            help = offer(f"for example `project(k, {definition.tensor.name})`", at=node.span)
            self._report(codes.PROJECT, vector.span, message, help)
            return None
        return values.project(body, definition.tensor)

    def _rotate(self, node: syn.Call, scope: Scope) -> Value | None:
        """Check `turn(x, n)`, `ahead(x, n)`, `ahead(x, n, factor)` and `pairs(x)`, where x has the dims of keys."""
        op = node.function.text
        if not self._called(node, *{"turn": (2,), "ahead": (2, 3), "pairs": (1,)}[op]):
            return None
        vector, *rest = (argument.value for argument in node.arguments)
        body = self.check(vector, scope)
        if op == "turn":
            numbers = [self.check(part, scope) for part in rest]
        else:
            bounds = (
                ("how far `ahead` looks", 1, FARTHEST if len(rest) < 2 else MOST_STEPS),
                ("the factor of `ahead`", 1, 16),
            )
            numbers = [self._fixed(part, scope, *bound) for part, bound in zip(rest, bounds, strict=False)]
        if body is None or any(one is None for one in numbers):
            return None
        if any(self.reductions.is_of_other(node, one) for one in (body, *numbers) if one is not None):
            return None
        if body.spaces != {""} or _of_values(body.expr):
            message = f"`{op}` rotates a vector over the dims of a key, but `{vector.span.quoted()}` is not one"
            self._report(codes.ROTATE, vector.span, message, instead(f"for example `{op}(k{', ...' if rest else ''})`", "k"))
            return None
        if op == "turn" and numbers[0] is not None and Axis.DIM in numbers[0].axes:
            message = f"`turn` rotates all dims by the same number of positions, but `{rest[0].span.quoted()}` {extent(numbers[0].axes)}"
            self._report(codes.ROTATE, rest[0].span, message)
            return None
        return values.call(op, body, *(one for one in numbers if one is not None))

    def _leverage(self, node: syn.Call, scope: Scope) -> Value | None:
        if not self._called(node, 2):
            return None
        body = self.check(node.arguments[0].value, scope)
        ridge = self._fixed(node.arguments[1].value, scope, "the ridge of `leverage`")
        if body is None or ridge is None or self.reductions.is_of_other(node, body):
            return None
        span = node.arguments[0].value.span
        if body.pools:
            self.reductions.pooled(node, "`leverage(...)`")
        elif body.axes != {Axis.SLOT, Axis.DIM}:
            message = f"`leverage` takes a vector of each slot, but `{span.quoted()}` {extent(body.axes)}"
            self._report(codes.REDUCTION, span, message, instead("for example `leverage(k, 0.01)`", "k"))
        else:
            return replace(values.call("leverage", body, ridge), spaces=NO_SPACES)
        return None

    def _other(self, node: syn.Call, scope: Scope) -> Value | None:
        body = next(iter(self._arguments(node, 1, scope) or [None]))
        return None if body is None else self.reductions.other(node.arguments[0].value.span, body, "other({})", node.span)

    def _rank(self, node: syn.Call, scope: Scope) -> Value | None:
        if len(node.arguments) != 1 or node.arguments[0].keyword is not None:
            self._report(codes.ARGUMENTS, node.span, "`rank` orders by exactly one value", example("rank"))
            return None
        over, inner = self.ranges.of(node.arguments[0], scope, Over(Axis.SLOT))
        body = self.check(node.arguments[0].value, inner)
        if over is not None and body is not None:
            over, body = self.ranges.with_pages(node, over, body)
        if over is None or body is None:
            return None
        text, span = node.arguments[0].value.span.quoted(), node.arguments[0].value.span
        if over.axis not in (Axis.SLOT, Axis.HEAD) or over.within == "next":
            self._report(
                codes.ARGUMENTS,
                node.span,
                "`rank` is a place among slots, or among those of a page, or of all KV heads of the layer",
                offer(f"write `rank({text})`"),
            )
        elif self.reductions.is_of_other(node, body):
            pass
        elif Axis.SLOT not in body.axes or Axis.DIM in body.axes:
            new = f"rank(sum({text} over dims))"
            help = offer(f"reduce it over dims: `{new}`", at=node.span) if {Axis.SLOT, Axis.DIM} <= body.axes else None
            self._report(codes.RANK, span, f"`rank` orders slots by one number each, but `{text}` {extent(body.axes)}", help)
        elif over.within == "page" and Axis.QUERY in body.axes:
            self.reductions.page_of_query(span, body, f"rank(sum({text}) over page)", node.span)
        elif over.where is not None:
            only, ranges = node.arguments[0].only, node.arguments[0].over
            chosen = f"where({'' if only is None else only.span.quoted()}, {text}, -1e30)"
            help = offer(f"write `rank({chosen}{'' if ranges is None else f' {ranges.span.quoted()}'})`", ", say")
            self._report(codes.ARGUMENTS, node.span, "`rank` takes no `where`", help)
        elif self.reductions.fits_key(node, over, body):
            within: Literal["all", "page", "heads"] = (
                "heads" if over.axis is Axis.HEAD else "page" if over.within == "page" else "all"
            )
            return values.rank(body, within, over.by)
        return None

    def _enough(self, node: syn.Call, scope: Scope) -> Value | None:
        """Check `enough(x, p)`, and with another order `enough(x, p, y)`."""
        if not self._called(node, 2, 3):
            return None
        body = self.check(node.arguments[0].value, scope)
        share = self._fixed(node.arguments[1].value, scope, "the share of `enough`", 0, 1)
        by = self.check(node.arguments[2].value, scope) if len(node.arguments) == 3 else body
        if body is None or share is None or by is None:
            return None
        for value, argument in ((body, node.arguments[0]), (by, node.arguments[-1])):
            span = argument.value.span
            if self.reductions.is_of_other(node, value):
                return None
            if value.pools:
                self.reductions.pooled(node, "`enough(...)`")
                return None
            if Axis.SLOT not in value.axes or Axis.DIM in value.axes:
                message = f"`enough` needs one number per slot, but `{span.quoted()}` {extent(value.axes)}"
                help = offer(f"reduce it over dims: `sum({span.quoted()} over dims)`") if Axis.DIM in value.axes else None
                self._report(codes.REDUCTION, span, message, help)
                return None
        return values.call("enough", body, share, by)

    def _fold(self, node: syn.Call, scope: Scope) -> Value | None:
        if len(node.arguments) != 2 or node.arguments[0].keyword is not None:
            message = "`fold` takes two arguments: the next value, in terms of `prev`, and the first one"
            self._report(codes.ARGUMENTS, node.span, message, example("fold"))
            return None
        if not self._plain("fold", node.arguments[1:]):
            return None
        over = node.arguments[0].over
        body = self.check(node.arguments[0].value, Scope({"prev": Bound(values.read_input("prev"))}, scope))
        start = self.check(node.arguments[1].value, scope)
        if body is None or start is None:
            return None
        span, text = node.arguments[0].value.span, node.arguments[0].value.span.quoted()
        word = "queries" if over is None else over.axis.text
        allowed = {Axis.SLOT} if word == "prunes" else {Axis.QUERY, Axis.SLOT}
        if word not in ("queries", "prunes") or (over is not None and (over.last is not None or over.after is not None)):
            assert over is not None
            start_text = node.arguments[1].value.span.quoted()
            of_prunes = "" if Axis.QUERY in body.axes else " over prunes"
            help = offer(f"write `fold({text}{of_prunes}, {start_text})`", at=node.span)
            self._report(codes.AXIS, over.span, "a fold ranges over queries or prunes", help)
        elif not _reads_previous(body.expr):
            newest: str = f"`last({text})` is the newest one"
            newest = newest if body.observes else instead(newest, f"last({text})", node.span)
            mend = newest if Axis.QUERY in body.axes else instead("leave the fold out", operand(text), node.span)
            self._report(codes.ARGUMENTS, span, f"a fold continues from `prev`, which `{text}` does not read", mend)
        elif self.reductions.is_of_other(node, body):
            pass
        elif not body.axes <= allowed:
            by = "prune" if word == "prunes" else "query"
            reduced = (
                offer(f"reduce it over dims: `sum({text} over dims)`")
                if Axis.DIM in body.axes
                else "reduce the part that varies over queries"
            )
            self._report(
                codes.REDUCTION, span, f"a fold has one number per slot and {by}, but `{text}` {extent(body.axes)}", reduced
            )
        elif word == "prunes" and of_query_heads_at_once(body.expr):
            message = "a fold over prunes belongs to a KV head, and cannot read a tensor with one value per query head"
            self._report(codes.NOT_HERE, span, message)
        elif reads_text(body.expr) or (word == "queries" and any(map(_of_many_queries, walk(body.expr)))):
            message = "a fold runs query by query, so it cannot contain a reduction over all queries, only another fold over queries"
            self._report(codes.NESTED, span, message)
        elif any(over_queries(part) and _reads_previous(part) for part in walk(body.expr)):
            message = "`prev` of a fold over prunes belongs to no query, and cannot stand in a reduction over queries"
            self._report(codes.NESTED, span, message, "read `prev` outside of the reduction")
        elif has(body.expr, Fold, over="prunes"):
            self._report(codes.NESTED, span, "a fold over prunes cannot stand in another fold")
        elif word == "queries" and (compares := compares_slots(body.expr)) is not None:
            message = f"slots are compared when a step settles, so `{compares}` cannot stand in a fold over queries"
            self._report(codes.OTHERS, span, message, "read it outside the fold, or in a fold over prunes")
        elif body.pools:
            self.reductions.pooled(node, "a fold")
        elif reads_heads(body.expr):
            self._report(codes.ACROSS, span, "a fold belongs to the slots of one KV head, and cannot read `over heads`")
        elif not _is_start(start) and not (word == "queries" and _is_of_query(start)):
            where = node.arguments[1].value.span
            message = f"a fold starts with a value known when the token arrives, which `{where.quoted()}` is not"
            self._report(
                codes.NOT_HERE,
                where,
                message,
                "start with a number, `position`, a value of its key or value, or of the first query",
            )
        else:
            return values.fold_of(body, start, "prunes" if word == "prunes" else "queries")
        return None

    def _pool(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        constant = [isinstance(argument.value, syn.Constant) for argument in node.arguments]
        swapped = constant == [True, False]
        if len(node.arguments) != 2 or swapped or node.arguments[1].keyword is not None:
            message = f"`{name}` takes a value and a width"
            self._report(codes.ARGUMENTS, node.span, message, how_to_call(node))
            return None
        if not self._plain(name, node.arguments):
            return None
        body = self.check(node.arguments[0].value, scope)
        size = self._fixed(node.arguments[1].value, scope, f"the width of `{name}`", 1)
        if body is None or size is None or self.reductions.is_of_other(node, body):
            return None
        span = node.arguments[0].value.span
        if body.pools:
            self.reductions.pooled(node, "another one")
        elif body.axes != {Axis.SLOT}:
            message = f"`{name}` pools along the slots, but `{span.quoted()}` {extent(body.axes)}"
            whole = next((one for one in self.reductions.around[-1:] if one.arguments[0].span == node.span), None)
            by, at = ("sum", node.span) if whole is None else (whole.function.text, whole.span)
            pool = f"{name}({by}({span.quoted()}), {node.arguments[1].value.span.quoted()})"
            help = offer(f"reduce it over queries: `{pool}`", at=at)
            self._report(codes.POOL, span, message, help if Axis.QUERY in body.axes else None)
        else:
            return replace(values.call(name, body, size), pools=True)
        return None

    FORMS: ClassVar[Mapping[str, Callable[[Forms, syn.Call, Scope], Value | None]]] = {
        **dict.fromkeys(("count", "random"), _without_arguments),
        **dict.fromkeys(("turn", "ahead", "pairs"), _rotate),
        **dict.fromkeys(POOLS, _pool),
        "other": _other,
        "rank": _rank,
        "leverage": _leverage,
        "project": _project,
        "enough": _enough,
        "fold": _fold,
    }
    """Functions that are neither elementwise nor reductions."""


def _reads_previous(expr: Expr) -> bool:
    """Return whether the body of a fold reads its `prev`; a nested fold has its own."""
    return expr == PREVIOUS or (expr.kind != "fold" and any(map(_reads_previous, children(expr))))


def _of_many_queries(part: Expr) -> bool:
    return over_queries(part) or part == Input(name="observed")


def _is_start(start: Value) -> bool:
    """Return whether a value belongs to the token and never changes."""
    return start.axes <= {Axis.SLOT} and all(map(_stays, walk(start.expr)))


def _is_of_query(start: Value) -> bool:
    """Return whether one query gives each slot this value, as in the body of a fold."""
    plain = Axis.QUERY in start.axes and start.axes <= {Axis.QUERY, Axis.SLOT} and not start.pools
    whole = (_reads_previous, reads_text, reads_heads, compares_slots)
    return plain and not any(map(_of_many_queries, walk(start.expr))) and not any(reads(start.expr) for reads in whole)


def _stays(part: Expr) -> bool:
    """Return whether a node reads only what is known when the token arrives."""
    if part.kind == "reduce":
        return part.axis is Axis.DIM and part.within == "all"
    if part.kind == "input":
        return part.name in (*FIXED, "position", "k", "v")
    return part.kind not in ("fold", "rank") and not is_call(part, "random", "enough", *POOLS)


def _of_values(expr: Expr) -> bool:
    """Return whether an expression varies over the dims of values."""
    return expr == Input(name="v") or (not is_reduction(expr, Axis.DIM) and any(map(_of_values, children(expr))))
