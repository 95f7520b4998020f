"""Check `budget` statements."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from kvdsl import codes
from kvdsl.ir import nodes as ir
from kvdsl.sema import values
from kvdsl.sema.needs import is_fixed, is_measured, reads_data, weighs_a_layer
from kvdsl.sema.parts import BUDGET, WEIGHT, Fields
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.scope import Bound, Definition, Scope
from kvdsl.sema.statics import Part
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


class Budget:
    """Checks the `budget` statements of one policy: one may read another that it overrides."""

    def __init__(self, flat: FlatPolicy, fields: Fields) -> None:
        self.flat, self.fields, self.parts, self.sink = flat, fields, fields.parts, fields.sink

    def check(self) -> None:
        """Evaluate the `budget` statements from the base on, or without any the param `budget`."""
        value = values.read_param("budget") if "budget" in self.flat.names else None
        span = self.flat.names["budget"].statement.span if value is not None else None
        measured: Value | None = None
        most: Part | None = None
        for placed in self.flat.settings.get("budget", []):
            statement = cast(syn.Budget, placed.statement)
            names: dict[str, Definition] = {} if value is None else {"budget": Bound(value)}
            span = statement.value.span
            found = self._one(statement, Scope(names, self.fields.scope(placed)))
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
            checked = self.fields.params.checked.get("budget")
            is_param = not self.flat.settings.get("budget")
            self.parts.exprs["budget"] = Part(value.expr, checked.span if is_param and checked is not None else span)
            if measured is not None:
                self.parts.exprs["measured"] = Part(measured.expr, span)
                self.parts.exprs["budget"] = most or Part(ir.Input(name="everything"), span)

    def _one(self, statement: syn.Budget, scope: Scope) -> tuple[Value | None, Value, Part | None] | None:
        """Return a budget's data-dependent value if it has one, the tokens it keeps, and its `at most`. None after a report."""
        span = statement.value.span
        value = self.fields.expressions.check(statement.value, scope)
        most = None if statement.most is None else self.fields.expressions.check(statement.most, scope)
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
        return (
            not self._is_cyclic(value, span)
            and self.fields.may_read(value, span, BUDGET)
            and is_measured(value, span, BUDGET, self.sink.report)
            and self.fields.remembers_numbers(value)
        )

    def _is_budget(self, value: Value, span: Span) -> bool:
        return is_fixed(value, span, BUDGET, self.sink.report, per_head=True) and not self._is_cyclic(value, span)

    def _is_cyclic(self, value: Value, span: Span) -> bool:
        """Report a budget that reads itself through a param; return whether it does."""
        if "budget" not in self.fields.params.inputs_of(value.expr):
            return False
        help = "add `param budget = 512` and read that: only in this line `budget` means the param"
        if "budget" in self.flat.names:
            help = "only in this line `budget` means the param: inline the `let` or param that reads `budget`"
        self.sink.report(codes.BUDGET_CYCLE, span, "the budget is computed from itself", help)
        return True

    def _across(self, name: str, across: syn.Across | syn.AcrossLayers, placed: Placed) -> None:
        """Add the floor of heads or layers that share a budget."""
        if across.floor is None:
            self.parts.exprs[name] = Part(ir.Number(value=0), across.span)
        else:
            self.fields.number(name, across.floor, placed, "the floor", 0, 1)

    def _across_layers(self, across: syn.AcrossLayers, placed: Placed) -> None:
        self._across("across_layers.floor", across, placed)
        if across.by is None:
            return
        value = self.fields.value(across.by, placed, WEIGHT)
        if value is None:
            self.flat.broken.add("budget")
        elif weighs_a_layer(value, across.by.span, self.sink):
            self.parts.exprs["across_layers.by"] = Part(value.expr, across.by.span)


def _bounded(measured: Value) -> tuple[Value, ir.Expr] | None:
    """Split `min(x, n)`, where only x depends on the data, into both; None for other values."""
    expr = measured.expr
    if not ir.is_call(expr, "min"):
        return None
    for value, most in (expr.args, expr.args[::-1]):
        if reads_data(value) and not reads_data(most):
            return replace(measured, expr=value), most
    return None
