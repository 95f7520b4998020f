"""What can be said of a policy's numbers before it runs, with its params at their defaults.

A number that depends on the prompt or the layer is not known here; the runtime checks it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.helps import add, instead, offer
from kvdsl.ir.nodes import Expr, Number, Reduce
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import walk
from kvdsl.passes.fold import some, value_of
from kvdsl.sema.needs import SELECTED
from kvdsl.source import Span

KEY_AND_VALUE_BYTES = 512
"""A key and a value of 128 dims in 16 bits: what a history is compared with."""


@dataclass(frozen=True)
class Part:
    """A checked expression, and where it stands."""

    expr: Expr
    span: Span


@dataclass(frozen=True)
class Bounded:
    """A number that has to lie in bounds, both included; `what` is how a message calls it.

    A count of tokens may be 0 and has a code of its own.
    """

    what: str
    part: Part
    low: float = 0
    high: float = math.inf
    counts: bool = False


_LAYERS = 32
"""Of a model that stands for all, where budgets differ from layer to layer."""

_MOST_TOKENS = 2**24
"""Budgets that are tried out, to say which would do."""

Keep = tuple[str, Expr, Span]
"""A scope, its count, and where the `keep` stands."""


@dataclass
class Statics:
    """Knows the values of params and of the budget, as far as they are constant.

    Attributes:
        newest: how many of the last tokens stay without a `keep last`.
    """

    sink: Sink
    params: Mapping[str, Expr]
    newest: int = 0
    known: dict[str, float] = field(default_factory=dict)

    def value(self, part: Part | None, default: float | None = None) -> float | None:
        """The value of an expression, if it is known; `default` if there is none."""
        return default if part is None else value_of(part.expr, self.known)

    # -- single numbers ----------------------------------------------------------------------------------------------

    def check_budget(self, budget: Part | None) -> None:
        """Finds the values of the budget and of params; reports a budget below 1."""
        self._learn_params()
        value = self.value(budget)
        if budget is None or value is None:
            return
        if value < 1:
            message = f"the budget is {print_number(value)}, but a policy keeps at least 1 token"
            help = offer(f"a ratio of the prompt is written `{print_number(value)} * prompt`") if value > 0 else None
            self.sink.report(codes.BUDGET, budget.span, message, help)
            return
        self.known["@budget"] = float(math.floor(value))
        self._learn_params()

    def _learn_params(self) -> None:
        for name, default in self.params.items():
            value = value_of(default, self.known)
            if value is not None:
                self.known[name] = value

    def check_bounds(self, number: Bounded) -> None:
        """Reports a number outside of its bounds."""
        value = self.value(number.part)
        if value is None or number.low <= value <= number.high:
            return
        found = f"but `{number.part.span.quoted()}` is {print_number(value)}"
        if number.counts:
            self.sink.report(codes.NEGATIVE, number.part.span, f"{number.what} needs a count of at least 0, {found}")
            return
        bounds = f"is at least {print_number(number.low)}"
        if not math.isinf(number.high):
            bounds = f"lies between {print_number(number.low)} and {print_number(number.high)}"
        share = offer(f"a share of the text is written `{print_number(value)} * seen`")
        help = share if number.what == SELECTED and value > 0 else None
        self.sink.report(codes.BOUNDS, number.part.span, f"{number.what} {bounds}, {found}", help)

    def check_layers(self, exprs: Mapping[str, Part]) -> None:
        """Reports ranges of layers whose last layer is before the first."""
        for keyword in ("layers", "select"):
            low, high = (exprs.get(f"{keyword}.{end}") for end in ("low", "high"))
            first, last = self.value(low), self.value(high)
            if low is not None and high is not None and first is not None and last is not None and first > last:
                span = low.span.to(high.span)
                message = f"the range of `{keyword}` is empty: {print_number(first)} is above {print_number(last)}"
                help = offer(f"did you mean `{high.span.quoted()}..{low.span.quoted()}`?")
                self.sink.report(codes.EMPTY_RANGE, span, message, help)

    # -- keeps -------------------------------------------------------------------------------------------------------

    def check_keeps(self, keeps: Iterable[Keep], exprs: Mapping[str, Part]) -> None:
        """Reports keeps that protect more tokens than the budget holds, or (the first and last) than are selected."""
        keeps = list(keeps)
        self._warn_of_shares(keeps)
        sized = [(scope, size, span) for scope, count, span in keeps if (size := self._size(count)) is not None]
        always = [one for one in sized if one[0] != "top"]
        for name, role, bound in (
            ("budget", "the budget is", sized),
            ("select.count", "the number of selected tokens is", always),
        ):
            limit = None if name not in exprs else self._size(exprs[name].expr)
            if limit is not None and limit >= 1:
                self._check_keeps(bound, limit, Label(exprs[name].span, role.removesuffix(" is")), role)
        if "budget" in exprs and self._size(exprs["budget"].expr) is None:
            self._check_layers(sized, exprs["budget"])

    def _warn_of_shares(self, keeps: Iterable[Keep]) -> None:
        """Warns of keeps of less than one token, which is none."""
        for scope, count, span in keeps:
            value = value_of(count, self.known)
            if value is not None and 0 < value < 1:
                default = ", and there is no default any more" if scope == "last" else ""
                message = f"`{span.quoted()}` protects no token: {print_number(value)} is floored to 0{default}"
                new = f"keep {scope} {print_number(value)} * budget"
                share = instead(f"a share of the budget is written `{print_number(value)} * budget`", new)
                self._no_effect(span, message, share if isinstance(count, Number) else None)

    def _check_layers(self, sized: list[tuple[str, int, Span]], budget: Part) -> None:
        """Warns where the keeps do not fit into the smallest of budgets that differ by layer."""
        narrowest = self._narrowest(budget.expr)
        most = {scope: max((one[1] for one in sized if one[0] == scope), default=0) for scope in ("top", "first", "last")}
        needed = max(most["top"], most["first"] + most["last"])
        if narrowest is None or needed <= narrowest[0]:
            return
        limit, layer = narrowest
        message = f"in layer {layer} of {_LAYERS} the budget is {limit}, but {needed} tokens are protected"
        labels = [Label(span, "what protects") for _, size, span in sized if size]
        self.sink.report(codes.KEEPS_IN_LAYER, budget.span, message, self._larger(budget.expr, needed), labels)

    def _larger(self, budget: Expr, needed: int) -> str:
        """What to do, with the smallest value of the param `budget` that would do, if there is one."""

        def holds(tokens: int) -> bool:
            found = self._narrowest(budget, {"budget": float(tokens)})
            return found is not None and found[0] >= needed

        found = bisect_left(range(_MOST_TOKENS), True, lo=1, key=holds) if "budget" in self.params else _MOST_TOKENS
        return "protect fewer, or raise the budget" + (f" to {found}" if found < _MOST_TOKENS else "")

    def _narrowest(self, budget: Expr, chosen: Mapping[str, float] | None = None) -> tuple[int, int] | None:
        """The smallest budget of a model's layers, and the last layer that has it, if they depend on nothing else."""
        names = {**self.known, **(chosen or {})}
        known = [value_of(budget, {**names, "@layer": layer, "@layers": _LAYERS}) for layer in range(_LAYERS)]
        found = [(math.floor(value), -layer) for layer, value in enumerate(known) if value is not None]
        if len(found) < _LAYERS:
            return None
        limit, layer = min(found)
        return limit, -layer

    def _size(self, count: Expr) -> int | None:
        value = value_of(count, self.known)
        return None if value is None else math.floor(value)

    def _check_keeps(self, sized: list[tuple[str, int, Span]], limit: int, at: Label, role: str) -> None:
        for scope in ("top", "first", "last"):
            for size, span in [(size, span) for other, size, span in sized if other == scope]:
                if size > limit:
                    text = f"`{span.quoted()}` protects {print_number(float(size))} tokens"
                    self._too_many(text, span, limit, [at], role)
                    return
        first = max((one for one in sized if one[0] == "first"), key=lambda one: one[1], default=None)
        last = max((one for one in sized if one[0] == "last"), key=lambda one: one[1], default=None)
        total = (first[1] if first else 0) + (last[1] if last else self.newest)
        if first is not None and total > limit:
            other = f"`{last[2].quoted()}`" if last else "the last token, which edition 1 keeps by default,"
            labels = [at] if last is None else [Label(last[2], "and this"), at]
            self._too_many(
                f"`{first[2].quoted()}` and {other} protect {print_number(float(total))} tokens",
                first[2],
                limit,
                labels,
                role,
            )

    def _too_many(self, text: str, span: Span, limit: int, labels: list[Label], role: str) -> None:
        help = "protect fewer, or raise the budget" if role == "the budget is" else "protect fewer, or select more"
        self.sink.report(codes.KEEPS, span, f"{text}, but {role} {limit}", help, labels)

    # -- warnings ----------------------------------------------------------------------------------------------------

    def warn_of_drops(self, exprs: Mapping[str, Part], hard: bool) -> None:
        """Warns of `slack` and `max_drop` that change nothing, or something else than they seem to say.

        With max_drop d, slack s and trigger R, once the text is long a prune drops max(min(d, R), R - s) tokens.
        """
        trigger, slack, drop = (exprs.get(name) for name in ("trigger", "slack", "max_drop"))
        at, rises = self.value(trigger, 1), self.value(slack, 0)
        most = self.value(drop, 0)
        if at == 0 and not hard and (unread := slack or drop) is not None:
            self._no_effect(unread.span, "with `trigger overflow >= 0` nothing is ever pruned, so this has no effect")
        elif most == 0 and slack is not None and rises != 0 and not hard:
            message = "without `max_drop` a prune goes down to the budget, so `slack` has no effect"
            self._no_effect(slack.span, message, add("add `max_drop 8`", ", say"))
        elif drop is not None and at and most and rises is not None:
            self._warn_of_drop(drop, some(at), math.floor(rises), some(most))

    def _warn_of_drop(self, drop: Part, trigger: int, slack: int, most: int) -> None:
        steady = max(min(most, trigger), trigger - slack)
        tokens = "1 token" if steady == 1 else f"{steady} tokens"
        if trigger >= 1 and steady == trigger:
            message = (
                f"in the long run a prune drops all above the budget ({tokens}), as it would without `slack` and `max_drop`"
            )
            help = "raise the `slack`" if most < trigger else "choose `max_drop` below the `trigger`"
        elif steady > most:
            message = f"in the long run a prune drops {tokens}, although `max_drop` is {most}"
            help = f"a `slack` of {trigger - most} makes it {most}"
        elif steady == 1:
            message, help = "in the long run a prune drops a single token, at every step", "choose a larger `max_drop`"
        else:
            return
        self._no_effect(drop.span, message, help)

    def warn_of_selection(self, exprs: Mapping[str, Part]) -> None:
        """Warns of a selection that is as large as what is ever cached; only for a policy that evicts everywhere."""
        select = exprs.get("select.count")
        budget, trigger, slack = (
            self.known.get("@budget"),
            self.value(exprs.get("trigger"), 1),
            self.value(exprs.get("slack"), 0),
        )
        count = self.value(select)
        if select is None or budget is None or count is None or not trigger or slack is None:
            return
        most = math.floor(budget) + max(some(trigger), math.floor(slack) + 1)
        if count >= most:
            message = f"no more than {most} tokens are cached while decoding, so nothing is skipped"
            self._no_effect(select.span, message, "select fewer, or raise the budget")

    def warn_of_histories(self, exprs: Iterable[Expr], spans: Mapping[Expr, Span]) -> None:
        """Warns where the histories that `over last N queries` needs cost more than what is cached."""
        rings = {
            (part.body, part.last): value
            for expr in exprs
            for part in walk(expr)
            if isinstance(part, Reduce) and part.last is not None
            if (value := value_of(part.last, self.known)) is not None
        }
        size = 4 * sum(math.floor(value) for value in rings.values())
        if size > KEY_AND_VALUE_BYTES:
            _, last = next(iter(rings))
            message = f"the history takes {size:,} bytes a token, more than a key and value of 128 dims in 16 bits"
            help = f"a history of {KEY_AND_VALUE_BYTES // 4} queries costs as much; `ema(...)` costs 4 bytes"
            self.sink.report(codes.HISTORY, spans[last], message, help)

    def _no_effect(self, span: Span, message: str, help: str | None = None) -> None:
        self.sink.report(codes.NO_EFFECT, span, message, help)
