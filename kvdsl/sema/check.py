"""Checks a flat policy and makes the IR of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean, listed
from kvdsl.ir import nodes as ir
from kvdsl.ir.visitors import walk
from kvdsl.sema import values
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.lets import check_lets, module_scope
from kvdsl.sema.modules import EDITION, Module
from kvdsl.sema.needs import is_fixed, ranks
from kvdsl.sema.params import Params
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.scope import Bound, Definition, LetName, ParamName, Scope
from kvdsl.sema.settings import Setting
from kvdsl.sema.statics import Count, Statics
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import A_STATEMENT, ANYTHING

_GROUPS = ("mean", "max", "sum")
_POSITIONS = ("original", "compact")
_COUNTS = ("trigger", "slack", "max_drop")
_DEFAULTS = {name: ir.Policy.model_fields[name].default for name in _COUNTS}


@dataclass(frozen=True)
class _Keep:
    """A checked `keep`; `span` is the whole statement."""

    ir: ir.Keep
    count: Count | None
    span: Span


@dataclass
class _Parts:
    """The checked statements of a policy."""

    budget: Value | None
    score: Value | None
    keeps: list[_Keep]
    counts: dict[str, Count]
    group: str
    positions: str

    def expressions(self) -> list[ir.Expr]:
        """Everything that is evaluated, but the defaults of params."""
        found = [value.expr for value in (self.budget, self.score) if value is not None]
        found += [count.expr for count in self.counts.values()]
        return found + [expr for keep in self.keeps for expr in (keep.ir.count, keep.ir.by) if expr is not None]


@dataclass
class Checker:
    """Checks one policy."""

    flat: FlatPolicy
    prelude: Scope
    sink: Sink
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broken = self.flat.broken
        self.expressions = Expressions(self.sink, lenient=ANYTHING in self.broken)
        self.params = Params(self.flat, self.settings, self._value, self.sink)
        self.scopes: dict[Module, Scope] = {}
        self.own: dict[str, Definition] = {}

    def check(self) -> ir.Policy | None:
        """The policy's IR, or None after reports."""
        self._define()
        self.params.check()
        parts = self._parts()
        self._complete(parts)
        self._unused(parts)
        if not self.sink.failed():
            self._statics(parts)
        return None if self.sink.failed() else self._policy(parts)

    # -- names -------------------------------------------------------------------------------------------------------

    def _define(self) -> None:
        """Makes the policy's own names known. `budget` is not one of them: it means the tokens kept, not the param."""
        for name, placed in self.flat.names.items():
            if isinstance(placed.statement, syn.Let):
                self.own[name] = LetName(placed.statement, self._scope(placed.module))
            elif name != "budget":
                self.own[name] = ParamName(name)
        for name in self.broken:
            self.own.setdefault(name, Bound(None))

    def _scope(self, module: Module) -> Scope:
        """What a name means in a statement of the policy that stands in a certain file."""
        if module not in self.scopes:
            self.scopes[module] = Scope(self.own, module_scope(module, self.prelude, self.sink))
        return self.scopes[module]

    def _value(self, node: syn.Expr, placed: Placed) -> Value | None:
        return self.expressions.check(node, self._scope(placed.module))

    # -- statements --------------------------------------------------------------------------------------------------

    def _parts(self) -> _Parts:
        budget, score = self._budget(), self._score()
        keeps = [keep for placed in self.flat.keeps if (keep := self._keep(placed)) is not None]
        counts = {keyword: count for keyword in _COUNTS if (count := self._setting_count(keyword)) is not None}
        positions = self._word("positions", _POSITIONS)
        if positions == "compact":
            span = self.flat.settings["positions"][-1].statement.span
            self.sink.report(codes.NOT_YET, span, f"`{span.quoted(40)}` is not available in this version of kvdsl")
        return _Parts(budget, score, keeps, counts, self._word("group", _GROUPS), positions)

    def _setting(self, keyword: str) -> tuple[syn.Expr, Placed] | None:
        """The expression of a statement that may stand once."""
        if keyword not in self.flat.settings:
            return None
        placed = self.flat.settings[keyword][-1]
        return cast(syn.Expr, cast(syn.Setting, placed.statement).value), placed

    def _budget(self) -> Value | None:
        """The tokens to keep: the `budget` statements from the base on, or else the param `budget`."""
        value = values.read_param("budget") if "budget" in self.flat.names else None
        for placed in self.flat.settings.get("budget", []):
            node = cast(syn.Expr, cast(syn.Setting, placed.statement).value)
            names: dict[str, Definition] = {} if value is None else {"budget": Bound(value)}
            value = self.expressions.check(node, Scope(names, self._scope(placed.module)))
            if value is None or not self._is_budget(value, node.span):
                self.broken.add("budget")
                return None
        return value

    def _is_budget(self, value: Value, span: Span) -> bool:
        if not is_fixed(value, span, "the budget", self.sink):
            return False
        if self.params.reads_budget(value.expr):
            self.sink.report(codes.BUDGET_CYCLE, span, "the budget is computed from itself")
            return False
        return True

    def _score(self) -> Value | None:
        found = self._setting("score")
        if found is None:
            return None
        node, placed = found
        value = self._value(node, placed)
        if value is not None and ranks(value, node.span, "a score", self.sink):
            return value
        self.broken.add("score")
        return None

    def _count(self, node: syn.Expr, placed: Placed, what: str) -> Count | None:
        value = self._value(node, placed)
        is_count = value is not None and is_fixed(value, node.span, what, self.sink)
        return Count(value.expr, node.span) if value is not None and is_count else None

    def _setting_count(self, keyword: str) -> Count | None:
        found = self._setting(keyword)
        return None if found is None else self._count(*found, f"`{keyword}`")

    def _keep(self, placed: Placed) -> _Keep | None:
        statement = cast(syn.Keep, placed.statement)
        scope = cast(Literal["first", "last", "top", "where"], statement.scope)
        count = by = None
        if statement.count is not None:
            count = self._count(statement.count, placed, f"the count of `keep {scope}`")
        if statement.by is not None:
            by = self._keep_by(statement.by, placed, scope)
        if (statement.count is not None and count is None) or (statement.by is not None and by is None):
            return None
        keep = ir.Keep(scope=scope, count=None if count is None else count.expr, by=None if by is None else by.expr)
        return _Keep(keep, count, statement.span)

    def _keep_by(self, node: syn.Expr, placed: Placed, scope: str) -> Value | None:
        value = self._value(node, placed)
        if value is None or (scope == "where" and not self.expressions.condition(value, node.span, "`keep where`")):
            return None
        what = "what `keep top` ranks by" if scope == "top" else "a condition on slots"
        return value if ranks(value, node.span, what, self.sink) else None

    def _word(self, keyword: str, known: tuple[str, ...]) -> str:
        if keyword not in self.flat.settings:
            return known[0]
        word = cast(syn.Word, cast(syn.Setting, self.flat.settings[keyword][-1].statement).word)
        if word.text not in known:
            help = did_you_mean(word.text, known) or f"`{keyword}` is {listed(known)}"
            self.sink.report(codes.OPTION, word.span, f"`{keyword}` cannot be `{word.text}`", help)
        return word.text

    # -- the policy as a whole ---------------------------------------------------------------------------------------

    def _complete(self, parts: _Parts) -> None:
        """Reports a budget without a score and the reverse, unless what is missing may be what has an error."""
        if self.broken & {ANYTHING, A_STATEMENT, "budget", "score"}:
            return
        if parts.budget is None:
            self._without_budget()
        elif parts.score is None:
            name = self.flat.syntax.name.span
            self.sink.report(codes.NO_SCORE, name, "the policy has a budget but no score", "add `score sum(attn)`, say")

    def _without_budget(self) -> None:
        help = "add `param budget = 512`, say"
        pointless = [*self.flat.settings.get("score", []), *self.flat.keeps]
        pointless += [placed for keyword in _COUNTS for placed in self.flat.settings.get(keyword, [])]
        if pointless:
            span = pointless[0].statement.span
            message = f"without a budget nothing is evicted, so `{span.text.split()[0]}` has no meaning"
            self.sink.report(codes.NO_BUDGET, span, message, help)
        for name in self.params.on_budget:
            message = "the policy has no budget that could be read here"
            self.sink.report(codes.NO_BUDGET, self.params.checked[name].span, message, help)

    def _unused(self, parts: _Parts) -> None:
        """Checks the lets that no statement uses, and warns of them and of params that nothing reads."""
        outer = self._scope(self.flat.module).outer
        definitions = [*self.own.values(), *(() if outer is None else outer.names.values())]
        lets = [one for one in definitions if isinstance(one, LetName) and not one.used]
        check_lets(lets, self.expressions)
        if self.broken or self.sink.failed():
            return
        exprs = parts.expressions() + [param.ir.default for param in self.params.checked.values()]
        read = {part.name for expr in exprs for part in walk(expr) if isinstance(part, ir.ParamRef)}
        params = [placed.statement for name, placed in self.flat.names.items() if name not in read]
        unread = [statement.name for statement in params if isinstance(statement, syn.Param)]
        for word in [*(definition.let.name for definition in lets), *unread]:
            if word.span.file is self.flat.module.file:
                self.sink.report(codes.UNUSED, word.span, f"`{word.text}` is never used")

    def _statics(self, parts: _Parts) -> None:
        if parts.budget is None:
            return
        params = {name: param.ir.default for name, param in self.params.checked.items()}
        found = self._setting("budget")
        span = self.params.checked["budget"].span if found is None else found[0].span
        statics = Statics(self.sink, params)
        statics.check_budget(Count(parts.budget.expr, span))
        for keep in parts.keeps:
            if keep.count is not None:
                statics.check_count(f"`keep {keep.ir.scope}`", keep.count)
        for keyword, count in parts.counts.items():
            statics.check_count(f"`{keyword}`", count)
        sized = [(keep.ir.scope, Count(keep.count.expr, keep.span)) for keep in parts.keeps if keep.count is not None]
        statics.check_keeps({scope: [c for s, c in sized if s == scope] for scope in ("first", "last", "top")})

    def _policy(self, parts: _Parts) -> ir.Policy:
        keeps = [keep.ir for keep in parts.keeps]
        if parts.budget is not None and not any(keep.scope == "last" for keep in keeps):
            keeps.append(ir.Keep(scope="last", count=ir.Number(value=1)))
        nothing = ir.Keep(scope="last", count=ir.Number(value=0))
        doc = self.flat.syntax.doc
        counts = _DEFAULTS | {keyword: count.expr for keyword, count in parts.counts.items()}
        return ir.Policy(
            edition=EDITION,
            name=self.flat.syntax.name.text,
            stem=self.flat.module.file.stem,
            doc="" if doc is None else clean_docstring(doc.text),
            params=tuple(param.ir for param in self.params.checked.values()),
            budget=None if parts.budget is None else parts.budget.expr,
            score=None if parts.score is None else parts.score.expr,
            keeps=tuple(keep for keep in keeps if keep != nothing),
            group=cast(Literal["mean", "max", "sum"], parts.group),
            positions=cast(Literal["original", "compact"], parts.positions),
            trigger=counts["trigger"],
            slack=counts["slack"],
            max_drop=counts["max_drop"],
        )


def clean_docstring(text: str) -> str:
    """A docstring without the indentation that its place in the file gives it."""
    first, *rest = text.strip().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.rstrip(), *(line[margin:].rstrip() for line in rest)])
