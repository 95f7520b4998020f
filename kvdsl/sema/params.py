"""Params: their defaults, ranges and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from kvdsl import codes
from kvdsl.budget import as_written, is_rate
from kvdsl.diagnostics import Label, Sink
from kvdsl.helps import offer
from kvdsl.ir import nodes as ir
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import parts_of, walk
from kvdsl.passes.fold import value_of
from kvdsl.sema import values
from kvdsl.sema.needs import is_fixed
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.settings import Setting
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


@dataclass(frozen=True)
class CheckedParam:
    """A param, with the place of its value: in the file, or in a setting."""

    ir: ir.Param
    span: Span


@dataclass
class Params:
    """The params of a policy, checked in order.

    Attributes:
        evaluate: checks an expression of a statement.
        checked: the params without errors.
        inputs: what each param reads (`budget`, `prompt`, tensors), directly or through other params.
        known: the values of the params that depend on nothing.
    """

    flat: FlatPolicy
    settings: Mapping[str, Setting]
    evaluate: Callable[[syn.Expr, Placed], Value | None]
    sink: Sink
    checked: dict[str, CheckedParam] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Check all params."""
        earlier: set[str] = set()
        for name, placed in self.flat.names.items():
            if isinstance(placed.statement, syn.Param):
                self._check(name, placed.statement, placed, earlier)
                earlier.add(name)

    def _check(self, name: str, statement: syn.Param, placed: Placed, earlier: set[str]) -> None:
        span = statement.value.span
        value = self.evaluate(statement.value, placed)
        if value is not None and not is_fixed(value, span, f"the default of `{name}`", self.sink.report, per_head=True):
            value = None
        low, high = self._range(statement, placed)
        written = None
        if isinstance(statement.value, syn.Constant):
            written = as_written(statement.value.value, span.text)
        if name in self.settings:
            written, span = self.settings[name].value, self.settings[name].span
            value = values.number(written)
        if value is None or not self._reads_earlier(value, span, name, earlier):
            return
        if name == "budget" and value.constant is not None:
            ratio = self._ratio(value.constant if written is None else written, span, written is not None)
            value = value if ratio is None else ratio
        value = self._in_range(name, value, span, low, high, statement)
        self.inputs[name] = self.inputs_of(value.expr)
        unit = None if statement.unit is None else statement.unit.text
        self.checked[name] = CheckedParam(ir.Param(name=name, default=value.expr, unit=unit, low=low, high=high), span)

    def _ratio(self, number: float, span: Span, is_written: bool) -> Value | None:
        """Return a budget given as a ratio of the prompt; None for a count. Report a count with a fraction."""
        if 0 < number < 1 or (is_written and number == 1 and is_rate(number)):
            ratio = values.call("*", values.number(number), values.read_input("prompt"))
            return values.call("max", values.number(1), values.call("floor", ratio))
        if is_written and number > 1 and number != int(number):
            message = (
                f"the budget is {print_number(number)}, which is neither a whole number of tokens nor a ratio up to 1.0"
            )
            help = offer(f"write `{print_number(int(number))}`, or `0.25` for a quarter of the prompt")
            self.sink.report(codes.BUDGET, span, message, help)
        return None

    def inputs_of(self, expr: ir.Expr) -> frozenset[str]:
        """Return the inputs and tensors that an expression reads, directly or through the defaults of params."""
        found: set[str] = set()
        for part in walk(expr):
            match part:
                case ir.Input(name=name) | ir.TensorRef(name=name):
                    found.add(name)
                case ir.ParamRef(name=name):
                    found |= self.inputs.get(name, frozenset())
        return frozenset(found)

    def _reads_earlier(self, value: Value, span: Span, name: str, earlier: set[str]) -> bool:
        for part in parts_of(value.expr, ir.ParamRef):
            if part.name not in earlier:
                is_itself = part.name == name
                message = f"`{name}` is defined by itself" if is_itself else f"`{part.name}` is defined after `{name}`"
                help = None if is_itself else f"move `param {part.name}` before it"
                self.sink.report(codes.NOT_HERE, span, message, help)
                return False
        if name == "budget" and "budget" in self.inputs_of(value.expr):
            message = "the default of `budget` cannot read `budget`"
            self.sink.report(codes.BUDGET_CYCLE, span, message, offer("a ratio of the prompt is written `0.25 * prompt`"))
            return False
        return True

    def _range(self, statement: syn.Param, placed: Placed) -> tuple[float | None, float | None]:
        if statement.range is None:
            return None, None
        low, high = (self._end(end, placed) for end in (statement.range.low, statement.range.high))
        if low is not None and high is not None and low > high:
            text = statement.range.span.quoted()
            help = offer(f"did you mean `{print_number(high)}..{print_number(low)}`?")
            self.sink.report(codes.EMPTY_RANGE, statement.range.span, f"the range `{text}` is empty", help)
            return None, None
        return low, high

    def _end(self, end: syn.Expr | None, placed: Placed) -> float | None:
        value = None if end is None else self.evaluate(end, placed)
        if end is not None and value is not None and value.constant is None:
            message = f"the end of a range is a constant, but `{end.span.quoted()}` is not"
            self.sink.report(codes.EMPTY_RANGE, end.span, message)
        return None if value is None else value.constant

    def _in_range(
        self, name: str, value: Value, span: Span, low: float | None, high: float | None, statement: syn.Param
    ) -> Value:
        """Return the value, after a report if it is out of range."""
        number = value_of(value.expr, self.known)
        if number is None:
            return value
        self.known[name] = number
        if (low is not None and number < low) or (high is not None and number > high):
            place = cast(syn.Range, statement.range).span
            message = f"`{name}` is {print_number(number)}, but its range is `{place.quoted()}`"
            two_points = (
                offer(f"did you mean `{place.text.replace('...', '..')}`?", at=place) if "..." in place.text else None
            )
            self.sink.report(codes.OUT_OF_RANGE, span, message, two_points, labels=[Label(place, "the range")])
        return value
