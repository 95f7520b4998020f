"""What statements need of an expression: a number that is fixed, or one number per slot."""

from __future__ import annotations

from kvdsl import codes
from kvdsl.diagnostics import Sink, listed
from kvdsl.ir.nodes import Axis, Input, Reduce
from kvdsl.ir.visitors import walk
from kvdsl.sema.expressions import axes_in_words
from kvdsl.sema.values import Value
from kvdsl.source import Span

FIXED = ("budget", "prompt", "layer", "layers")


def is_fixed(value: Value, span: Span, what: str, sink: Sink) -> bool:
    """Whether a value is a single number that is known once the prompt is; reports if not."""
    text, help = span.quoted(), f"it can read params, {listed(FIXED, 'and')}"
    if value.axes:
        message = f"{what} is a single number, but `{text}` has {axes_in_words(value.axes)}"
        sink.report(codes.COUNT_AXES, span, message)
        return False
    for part in walk(value.expr):
        if isinstance(part, Reduce):
            message = f"{what} cannot depend on what is cached, as `{text}` does"
            sink.report(codes.NOT_HERE, span, message, help)
            return False
        if isinstance(part, Input) and part.name not in FIXED:
            message = f"`{part.name}` changes from step to step, so {what} cannot read it"
            sink.report(codes.NOT_HERE, span, message, help)
            return False
    return True


def ranks(value: Value, span: Span, what: str, sink: Sink) -> bool:
    """Whether a value has one number per slot, so that tokens can be ranked by it; reports if not."""
    if value.axes <= {Axis.SLOT}:
        return True
    text = span.quoted()
    message = f"{what} has one number per slot, but `{text}` has {axes_in_words(value.axes)}"
    sink.report(codes.SCORE_AXES, span, message, _how_to_reduce(value, text))
    return False


def _how_to_reduce(value: Value, text: str) -> str:
    if Axis.QUERY not in value.axes:
        return f"reduce it over dims: `sum({text} over dims)`"
    if value.observes:
        return "reduce its part over queries as well"
    if Axis.DIM in value.axes:
        return f"reduce it, first over dims: `mean(sum({text} over dims))`"
    return f"reduce it over queries: `mean({text})`, `sum({text})` or `last({text})`"
