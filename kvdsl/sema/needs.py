"""What statements require of an expression: a fixed number, or one number per slot."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvdsl import codes
from kvdsl.diagnostics import Sink, listed
from kvdsl.helps import offer
from kvdsl.ir.nodes import Axis, Call, Expr, Fold, GivenRef, Input, Rank, Reduce, TensorRef, is_call, is_reduction
from kvdsl.ir.ops import FIXED, INPUTS, POOLS
from kvdsl.ir.printer import print_expression
from kvdsl.ir.visitors import axes_of, children, has, of_query_heads, parts_of, reads, walk
from kvdsl.sema.values import Value, axes_in_words, extent
from kvdsl.source import Span

SELECTED = "the count of `select`"
"""The count of `select` in messages."""

READS_TENSORS = "`budget`, the counts of `keep` and `select`, and what ranks tokens may differ between KV heads"

Report = Callable[..., None]
"""Takes a code, a place, a message and optionally a help, as `Sink.report` does."""


def is_fixed(value: Value, span: Span, what: str, report: Report, *, per_head: bool = False) -> bool:
    """Return whether a value is a single number that is fixed once the prompt is known; report it otherwise.

    Args:
        per_head: whether it may read tensors, and so differ between KV heads.
    """
    text, help = span.quoted(), f"it can read params, {listed(FIXED, 'and')}"
    if value.axes:
        message = f"{what} is a single number, but `{text}` has {axes_in_words(value.axes)}"
        report(codes.COUNT_AXES, span, message, help)
        return False
    for part in walk(value.expr):
        if part.kind in ("reduce", "given") or is_call(part, "enough", "random"):
            message = f"{what} cannot depend on what is cached, as `{text}` does"
            report(codes.NOT_HERE, span, message, help)
            return False
        if part.kind == "tensor" and not per_head:
            message = f"{what} is one number for all KV heads of a layer, but `{part.name}` has one for each"
            report(codes.NOT_HERE, span, message, f"{help}; {READS_TENSORS}")
            return False
        if part.kind == "input" and part.name not in FIXED:
            message = f"`{part.name}` changes from step to step, so {what} cannot read it"
            report(codes.NOT_HERE, span, message, help)
            return False
    return True


def reads_data(expr: Expr) -> bool:
    """Return whether a number depends on cached tokens, or on how much text was read."""
    changing = any(part.name not in FIXED for part in parts_of(expr, Input))
    return changing or has(expr, Reduce) or any(is_call(part, "enough", "random") for part in walk(expr))


def is_measured(value: Value, span: Span, what: str, report: Report) -> bool:
    """Return whether a value that depends on the data is a single number; report it otherwise."""
    text = span.quoted()
    if not value.axes:
        return True
    message = f"{what} is a single number, but `{text}` has {axes_in_words(value.axes)}"
    help = offer(f"count or add up the tokens: `sum({text} over slots)`") if value.axes == {Axis.SLOT} else None
    report(codes.COUNT_AXES, span, message, help)
    return False


def of_counts(expr: Expr) -> str | None:
    """Return the part of an expression that only a budget or a selection's count may read; None without one."""
    for part in walk(expr):
        if is_call(part, "enough"):
            return "enough(...)"
        if part == Input(name="seen"):
            return "seen"
    return None


def differs_by_head(expr: Expr) -> bool:
    """Return whether a value may differ between the KV heads of a layer. Every tensor counts, even one with only a layer axis."""
    match expr:
        case Reduce(axis=Axis.HEAD):
            return False
        case Input(name=name):
            return bool(INPUTS[name].axes) or name == "live"
        case TensorRef() | GivenRef() | Fold() | Call(op="random"):
            return True
    return any(map(differs_by_head, children(expr)))


def reads_heads(expr: Expr) -> bool:
    """Return whether a value reads all KV heads of a layer."""
    return ranks_across(expr) or has(expr, Reduce, axis=Axis.HEAD)


def ranks_across(expr: Expr) -> bool:
    """Return whether a value ranks the slots of all KV heads of a layer together."""
    return has(expr, Rank, within="heads")


def _goes_over_queries(expr: Expr) -> bool:
    """Return whether a node reduces over queries, or folds over them."""
    return is_reduction(expr, Axis.QUERY) or (expr.kind == "fold" and expr.over == "queries")


def of_query_heads_at_once(expr: Expr) -> bool:
    """Return whether a value reads a tensor with a query head axis outside reductions over queries."""
    if _goes_over_queries(expr):
        return False
    return (expr.kind == "tensor" and expr.group) or any(map(of_query_heads_at_once, children(expr)))


def asks_query_heads(expr: Expr) -> bool:
    """Return whether a value differs between query heads."""
    return of_query_heads(expr) or reads(expr, "attn", "logit")


def of_query_heads_unpooled(expr: Expr) -> bool:
    """Return whether some part of a score still differs between query heads; pools reduce over the GQA group first."""
    of_text = expr.kind == "reduce" and expr.within == "text"
    if is_call(expr, *POOLS) or (_goes_over_queries(expr) and not of_text):
        return False
    return of_text or (expr.kind == "tensor" and expr.group) or any(map(of_query_heads_unpooled, children(expr)))


def reads_text(expr: Expr) -> bool:
    """Return whether a value reads the queries of the whole prompt."""
    return has(expr, Reduce, within="text")


def compares_slots(expr: Expr) -> str | None:
    """Return the keyword by which a value compares slots; None without one."""
    for part in walk(expr):
        match part:
            case Reduce(axis=Axis.OTHER):
                return "over others"
            case Reduce(by=key) | Rank(by=key) if key is not None:
                return "by"
    return None


