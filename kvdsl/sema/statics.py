"""What can be said of a policy's numbers before it runs, with its params at their defaults.

A number that depends on the prompt or the layer is not known here; the runtime checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.ir.nodes import Expr
from kvdsl.ir.printer import print_number
from kvdsl.passes.fold import value_of
from kvdsl.source import Span


@dataclass(frozen=True)
class Count:
    """An expression for a number, and where it stands."""

    expr: Expr
    span: Span


@dataclass
class Statics:
    """Knows the values of params and of the budget, as far as they are constant."""

    sink: Sink
    params: Mapping[str, Expr]
    known: dict[str, float] = field(default_factory=dict)
    budget_span: Span | None = None

    def check_budget(self, budget: Count) -> None:
        """Finds the budget's value; reports one below 1."""
        self._learn_params()
        value = value_of(budget.expr, self.known)
        if value is None:
            return
        self.budget_span = budget.span
        if value < 1:
            message = f"the budget is {print_number(value)}, but a policy keeps at least 1 token"
            help = f"a rate of the prompt is written `{print_number(value)} * prompt`" if value > 0 else None
            self.sink.report(codes.BUDGET, budget.span, message, help)
            return
        self.known["@budget"] = float(math.floor(value))
        self._learn_params()

    def _learn_params(self) -> None:
        for name, default in self.params.items():
            value = value_of(default, self.known)
            if value is not None:
                self.known[name] = value

    def check_count(self, what: str, count: Count) -> None:
        """Reports a count below 0."""
        value = value_of(count.expr, self.known)
        if value is not None and value < 0:
            message = f"{what} needs a count of at least 0, but `{count.span.quoted()}` is {print_number(value)}"
            self.sink.report(codes.NEGATIVE, count.span, message)

    def check_keeps(self, keeps: dict[str, list[Count]]) -> None:
        """Reports keeps that protect more tokens than the budget holds."""
        budget = self.known.get("@budget")
        if budget is None:
            return
        first, last = self._largest(keeps["first"]), self._largest(keeps["last"])
        for size, count in [*self._sizes(keeps["top"]), *self._sizes(keeps["first"]), *self._sizes(keeps["last"])]:
            if size > budget:
                self._too_many(f"`{count.span.quoted()}` protects {print_number(size)} tokens", budget, count, None)
                return
        implied = 0 if keeps["last"] else 1
        total = (first[0] if first else 0) + (last[0] if last else implied)
        if first is not None and total > budget:
            other = f"`{last[1].span.quoted()}`" if last else "the last token, which is kept by default,"
            text = f"`{first[1].span.quoted()}` and {other} protect {print_number(total)} tokens"
            self._too_many(text, budget, first[1], last[1] if last else None)

    def _too_many(self, text: str, budget: float, count: Count, other: Count | None) -> None:
        labels = [] if other is None else [Label(other.span, "and this")]
        if self.budget_span is not None:
            labels.append(Label(self.budget_span, "the budget"))
        message = f"{text}, but the budget is {print_number(budget)}"
        self.sink.report(codes.KEEPS, count.span, message, "protect fewer, or raise the budget", labels)

    def _sizes(self, counts: list[Count]) -> list[tuple[float, Count]]:
        known = ((value_of(count.expr, self.known), count) for count in counts)
        return [(float(math.floor(value)), count) for value, count in known if value is not None]

    def _largest(self, counts: list[Count]) -> tuple[float, Count] | None:
        return max(self._sizes(counts), key=lambda sized: sized[0], default=None)
