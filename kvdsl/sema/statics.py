"""Check a policy's numbers before it runs, with its params at their defaults.

The runtime checks numbers that depend on the prompt or the layer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.helps import add, instead, offer
from kvdsl.ir.nodes import Expr
from kvdsl.ir.ops import ENDS, KEEPS
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import walk
from kvdsl.passes.fold import some, value_of
from kvdsl.sema.needs import SELECTED
from kvdsl.source import Span

KEY_AND_VALUE_BYTES = 512
"""A key and a value of 128 dims in 16 bits, to compare histories with."""


@dataclass(frozen=True)
class Part:
    """A checked expression and its place."""

    expr: Expr
    span: Span


@dataclass(frozen=True)
class Bounded:
    """A number with inclusive bounds; `what` names it in messages.

    `counts` marks a count of tokens, which may be 0 and has its own code.
    """

    what: str
    part: Part
    low: float = 0
    high: float = math.inf
    counts: bool = False


_LAYERS = 32
"""The layers of a model that stands for all."""

_MOST_TOKENS = 2**24
"""The largest budget to propose."""

Keep = tuple[str, Part, Span]
"""A scope, its count, and the place of the `keep`."""


@dataclass
class Statics:
    """Checks with the values of params and the budget, where they are constant.

    Attributes:
        newest: the number of last tokens that stay without a `keep last`.
    """

    sink: Sink
    params: Mapping[str, Expr]
    newest: int = 0
    known: dict[str, float] = field(default_factory=dict)

    def value(self, part: Part | None, default: float | None = None) -> float | None:
        """Return the value of an expression, or None if it is unknown; `default` without an expression."""
        return default if part is None else value_of(part.expr, self.known)

    # -- single numbers ----------------------------------------------------------------------------------------------

    def check_budget(self, budget: Part | None) -> None:
        """Evaluate the budget and the params; report a budget below 1."""
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
        """Report a number out of its bounds."""
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
        share = offer(f"a ratio of the text is written `{print_number(value)} * seen`")
        help = share if number.what == SELECTED and value > 0 else None
        self.sink.report(codes.BOUNDS, number.part.span, f"{number.what} {bounds}, {found}", help)

    def check_layers(self, exprs: Mapping[str, Part]) -> None:
        """Report ranges of layers whose last layer is before the first."""
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
        """Report keeps that protect more tokens than the budget holds, or first and last tokens than are selected."""
        keeps = list(keeps)
        self._warn_of_shares(keeps)
        sized = [(scope, size, span) for scope, count, span in keeps if (size := self._size(count.expr)) is not None]
        always = [one for one in sized if one[0] in ENDS]
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
        """Warn of keeps of less than one token, which protect none."""
        for scope, count, span in keeps:
            value = self.value(count)
            if value is not None and 0 < value < 1:
                default = ", so not even the newest one is protected" if scope == "last" else ""
                message = f"`{span.quoted()}` protects no token: {print_number(value)} is floored to 0{default}"
                ratio = f"{print_number(value)} * budget"
                share = instead(f"a ratio of the budget is written `{ratio}`", ratio, count.span)
                self._no_effect(span, message, share if count.expr.kind == "number" else None)

    def _check_layers(self, sized: list[tuple[str, int, Span]], budget: Part) -> None:
        """Warn if the keeps do not fit the smallest of budgets that differ by layer."""
        narrowest = self._narrowest(budget.expr)
        most = {scope: max((one[1] for one in sized if one[0] == scope), default=0) for scope in KEEPS}
        needed = max(sum(most[end] for end in ENDS), *(most[form] for form in KEEPS.keys() - ENDS))
        if narrowest is None or needed <= narrowest[0]:
            return
        limit, layer = narrowest
        message = f"in layer {layer} of {_LAYERS} the budget is {limit}, but {needed} tokens are protected"
        labels = [Label(span, "protects here") for _, size, span in sized if size]
        self.sink.report(codes.KEEPS_IN_LAYER, budget.span, message, self._larger(budget.expr, needed), labels)

    def _larger(self, budget: Expr, needed: int) -> str:
        """Return a help, with the smallest sufficient value of the param `budget` if there is one."""

        def holds(tokens: int) -> bool:
            found = self._narrowest(budget, {"budget": float(tokens)})
            return found is not None and found[0] >= needed

        found = bisect_left(range(_MOST_TOKENS), True, lo=1, key=holds) if "budget" in self.params else _MOST_TOKENS
        return "protect fewer, or raise the budget" + (f" to {found}" if found < _MOST_TOKENS else "")

    def _narrowest(self, budget: Expr, chosen: Mapping[str, float] | None = None) -> tuple[int, int] | None:
        """Return the smallest budget of all layers and the last layer that has it; None if they depend on more than the layer."""
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
        for scope in sorted(KEEPS, key=ENDS.__contains__):
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
        """Warn of `slack` and `max_drop` that have no effect, or a misleading one.

        With max_drop d, slack s and trigger R, a prune of a long text drops max(min(d, R), R - s) tokens.
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
                f"in the long run a prune drops everything above the budget ({tokens}), as without `slack` and `max_drop`"
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
        """Warn of a selection as large as the cache; only for a policy that evicts in all layers and phases."""
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
        """Warn if the histories of `over last N queries` cost more memory than a key and value."""
        rings = {
            (part.body, part.last): value
            for expr in exprs
            for part in walk(expr)
            if part.kind == "reduce" and part.last is not None
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