def differing_inside(expr: Reduce) -> Expr | None:
    """Return the body or condition of a reduction over heads if it is more than one number per KV head."""
    return next((part for part in (expr.body, expr.where) if part is not None and axes_of(part)), None)


def weighs_a_layer(value: Value, span: Span, sink: Sink) -> bool:
    """Return whether a value is one number for all KV heads of a layer; report it otherwise."""
    text, what = span.quoted(), "the weight of a layer is one number for all its KV heads"
    for part in parts_of(value.expr, Reduce, axis=Axis.HEAD):
        if (found := differing_inside(part)) is not None:
            inner = print_expression(found)
            message = (
                f"in the weight of a layer `over heads` needs one number per KV head, but `{inner}` {extent(axes_of(found))}"
            )
            sink.report(codes.REDUCTION, span, message, f"reduce it first: `sum({inner} over slots)`")
            return False
    if value.axes:
        help = offer(f"`sum(sum({text} over slots) over heads)`", ", say") if value.axes == {Axis.SLOT} else None
        sink.report(codes.COUNT_AXES, span, f"{what}, but `{text}` has {axes_in_words(value.axes)}", help)
        return False
    if differs_by_head(value.expr):
        message = f"{what}, but `{text}` differs between them"
        sink.report(codes.ACROSS, span, message, offer(f"reduce it: `sum({text} over heads)`", ", say"))
        return False
    return True


def is_per_slot(value: Value, span: Span, what: str, sink: Sink) -> bool:
    """Return whether a value has one number per slot to rank tokens by; report it otherwise."""
    if value.axes <= {Axis.SLOT}:
        return True
    text = span.quoted()
    message = f"{what} has one number per slot, but `{text}` has {axes_in_words(value.axes)}"
    sink.report(codes.SCORE_AXES, span, message, _how_to_reduce(value, text))
    return False


def _how_to_reduce(value: Value, text: str) -> str:
    if Axis.OTHER in value.axes:
        return offer(f"reduce it over others: `sum({text} over others)`")
    if Axis.SLOT not in value.axes:
        return offer("it is the same for all slots: rank them by a value that differs, `mean(attn)`", ", say")
    if Axis.QUERY not in value.axes:
        return offer(f"reduce it over dims: `norm2({text})` or `sum({text} over dims)`")
    if reads_heads(value.expr) and (own := re.sub(r"\s+over heads\b", "", text)) != text:
        more = ", which `victims shared by heads` averages over the KV heads"
        return offer(f"each KV head ranks its own slots by its own queries: `{own}`", more)
    if value.observes:
        return "reduce the part that varies over queries as well"
    if Axis.DIM in value.axes:
        return offer(f"reduce it, first over dims: `mean(sum({text} over dims))`")
    return offer(f"reduce it over queries: `mean({text})`, `sum({text})` or `last({text})`")


def selects(value: Value, span: Span, sink: Sink, what: str) -> bool:
    """Return whether a query can rank or weigh slots by a value before it attends; report it otherwise."""
    text = span.quoted()
    if looks_back(value, span, what, sink):
        return False
    if Axis.SLOT in value.axes and Axis.DIM not in value.axes:
        return True
    message = f"{what} has one number per slot, and may vary over queries, but `{text}` {extent(value.axes)}"
    by_query = f"multiply it by the query, `dot(q, {text})`, or " if not asks_query_heads(value.expr) else ""
    help = offer(
        f"{by_query}reduce it over dims: `sum({text} over dims)`" if Axis.SLOT in value.axes else "for example `dot(q, k)`"
    )
    sink.report(codes.SELECT_AXES, span, message, help)
    return False


def sketches(value: Value, span: Span, sink: Sink) -> bool:
    """Return whether a query can rank dims by a value before it attends; report it otherwise."""
    what, text = "what `sketch` ranks by", span.quoted()
    if looks_back(value, span, what, sink):
        return False
    for part in walk(value.expr):
        match part:
            case Call(op="random"):
                name = "random()"
            case Rank(within="page") | Reduce(within="page" | "next"):
                name = "over page"
            case _:
                continue
        sink.report(codes.LOOKS_BACK, span, f"{what} cannot read `{name}`", "it reads queries, keys, values and numbers")
        return False
    if Axis.DIM in value.axes and Axis.SLOT not in value.axes:
        return True
    message = f"{what} has one number per dim, and may vary over queries, but `{text}` {extent(value.axes)}"
    help = offer(f"reduce it over slots: `mean({text} over slots)`" if Axis.DIM in value.axes else "for example `abs(q)`")
    sink.report(codes.SELECT_AXES, span, message, help)
    return False


def looks_back(value: Value, span: Span, what: str, sink: Sink) -> bool:
    """Report a value that is known only once the query has attended; return whether it is one."""
    example = "`abs(q)`" if Axis.DIM in value.axes else "`dot(q, k)`"
    help = "it reads queries, keys, values and numbers, for example "
    help = offer(help + example) if what != SELECTED else help.removesuffix(", for example ")
    if value.observes:
        message = f"{what} cannot be reduced over queries: it is computed for each query alone"
        sink.report(codes.LOOKS_BACK, span, message, help)
        return True
    for part in walk(value.expr):
        match part:
            case Reduce(axis=Axis.OTHER):
                message = f"{what} cannot read `over others`: slots are compared in a settle, not for every query"
            case Input(name="attn" | "logit"):
                message = f"{what} is computed before the query attends, so there is no `{part.name}` yet"
            case _:
                continue
        sink.report(codes.LOOKS_BACK, span, message, help)
        return True
    return False
