"""Check what reductions and pools reduce."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvdsl import codes
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.helps import instead, leave_out, offer, operand
from kvdsl.ir.nodes import Axis, Call, Expr, Fold, Input, Rank, Reduce, Within, is_call, is_reduction
from kvdsl.ir.ops import POOLS, RANGES, REDUCTIONS, range_of
from kvdsl.ir.printer import print_expression
from kvdsl.ir.visitors import axes_of, walk
from kvdsl.passes.normal import conditions, is_another, of_the_other, same_key, together
from kvdsl.sema import values
from kvdsl.sema.needs import Report, compares_slots, differs_by_head, of_query_heads_at_once, reads_heads, reads_text
from kvdsl.sema.values import Value, axes_in_words, extent
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn

_AXES: dict[str, tuple[Axis, Within]] = {
    "queries": (Axis.QUERY, "all"),
    "slots": (Axis.SLOT, "all"),
    "dims": (Axis.DIM, "all"),
    "page": (Axis.SLOT, "page"),
    "next page": (Axis.SLOT, "next"),
    "sketch": (Axis.DIM, "sketch"),
    "others": (Axis.OTHER, "all"),
    "heads": (Axis.HEAD, "all"),
    "text": (Axis.QUERY, "text"),
}
_PLURAL = {Axis.QUERY: "queries", Axis.SLOT: "slots", Axis.DIM: "dims", Axis.OTHER: "others"}


@dataclass(frozen=True)
class Over:
    """The range of a reduction.

    Attributes:
        last: the N of `over last N queries`.
        after: the N of `over text after N`.
        where: the condition of `x where c`.
        by: the key of `x over slots by key`.
    """

    axis: Axis = Axis.QUERY
    within: Within = "all"
    last: Value | None = None
    after: Value | None = None
    where: Value | None = None
    by: Value | None = None

    @property
    def range(self) -> str:
        """The range's name in `kvdsl.ir.ops.RANGES`."""
        return range_of(self.axis, self.within, last=self.last is not None)


def in_fewer_words(over: Over, body: Value, is_page: Callable[[Expr], bool]) -> tuple[Over, Value]:
    """Rewrite a range over other slots as one over slots, by key or of the next page, if it means the same.

    Other ranges compare each slot with all others, or with all slots.
    """
    if over.axis is not Axis.OTHER or over.within != "self" or over.where is None:
        return over, body
    parts = conditions(over.where.expr)
    rest = [part for part in parts if not is_another(part)]
    if len(rest) < len(parts):
        return replace(over, within="all", where=_condition(over.where, rest)), body
    own = of_the_other(body.expr)
    for part in parts:
        found, rest = same_key(part), [other for other in parts if other is not part]
        filtered = [of_the_other(other) for other in rest]
        if found is None or own is None or None in filtered:
            continue
        key, ahead = found
        if ahead == 0 or (ahead == 1 and is_page(key)):
            where = _condition(over.where, [other for other in filtered if other is not None])
            by = Value(key, axes_of(key))
            made = replace(over, axis=Axis.SLOT, within="next" if ahead else "all", where=where, by=by)
            return made, replace(body, expr=own, axes=axes_of(own))
    return over, body


def _condition(where: Value, parts: list[Expr]) -> Value | None:
    """Join the parts of a condition again."""
    left = together(parts)
    return None if left is None else replace(where, expr=left, axes=axes_of(left))


