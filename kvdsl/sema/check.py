"""Checks a flat policy and makes the IR of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink, did_you_mean, listed
from kvdsl.ir import nodes as ir
from kvdsl.ir.nodes import Axis
from kvdsl.ir.visitors import walk
from kvdsl.sema import values
from kvdsl.sema.expressions import Expressions, axes_in_words
from kvdsl.sema.modules import EDITION, Module
from kvdsl.sema.resolve import FlatPolicy, Placed, check_definition
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
_FIXED = ("budget", "prompt", "layer", "layers")


def prelude_scope(prelude: syn.Module) -> Scope:
    """The names of the prelude."""
    scope = Scope({})
    for let in prelude.lets:
        scope.names[let.name.text] = LetName(let, scope, prelude=True)
    return scope


def module_scope(module: Module, prelude: Scope, sink: Sink) -> Scope:
    """The lets of a file and those that it imports; names mean what they mean in the file that defines them."""
    scope = Scope({}, prelude)
    first: dict[str, syn.Let] = {}
    inner = {other: module_scope(other, prelude, sink) for other in module.imports}
    for let, where in module.lets():
        name = let.name.text
        if where is module and not check_definition(let, sink):
            scope.names[name] = Bound(None)
        elif name in first:
            labels = [Label(first[name].name.span, "first here")]
            sink.report(codes.DUPLICATE, let.name.span, f"`{name}` is defined twice", labels=labels)
        else:
            first[name] = let
            scope.names[name] = LetName(let, scope if where is module else inner[where])
    return scope


def check_library(module: Module, prelude: Scope, sink: Sink) -> None:
    """Checks the lets of a file without a policy."""
    scope = module_scope(module, prelude, sink)
    _check_lets(list(scope.names.values()), Expressions(sink, lenient=module.broken))


def _check_lets(definitions: Iterable[Definition], expressions: Expressions) -> None:
    """Checks lets that nothing uses; of functions only the names, since their arguments are not known."""
    for definition in definitions:
        if isinstance(definition, LetName):
            let = definition.let
            if let.names is None:
                expressions.let(definition, let.name.span)
            else:
                unknown: dict[str, Definition] = {word.text: Bound(None) for word in let.names}
                expressions.check(let.value, Scope(unknown, definition.scope))


@dataclass
class _Param:
    """A param on its way to the IR."""

    ir: ir.Param
    value: Value
    span: Span


@dataclass
class Checker:
    """Checks one policy."""

    flat: FlatPolicy
    prelude: Scope
    sink: Sink
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expressions = Expressions(self.sink, lenient=ANYTHING in self.flat.broken)
        self.scopes: dict[Module, Scope] = {}
        self.own: dict[str, Definition] = {}
        self.params: dict[str, _Param] = {}
        self.broken = self.flat.broken

    def check(self) -> ir.Policy | None:
        """The policy's IR, or None after reports."""
        self._define()
        self._params()
        budget, score = self._budget(), self._score()
        keeps = [keep for placed in self.flat.keeps if (keep := self._keep(placed)) is not None]
        counts = {keyword: self._setting_count(keyword) for keyword in _COUNTS}
        group, positions = self._word("group", _GROUPS), self._word("positions", _POSITIONS)
        if positions == "compact":
            self._not_yet(self.flat.settings["positions"][-1])
        self._complete(budget, score)
        unused = self._unused_lets()
        _check_lets(unused, self.expressions)
        self._warn_of_unused(unused, budget, counts, keeps, score)
        if self.sink.failed():
            return None
        self._statics(budget, keeps, counts)
        if self.sink.failed():
            return None
        return self._policy(budget, score, [keep.ir for keep in keeps], counts, group, positions)

    # -- names -------------------------------------------------------------------------------------------------------

    def _define(self) -> None:
        """Makes the policy's own names known. `budget` is not one of them: it means the tokens kept, not the param."""
        for name, placed in self.flat.names.items():
            statement = placed.statement
            if isinstance(statement, syn.Let):
                self.own[name] = LetName(statement, self._scope(placed.module))
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

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _count(self, node: syn.Expr, placed: Placed, what: str) -> Value | None:
        """A number that is fixed once the prompt is known."""
        value = self._value(node, placed)
        return value if value is not None and self._is_fixed(value, node.span, what) else None

    def _is_fixed(self, value: Value, span: Span, what: str) -> bool:
        text = span.quoted()
        if value.axes:
            message = f"{what} is a single number, but `{text}` has {axes_in_words(value.axes)}"
            self.sink.report(codes.COUNT_AXES, span, message)
            return False
        for part in walk(value.expr):
            if isinstance(part, ir.Reduce):
                message = f"{what} cannot depend on what is cached, as `{text}` does"
                self.sink.report(codes.NOT_HERE, span, message, f"it can read params, {listed(_FIXED, 'and')}")
                return False
            if isinstance(part, ir.Input) and part.name not in _FIXED:
                message = f"`{part.name}` changes from step to step, so {what} cannot read it"
                self.sink.report(codes.NOT_HERE, span, message, f"it can read params, {listed(_FIXED, 'and')}")
                return False
        return True

    def _params(self) -> None:
        order = [name for name, placed in self.flat.names.items() if isinstance(placed.statement, syn.Param)]
        for index, name in enumerate(order):
            placed = self.flat.names[name]
            statement = cast(syn.Param, placed.statement)
            value = self._count(statement.value, placed, f"the default of `{name}`")
            low, high = self._range(statement, placed)
            span = statement.value.span
            setting = self.settings.get(name)
            if setting is not None:
                value, span = values.number(setting.value), setting.span
            if value is None or not self._reads_earlier(value, span, name, order[:index]):
                continue
            unit = None if statement.unit is None else statement.unit.text
            value = self._in_range(name, value, span, low, high, statement)
            param = ir.Param(name=name, default=value.expr, unit=unit, low=low, high=high)
            self.params[name] = _Param(param, value, span)

    def _reads_earlier(self, value: Value, span: Span, name: str, earlier: list[str]) -> bool:
        for part in walk(value.expr):
            if isinstance(part, ir.ParamRef) and part.name not in earlier:
                is_itself = part.name == name
                message = f"`{name}` is defined by itself" if is_itself else f"`{part.name}` is defined after `{name}`"
                help = None if is_itself else f"move `param {part.name}` before it"
                self.sink.report(codes.NOT_HERE, span, message, help)
                return False
            if name == "budget" and isinstance(part, ir.Input) and part.name == "budget":
                message = "the default of `budget` cannot read `budget`"
                self.sink.report(codes.BUDGET_CYCLE, span, message, "a rate of the prompt is written `0.25 * prompt`")
                return False
        return True

    def _range(self, statement: syn.Param, placed: Placed) -> tuple[float | None, float | None]:
        if statement.range is None:
            return None, None
        low, high = (self._end(end, placed) for end in (statement.range.low, statement.range.high))
        if low is not None and high is not None and low > high:
            text = statement.range.span.quoted()
            help = f"did you mean `{_plain(high)}..{_plain(low)}`?"
            self.sink.report(codes.EMPTY_RANGE, statement.range.span, f"the range `{text}` is empty", help)
            return None, None
        return low, high

    def _end(self, end: syn.Expr | None, placed: Placed) -> float | None:
        value = None if end is None else self._value(end, placed)
        if end is not None and value is not None and value.constant is None:
            message = f"the end of a range is a constant, but `{end.span.quoted()}` is not"
            self.sink.report(codes.EMPTY_RANGE, end.span, message)
        return None if value is None else value.constant

    def _in_range(
        self, name: str, value: Value, span: Span, low: float | None, high: float | None, statement: syn.Param
    ) -> Value:
        """The value, after a report if it lies outside of the range. A budget between 0 and 1 is a rate of the prompt."""
        given = value.constant
        if name == "budget" and given is not None and 0 < given < 1:
            rate = values.binary("*", values.number(given), values.read_input("prompt"))
            return values.call("max", values.number(1), rate)
        if given is not None and ((low is not None and given < low) or (high is not None and given > high)):
            assert statement.range is not None
            message = f"`{name}` is {_plain(given)}, but its range is `{statement.range.span.quoted()}`"
            labels = [Label(statement.range.span, "the range")]
            self.sink.report(codes.OUT_OF_RANGE, span, message, labels=labels)
        return value

    # -- statements --------------------------------------------------------------------------------------------------

    def _budget(self) -> Value | None:
        """The tokens to keep: the `budget` statements from the base on, or else the param `budget`."""
        parent = values.read_param("budget") if "budget" in self.flat.names else None
        value = parent
        for placed in self.flat.settings.get("budget", []):
            node = cast(syn.Setting, placed.statement).value
            assert node is not None
            names: dict[str, Definition] = {} if value is None else {"budget": Bound(value)}
            checked = self.expressions.check(node, Scope(names, self._scope(placed.module)))
            if checked is None or not self._is_fixed(checked, node.span, "the budget"):
                self.broken.add("budget")
                return None
            if self._reads_budget(checked):
                self.sink.report(codes.BUDGET_CYCLE, node.span, "the budget is computed from itself")
                self.broken.add("budget")
                return None
            value = checked
        return value

    def _reads_budget(self, value: Value) -> bool:
        """Whether a value needs the budget, itself or by the defaults of params."""
        for part in walk(value.expr):
            if isinstance(part, ir.Input) and part.name == "budget":
                return True
            param = self.params.get(part.name) if isinstance(part, ir.ParamRef) else None
            if param is not None and self._reads_budget(param.value):
                return True
        return False

    def _score(self) -> Value | None:
        if "score" not in self.flat.settings:
            return None
        placed = self.flat.settings["score"][-1]
        node = cast(syn.Setting, placed.statement).value
        assert node is not None
        value = self._value(node, placed)
        if value is not None and self._ranks(value, node.span, "a score"):
            return value
        self.broken.add("score")
        return None

    def _ranks(self, value: Value, span: Span, what: str) -> bool:
        """Whether an expression has one number per slot, so that tokens can be ranked by it."""
        if value.axes <= {Axis.SLOT}:
            return True
        text = span.quoted()
        message = f"{what} has one number per slot, but `{text}` has {axes_in_words(value.axes)}"
        if Axis.QUERY in value.axes and value.observes:
            help = "reduce its part over queries as well"
        elif Axis.QUERY in value.axes:
            help = f"reduce it over queries: `mean({text})`, `sum({text})` or `last({text})`"
            if Axis.DIM in value.axes:
                help = f"reduce it, first over dims: `mean(sum({text} over dims))`"
        else:
            help = f"reduce it over dims: `sum({text} over dims)`"
        self.sink.report(codes.SCORE_AXES, span, message, help)
        return False

    def _keep(self, placed: Placed) -> _CheckedKeep | None:
        statement = cast(syn.Keep, placed.statement)
        scope = cast(Literal["first", "last", "top", "where"], statement.scope)
        count = by = None
        if statement.count is not None:
            count = self._count(statement.count, placed, f"the count of `keep {scope}`")
        if statement.by is not None:
            by = self._value(statement.by, placed)
            if by is not None and not self._keep_by(by, statement.by.span, scope):
                by = None
        if (statement.count is not None and count is None) or (statement.by is not None and by is None):
            return None
        keep = ir.Keep(scope=scope, count=None if count is None else count.expr, by=None if by is None else by.expr)
        return _CheckedKeep(keep, count, statement)

    def _keep_by(self, by: Value, span: Span, scope: str) -> bool:
        if scope == "top":
            return self._ranks(by, span, "what `keep top` ranks by")
        return self.expressions.condition(by, span, "`keep where`") and self._ranks(by, span, "a condition on slots")

    def _setting_count(self, keyword: str) -> tuple[Value, syn.Setting] | None:
        if keyword not in self.flat.settings:
            return None
        placed = self.flat.settings[keyword][-1]
        statement = cast(syn.Setting, placed.statement)
        assert statement.value is not None
        value = self._count(statement.value, placed, f"`{keyword}`")
        return None if value is None else (value, statement)

    def _word(self, keyword: str, known: tuple[str, ...]) -> str:
        if keyword not in self.flat.settings:
            return known[0]
        word = cast(syn.Setting, self.flat.settings[keyword][-1].statement).word
        assert word is not None
        if word.text not in known:
            help = did_you_mean(word.text, known) or f"`{keyword}` is {listed(known)}"
            self.sink.report(codes.OPTION, word.span, f"`{keyword}` cannot be `{word.text}`", help)
        return word.text

    def _not_yet(self, placed: Placed) -> None:
        span = placed.statement.span
        self.sink.report(codes.NOT_YET, span, f"`{span.quoted(40)}` is not available in this version of kvdsl")

    # -- the policy as a whole ---------------------------------------------------------------------------------------

    def _complete(self, budget: Value | None, score: Value | None) -> None:
        """Reports a budget without a score and the reverse, unless what is missing may be what has an error."""
        if self.broken & {ANYTHING, A_STATEMENT, "budget", "score"}:
            return
        name = self.flat.syntax.name.span
        if budget is not None and score is None:
            self.sink.report(codes.NO_SCORE, name, "the policy has a budget but no score", "add `score sum(attn)`, say")
        pointless = self.flat.settings.get("score", []) + self.flat.keeps
        pointless += [placed for keyword in _COUNTS for placed in self.flat.settings.get(keyword, [])]
        if budget is None and pointless:
            what = pointless[0].statement.span
            word = what.text.split()[0] if not what.text.startswith("override") else what.text.split()[1]
            message = f"without a budget nothing is evicted, so `{word}` has no meaning"
            self.sink.report(codes.NO_BUDGET, what, message, "add `param budget = 512`, say")
        if budget is None:
            for param in self.params.values():
                if self._reads_budget(param.value):
                    message = "the policy has no budget that could be read here"
                    self.sink.report(codes.NO_BUDGET, param.span, message, "add `param budget = 512`, say")

    def _unused_lets(self) -> list[LetName]:
        """The lets of the policy and of its file that no statement uses."""
        outer = self._scope(self.flat.module).outer
        definitions = [*self.own.values(), *(() if outer is None else outer.names.values())]
        return [one for one in definitions if isinstance(one, LetName) and not one.used]

    def _warn_of_unused(
        self,
        lets: list[LetName],
        budget: Value | None,
        counts: Mapping[str, tuple[Value, syn.Setting] | None],
        keeps: list[_CheckedKeep],
        score: Value | None,
    ) -> None:
        """Warns of names that nothing reads. What stands in the IR counts; a let is used where it was put in."""
        if self.broken:
            return
        for definition in lets:
            self._warn_unused(definition.let.name.text, definition.let.name.span)
        read: set[str] = set()
        roots = [value for value in (budget, score) if value is not None]
        exprs = [root.expr for root in roots] + [found[0].expr for found in counts.values() if found is not None]
        exprs += [expr for keep in keeps for expr in (keep.ir.count, keep.ir.by) if expr is not None]
        exprs += [param.value.expr for param in self.params.values()]
        for expr in exprs:
            read |= {part.name for part in walk(expr) if isinstance(part, ir.ParamRef)}
        for name, placed in self.flat.names.items():
            if isinstance(placed.statement, syn.Param) and name not in read:
                self._warn_unused(name, placed.statement.name.span)

    def _warn_unused(self, name: str, span: Span) -> None:
        if span.file is self.flat.module.file and not self.sink.failed():
            self.sink.report(codes.UNUSED, span, f"`{name}` is never used")

    def _statics(
        self,
        budget: Value | None,
        keeps: list[_CheckedKeep],
        counts: Mapping[str, tuple[Value, syn.Setting] | None],
    ) -> None:
        statics = Statics(self.sink)
        for name, param in self.params.items():
            statics.params[name] = Count(param.value.expr, param.span)
        if budget is None:
            return
        placed = self.flat.settings.get("budget")
        if placed:
            node = cast(syn.Setting, placed[-1].statement).value
            assert node is not None
            span = node.span
        else:
            span = self.params["budget"].span
        statics.check_budget(Count(budget.expr, span))
        for keep in keeps:
            if keep.count is not None and keep.syntax.count is not None:
                statics.check_count(f"`keep {keep.ir.scope}`", Count(keep.count.expr, keep.syntax.count.span))
        for keyword, found in counts.items():
            if found is not None and found[1].value is not None:
                statics.check_count(f"`{keyword}`", Count(found[0].expr, found[1].value.span))
        statics.check_keeps(
            {
                scope: [Count(k.count.expr, k.syntax.span) for k in keeps if k.ir.scope == scope and k.count is not None]
                for scope in ("first", "last", "top")
            }
        )

    def _policy(
        self,
        budget: Value | None,
        score: Value | None,
        keeps: list[ir.Keep],
        counts: Mapping[str, tuple[Value, syn.Setting] | None],
        group: str,
        positions: str,
    ) -> ir.Policy:
        if budget is not None and not any(keep.scope == "last" for keep in keeps):
            keeps.append(ir.Keep(scope="last", count=ir.Number(value=1)))
        nothing = ir.Keep(scope="last", count=ir.Number(value=0))
        given: dict[str, Any] = {keyword: found[0].expr for keyword, found in counts.items() if found is not None}
        doc = self.flat.syntax.doc
        return ir.Policy(
            edition=EDITION,
            name=self.flat.syntax.name.text,
            stem=self.flat.module.file.stem,
            doc="" if doc is None else clean_docstring(doc.text),
            params=tuple(param.ir for param in self.params.values()),
            budget=None if budget is None else budget.expr,
            score=None if score is None else score.expr,
            keeps=tuple(keep for keep in keeps if keep != nothing),
            group=cast(Literal["mean", "max", "sum"], group),
            positions=cast(Literal["original", "compact"], positions),
            **given,
        )


@dataclass(frozen=True)
class _CheckedKeep:
    ir: ir.Keep
    count: Value | None
    syntax: syn.Keep


def clean_docstring(text: str) -> str:
    """A docstring without the indentation that its place in the file gives it."""
    first, *rest = text.strip().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.rstrip(), *(line[margin:].rstrip() for line in rest)])


def _plain(value: float) -> str:
    from kvdsl.ir.printer import print_number

    return print_number(value)