@dataclass(frozen=True)
class Reductions:
    """Builds reductions and pools of checked values; those without meaning are reported and become None."""

    report: Report
    around: list[syn.Call] = field(default_factory=list)
    """The enclosing reductions, the innermost last."""

    def axis(self, over: syn.Over) -> Over | None:
        """Return the range of the word after `over`."""
        word = over.axis
        if word.text in _AXES:
            return Over(*_AXES[word.text])
        meant = habits.AXES.get(word.text)
        help = did_you_mean(word.text, _AXES) if meant is None else offer(f"write `{meant}`")
        if word.text in habits.APART:
            help = leave_out("leave it out: each row of a batch and each layer has its own values", over.span)
        help = help or f"the axes are {listed(_AXES, 'and')}"
        self.report(codes.AXIS, word.span, f"unknown axis `{word.text}`", help)
        return None

    def reduce(self, node: syn.Call, op: str, over: Over, body: Value, argument: Value | None = None) -> Value | None:
        """Build the reduction of a call, possibly with a second argument."""
        reduced = body if over.where is None else values.call("where", over.where, body, values.number(0))
        fits = self._fits_operator(node, op, over, reduced) and self._fits_body(node, op, over, reduced)
        if not fits or not self.fits_key(node, over, reduced):
            return None
        return values.reduce(op, over.axis, body, over.last, argument, over.within, over.after, over.where, over.by)

    def fits_key(self, node: syn.Call, over: Over, body: Value) -> bool:
        """Return whether slots can be grouped by a key and the body reduced by it; report them otherwise."""
        if over.by is None:
            return True
        span = node.arguments[0].value.span
        if over.axis is not Axis.SLOT or over.within != "all":
            message = (
                f"`by` gives every slot the value of the slots with its key, so `{node.function.text}` ranges over slots"
            )
            self.report(codes.KEY, node.span, message, "write `over slots` before `by`")
        elif over.by.axes != {Axis.SLOT}:
            message = f"a key is one number per slot, but `{print_expression(over.by.expr)}` {extent(over.by.axes)}"
            key, more = node.arguments[0].key, ", say: groups of 16 tokens in the order of the text"
            self.report(
                codes.KEY, node.span, message, offer("a key is `page(16)`", more, at=None if key is None else key.span)
            )
        elif over.by.pools:
            self.pooled(node, "a key")
        elif Axis.QUERY in body.axes:
            message = f"`by` needs a value that does not depend on the query, but `{span.quoted()}` {extent(body.axes)}"
            self.report(codes.KEY, span, message, offer(f"reduce it over queries: `sum({span.quoted()})`, say"))
        elif reads_heads(body.expr) or any(map(_of_query_heads, (body.expr, over.by.expr))):
            self.report(codes.KEY, span, "slots are grouped per KV head, so `by` cannot read values per query head")
        else:
            return True
        return False

    def _fits_operator(self, node: syn.Call, op: str, over: Over, body: Value) -> bool:
        if over.where is not None and (REDUCTIONS[op].argument or op in ("last", "median")):
            text = node.arguments[0].value.span.quoted()
            help = (
                f"`fold(where(c, {text}, prev), 0)` remembers the newest value for which c holds" if op == "last" else None
            )
            self.report(codes.ARGUMENTS, node.span, f"`{op}` takes no `where`", help)
            return False
        ranges = REDUCTIONS[op].over
        if over.range in ranges:
            return True
        if over.range == "history":
            text = node.span.quoted()
            others = [f"{other}{text[len(op) :]}" for other in ("mean", "sum")] if op == "last" else []
            others = [f"{op}({', '.join(one.value.span.quoted() for one in node.arguments)})", *others]
            help = offer(f"write {listed(others)}")
            self.report(codes.ARGUMENTS, node.span, f"`{op}` cannot range over the last queries only", help)
        elif over.range == "queries":
            text, *rest = (argument.value.span.quoted() for argument in node.arguments)
            message = f"`{op}` over all queries cannot be updated with one number per token"
            made = ", ".join([f"{text} over last 32 queries", *rest])
            self.report(codes.ARGUMENTS, node.span, message, offer(f"write `{op}({made})`", ", say"))
        else:
            only = " and ".join(RANGES[name].removeprefix("over ") for name in ranges)
            text, *rest = (one.value.span.quoted() for one in node.arguments)
            of = {"queries": "", "history": " over last 32 queries"}.get(ranges[0], f" over {ranges[0]}")
            made = offer(f"write `{op}({', '.join([text + of, *rest])})`")
            fits = (Axis.SLOT if ranges[0] == "slots" else Axis.QUERY) in body.axes and Axis.OTHER not in body.axes
            self.report(codes.ARGUMENTS, node.span, f"`{op}` reduces over {only} only", made if fits else _unreduced(node))
        return False

    def _fits_body(self, node: syn.Call, op: str, over: Over, body: Value) -> bool:
        span = node.arguments[0].value.span
        if over.axis not in (Axis.OTHER, Axis.DIM) and self.is_of_other(node, body):
            return False
        if over.axis is Axis.OTHER:
            return self._fits_others(node, op, body)
        if over.axis is Axis.QUERY and body.observes:
            self._nested(node, op)
        elif over.within == "text" and (reads := _not_of_text(body)) is not None:
            message = f"`over text` ranges over queries that never saw the slot, so it cannot read `{reads}`"
            logit = re.sub(r"\blogit\b", "dot(q, k) * scaling", span.quoted())
            help = instead("`logit` is `dot(q, k) * scaling`", logit) if reads in ("attn", "logit") else None
            self.report(codes.TEXT, span, message, help)
        elif over.axis is Axis.HEAD and (Axis.DIM in body.axes or not (_is_count(op, body) or differs_by_head(body.expr))):
            self._of_heads(node, body)
        elif over.axis not in body.axes and over.axis is not Axis.HEAD:
            self._no_axis(node, over.axis, body)
        elif over.axis is Axis.DIM and body.spaces != {""} and (len(body.spaces) > 1 or over.within == "sketch"):
            self.mixed(span, body)
        elif body.pools and over.range not in ("slots", "heads"):
            self.pooled(node, f"a reduction, as `{op}(...)` is one")
        elif over.axis is Axis.QUERY and (compares := compares_slots(body.expr)) is not None:
            message = f"slots are compared in a settle, not for every query, so `{compares}` cannot stand in a reduction over queries"
            self.report(codes.OTHERS, span, message, "move it out of the reduction")
        elif over.axis in (Axis.QUERY, Axis.DIM) and reads_heads(body.expr):
            message = (
                "`over heads` is known once the prompt is there, so it cannot stand in a reduction over queries or dims"
            )
            self.report(codes.ACROSS, span, message, "reduce over slots, or move it out of the reduction")
        elif over.within in ("page", "next") and Axis.QUERY in body.axes:
            self.page_of_query(span, body, f"{op}(sum({span.quoted()}) over page)", node.span)
        elif over.within in ("page", "next") and any(is_call(part, "random") for part in walk(body.expr)):
            message = "`random()` cannot be reduced over pages"
            self.report(codes.RANDOM, span, message, "move it out of the reduction")
        else:
            return True
        return False

    def _fits_others(self, node: syn.Call, op: str, body: Value) -> bool:
        """Return whether `over others` can reduce a body: a value of two slots that depends on no query; report it otherwise."""
        span, text = node.arguments[0].value.span, node.arguments[0].value.span.quoted()
        if Axis.QUERY in body.axes:
            message = f"slots are compared by values that do not depend on the query, but `{text}` {extent(body.axes)}"
            self.report(codes.OTHERS, span, message, "reduce the part that varies over queries")
        elif Axis.OTHER not in body.axes:
            message = f"`over others` compares a slot with each other slot, but `{text}` reads no other slot"
            help = (
                offer(f"`other({text})`", " is the value of the other slot") if Axis.SLOT in body.axes else _unreduced(node)
            )
            self.report(codes.OTHERS, span, message, help)
        elif body.pools:
            self.pooled(node, f"a reduction, as `{op}(...)` is one")
        elif of_query_heads_at_once(body.expr) or reads_text(body.expr):
            message = "slots are compared per KV head, so `over others` cannot read values per query head"
            self.report(codes.OTHERS, span, message)
        elif body.spaces != {""} and len(body.spaces) > 1:
            self.mixed(span, body)
        else:
            return True
        return False

    def other(self, span: Span, body: Value, written: str, at: Span) -> Value | None:
        """Return the other slot's value of a body at `span`. Helps at the place `at` write it as `written`, with `{}` for the body."""
        text = span.quoted()
        if Axis.OTHER in body.axes:
            self.report(codes.OTHERS, span, f"`{text}` already belongs to another slot", "reduce it first")
        elif Axis.QUERY in body.axes:
            message = f"only a value that does not depend on the query can be read of another slot, but `{text}` {extent(body.axes)}"
            help = f"reduce it over queries: `{written.format(f'mean({text})')}`"
            self.report(codes.OTHERS, span, message, offer(help, at=at) if Axis.DIM not in body.axes else None)
        elif Axis.SLOT not in body.axes:
            message = f"`{text}` is the same for all slots, so it cannot be read of another slot: it {extent(body.axes)}"
            self.report(codes.OTHERS, span, message, offer(f"write `{text}`", at=at))
        else:
            return values.other(body)
        return None

    def is_of_other(self, node: syn.Call, body: Value) -> bool:
        """Report a call on a value that reads another slot; return whether it does."""
        if Axis.OTHER not in body.axes:
            return False
        text = node.arguments[0].value.span.quoted()
        message = f"`{node.function.text}` cannot read another slot: only a reduction `over others` reads `other(...)`"
        self.report(
            codes.OTHERS,
            node.span,
            message,
            instead(f"reduce it first: `sum({text} over others)`", f"sum({text} over others)", node.arguments[0].value.span),
        )
        return True

    def page_of_query(self, span: Span, body: Value, instead: str, whole: Span) -> None:
        message = f"`over page` needs a value that does not depend on the query, but `{span.quoted()}` {extent(body.axes)}"
        help: str | None = f"`{instead}`, say" if Axis.DIM not in body.axes else None
        self.report(codes.PAGE, span, message, help if help is None or self.around else offer(help, at=whole))

    def mixed(self, span: Span, body: Value) -> None:
        """Report a value that mixes dims of keys and projected dims, or has projected dims where keys' are needed."""
        matrix = next(iter(sorted(body.spaces - {""})))
        message = f"`{span.quoted()}` has the dims of the projection `{matrix}`, not those of a key"
        if len(body.spaces) > 1:
            message = f"`{span.quoted()}` mixes the dims of the projection `{matrix}` with others"
        both = f"dot(project(q, {matrix}), project(k, {matrix}))"
        self.report(codes.PROJECT, span, message, f"for example `{both}`")

    def pooled(self, node: syn.Call, where: str) -> None:
        self.report(codes.POOL, node.span, f"a pool cannot stand inside {where}", "pool the score as a whole")

    def _nested(self, node: syn.Call, op: str) -> None:
        inner = _inner_reduction(node.arguments[0].value)
        body = node.arguments[0].value.span
        span = body if inner is None else inner.span
        help: str | None = "move the inner reduction out of the outer one"
        if inner is not None and span == body:
            over_slots = f", or over the slots `{op}({body.quoted()} over slots)`" if "slots" in REDUCTIONS[op].over else ""
            help = offer(f"one of them is enough: `{body.quoted()}`{over_slots}", at=node.span)
        message = f"a reduction over queries cannot stand inside `{op}(...)`, which is one as well"
        self.report(codes.NESTED, span, message, help)

    def _of_heads(self, node: syn.Call, body: Value) -> None:
        """Report a reduction over heads of something else than one number per head."""
        text = node.arguments[0].value.span.quoted()
        message, help = f"`{text}` is the same for all KV heads", _unreduced(node)
        if Axis.DIM in body.axes:
            message = f"`over heads` reduces numbers of KV heads, but `{text}` {extent(body.axes)}"
            help = offer(f"reduce it over dims first: `sum({text} over dims)`")
        self.report(codes.REDUCTION, node.arguments[0].value.span, message, help)

    def _no_axis(self, node: syn.Call, axis: Axis, body: Value) -> None:
        name = node.function.text
        if name == "dot":
            message = "`dot` multiplies and sums over dims, but neither of its arguments has any"
            self.report(codes.REDUCTION, node.span, message, offer("for example `dot(q, k)`"))
            return
        text = node.arguments[0].value.span.quoted()
        help = _unreduced(node)
        others = [_PLURAL[other] for other in (Axis.DIM, Axis.SLOT, Axis.QUERY) if other in body.axes]
        if others and others[0] in REDUCTIONS[name].over:
            call = f"{name}({text})" if others[0] == "queries" else f"{name}({text} over {others[0]})"
            help = offer(f"did you mean `{call}`?", at=node.span)
        message = f"`{text}` has no {_PLURAL[axis]} to reduce over: it is {axes_in_words(body.axes)}"
        self.report(codes.REDUCTION, node.arguments[0].value.span, message, help)


def vector(node: syn.Call, body: Value) -> tuple[str, str]:
    """Return the message and help for a reduction over queries whose body has dims."""
    text, *rest = (argument.value.span.quoted() for argument in node.arguments)
    message = f"a token can remember a number, not a vector, but `{text}` {extent(body.axes)}"
    inner = f"sum({text} over dims)" if Axis.SLOT in body.axes else f"dot({text}, k)"
    over = node.arguments[0].span.quoted().removeprefix(text)
    return message, offer(
        f"reduce it over dims first: `{node.function.text}({', '.join([inner + over, *rest])})`", at=node.span
    )


def _unreduced(node: syn.Call) -> str:
    """Return a help that removes a reduction."""
    return instead("leave the reduction out", operand(node.arguments[0].value.span.quoted()), node.span)


def _inner_reduction(node: syn.Expr) -> syn.Call | None:
    """Return the first reduction over queries in an expression."""
    if isinstance(node, syn.Call):
        name, over = node.function.text, node.arguments[0].over if node.arguments else None
        reduces = name == "count" or (name in REDUCTIONS and len(node.arguments) == 1 + bool(REDUCTIONS[name].argument))
        if reduces and (over is None or over.axis.text == "queries"):
            return node
    return next((found for found in map(_inner_reduction, syn.operands(node)) if found is not None), None)


def over_queries(part: Expr) -> bool:
    """Return whether a node reduces over queries."""
    return is_reduction(part, Axis.QUERY)


def _of_query_heads(expr: Expr) -> bool:
    """Return whether a settle finds one value per query head."""
    return of_query_heads_at_once(expr) or reads_text(expr)


def _not_of_text(body: Value) -> str | None:
    """Return what `over text` cannot read of its body; None if it can read all."""
    for part in walk(body.expr):
        match part:
            case Input(name="observed"):
                return "count()"
            case Input(name="attn" | "logit" | "seen" as name):
                return name
            case Call(op="random"):
                return "random()"
            case Call(op=op) if op in ("leverage", *POOLS):
                return op
            case Fold() | Rank():
                return part.kind
            case Reduce(within="page" | "next"):
                return "over page"
    return None


def _is_count(op: str, body: Value) -> bool:
    """Return whether a reduction over heads counts them: `sum(1 over heads)`."""
    return op == "sum" and body.expr.kind == "number"
