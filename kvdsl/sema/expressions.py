"""Checks expressions and turns them into IR: names, functions and reductions, with lets put in where they are used.

A function's body is checked in the scope of its definition with its arguments already turned into values, so a name in an
argument can never be taken for one in the body. An expression with an error has the value None, about which nothing more is
said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast, get_args

from kvdsl import codes
from kvdsl.codes import Code
from kvdsl.diagnostics import Label, Sink, did_you_mean, listed
from kvdsl.ir.axes import INPUT_AXES
from kvdsl.ir.nodes import Axis, Function, InputName, Operator, Random, ReduceOp
from kvdsl.ir.visitors import walk
from kvdsl.sema import values
from kvdsl.sema.scope import Bound, Definition, LetName, ParamName, Scope
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.shape import MAX_DEPTH

MAX_PARTS = 1_000
MAX_STEPS = 20_000

INPUTS = frozenset(INPUT_AXES) - {"observed"}
REDUCTIONS = ("sum", "mean", "std", "var", "max", "min", "last")
ELEMENTWISE = {"abs": 1, "sqrt": 1, "exp": 1, "log": 1, "floor": 1, "ceil": 1, "where": 3}
BUILTIN_FUNCTIONS = frozenset({*REDUCTIONS, *ELEMENTWISE, "count", "random", "dot", "ema", "max_pool", "pyramid"})
BUILTINS = INPUTS | BUILTIN_FUNCTIONS

_AXES = {"queries": Axis.QUERY, "slots": Axis.SLOT, "dims": Axis.DIM}
_LATER_AXES = ("page", "sketch")
_LATER_FUNCTIONS = ("ema", "max_pool", "pyramid")


def axes_in_words(axes: frozenset[Axis]) -> str:
    """`one number per query and slot`."""
    names = [axis.value for axis in Axis if axis in axes]
    if not names:
        return "a single number"
    return "one number per " + (names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}")


@dataclass(frozen=True)
class _Use:
    """A let or function that is being put in, and where it is used."""

    definition: LetName
    span: Span


class Expressions:
    """Checks expressions, reporting to a sink.

    Args:
        lenient: says nothing about unknown names, because something that would define names could not be read.
    """

    def __init__(self, sink: Sink, lenient: bool = False) -> None:
        self.sink, self.lenient = sink, lenient
        self._uses: list[_Use] = []
        self._lets: dict[LetName, Value | None] = {}
        self._unknown: set[Span] = set()
        self._depth = 0
        self._steps = 0

    def check(self, node: syn.Expr, scope: Scope) -> Value | None:
        """The value of an expression, or None after a report."""
        if isinstance(node, syn.Broken):
            return None
        self._depth += 1
        self._steps += 1
        try:
            if self._depth > MAX_DEPTH or self._steps > MAX_STEPS:
                if self._steps <= MAX_STEPS + 1:  # said once, since everything after it is too large as well
                    self._too_large(node.span)
                return None
            value = self._dispatch(node, scope)
        finally:
            self._depth -= 1
        if value is not None and (value.parts > MAX_PARTS or value.depth > MAX_DEPTH):
            self._too_large(node.span)
            return None
        return value

    def _dispatch(self, node: syn.Constant | syn.Name | syn.Unary | syn.Binary | syn.Call, scope: Scope) -> Value | None:
        if isinstance(node, syn.Constant):
            return values.number(node.value)
        if isinstance(node, syn.Name):
            return self._name(node, scope)
        if isinstance(node, syn.Unary):
            return self._unary(node, scope)
        if isinstance(node, syn.Binary):
            return self._binary(node, scope)
        return self._call(node, scope)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self, code: Code, span: Span, message: str, help: str | None = None, labels: Iterable[Label] = ()) -> None:
        """An error at a place; what goes wrong inside of the prelude is shown where the prelude is used."""
        uses = [use for use in self._uses if use.definition.prelude]
        if uses:
            self.sink.report(code, uses[0].span, message, help)
            return
        used = [Label(use.span, "used here") for use in reversed(self._uses)]
        self.sink.report(code, span, message, help, [*labels, *used[:1]])

    def _speaks_of(self, span: Span) -> bool:
        """Whether an unknown name at a place is worth a report: not if there was one, or if there is no knowing."""
        if self.lenient or self.sink.full or span in self._unknown:
            return False
        self._unknown.add(span)
        return True

    def _too_large(self, span: Span) -> None:
        outermost = self._uses[0].span if self._uses else span
        message = "the expression is too large, with its lets and functions put in"
        help = f"an expression has at most {MAX_PARTS:,} parts, nested at most {MAX_DEPTH} deep"
        self.sink.report(codes.TOO_DEEP, outermost, message, help)

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, node: syn.Name, scope: Scope) -> Value | None:
        definition = scope.find(node.name)
        if definition is not None:
            return self._defined(node, definition)
        if node.name in INPUTS:
            return values.read_input(cast(InputName, node.name))
        if node.name in BUILTIN_FUNCTIONS:
            help = f"write `{node.name}()`" if node.name in ("count", "random") else f"write `{node.name}(...)`"
            self._report(codes.NOT_A_FUNCTION, node.span, f"`{node.name}` is a function, not a value", help)
            return None
        if not self._speaks_of(node.span):
            return None
        help_text = did_you_mean(node.name, {*scope.known(), *INPUTS})
        self._report(codes.UNKNOWN_NAME, node.span, f"unknown name `{node.name}`", help_text)
        return None

    def _defined(self, node: syn.Name, definition: Definition) -> Value | None:
        if isinstance(definition, Bound):
            return definition.value
        definition.used = True
        if isinstance(definition, ParamName):
            return values.read_param(definition.name)
        if definition.let.names is None:
            return self.let(definition, node.span)
        help = f"write `{node.name}({', '.join(word.text for word in definition.let.names)})`"
        self._report(codes.NOT_A_FUNCTION, node.span, f"`{node.name}` is a function, not a value", help)
        return None

    def let(self, definition: LetName, span: Span) -> Value | None:
        """The value of a let, used at a place."""
        if definition not in self._lets:
            with self._using(definition, span) as free:
                if not free:
                    return None
                self._lets[definition] = self.check(definition.let.value, definition.scope)
        return self._lets[definition]

    @contextmanager
    def _using(self, definition: LetName, span: Span) -> Iterator[bool]:
        """Puts a definition in; False after a report if it is being put in already."""
        if any(use.definition is definition for use in self._uses):
            name = definition.let.name
            message = f"`{name.text}` is defined by itself"
            self.sink.report(codes.CYCLE, name.span, message, labels=[Label(span, "used here again")])
            yield False
            return
        self._uses.append(_Use(definition, span))
        try:
            yield True
        finally:
            self._uses.pop()

    # -- operators ---------------------------------------------------------------------------------------------------

    def _unary(self, node: syn.Unary, scope: Scope) -> Value | None:
        operand = self.check(node.operand, scope)
        if operand is None:
            return None
        if node.op == "-":
            return values.call("neg", operand)
        return values.call("not", operand) if self.condition(operand, node.operand.span, "`not`") else None

    def _binary(self, node: syn.Binary, scope: Scope) -> Value | None:
        left, right = self.check(node.left, scope), self.check(node.right, scope)
        if left is None or right is None:
            return None
        op = cast(Operator, node.op)
        if op in values.LOGICAL:
            sides = ((left, node.left.span), (right, node.right.span))
            if not all([self.condition(value, span, f"`{op}`") for value, span in sides]):
                return None
        if op in ("/", "%") and right.constant == 0:
            self._report(codes.NO_VALUE, node.span, f"`{node.span.quoted()}` divides by zero")
            return None
        return self._finite(values.binary(op, left, right), (left, right), node.span)

    def condition(self, value: Value, span: Span, what: str) -> bool:
        """Whether a value is a condition, as `what` needs; reports if not."""
        if value.condition:
            return True
        text = span.quoted()
        self._report(
            codes.CONDITION, span, f"{what} needs a condition, but `{text}` is a number", f"compare it: `{text} > 0`"
        )
        return False

    def _finite(self, value: Value, args: tuple[Value, ...], span: Span) -> Value | None:
        if value.constant is None and all(arg.constant is not None for arg in args):
            self._report(codes.NO_VALUE, span, f"`{span.quoted()}` has no finite value")
            return None
        return value

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        definition = scope.find(name)
        if isinstance(definition, LetName) and definition.let.names is not None:
            definition.used = True
            return self._expand(node, definition, definition.let.names, scope)
        if definition is not None or name in INPUTS:
            message = f"`{name}` is not a function"
            self._report(codes.NOT_A_FUNCTION, node.function.span, message, "leave out the parentheses")
            return None
        if name in _LATER_FUNCTIONS:
            self._not_yet(node.span, f"`{name}(...)`")
            return None
        if name in ("max", "min") and len(node.arguments) > 1:
            return self._extreme(node, cast(Function, name), scope)
        if name in REDUCTIONS:
            return self._reduction(node, cast(ReduceOp, name), scope)
        if name in BUILTIN_FUNCTIONS:
            return self._function(node, scope)
        if not self._speaks_of(node.function.span):
            return None
        functions = {name for name in scope.known() if _is_function(scope.find(name))}
        help = did_you_mean(name, BUILTIN_FUNCTIONS | functions)
        self._report(codes.UNKNOWN_FUNCTION, node.function.span, f"unknown function `{name}`", help)
        return None

    def _expand(self, node: syn.Call, definition: LetName, names: tuple[syn.Word, ...], scope: Scope) -> Value | None:
        args = self._arguments(node, len(names), scope)
        if args is None:
            return None
        bound: dict[str, Definition] = {word.text: Bound(arg) for word, arg in zip(names, args, strict=True)}
        with self._using(definition, node.span) as free:
            return self.check(definition.let.value, Scope(bound, definition.scope)) if free else None

    def _function(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        if name in ("count", "random"):
            return self._without_arguments(node)
        count = 2 if name == "dot" else ELEMENTWISE[name]
        args = self._arguments(node, count, scope)
        if args is None or any(arg is None for arg in args):
            return None
        known = tuple(arg for arg in args if arg is not None)
        if name == "dot":
            return self._reduced(node, "sum", Axis.DIM, values.binary("*", *known))
        if name == "where" and not self.condition(known[0], node.arguments[0].value.span, "`where`"):
            return None
        return self._finite(values.call(cast(Function, name), *known), known, node.span)

    def _without_arguments(self, node: syn.Call) -> Value | None:
        name = node.function.text
        if not node.arguments:
            return values.read_input("observed") if name == "count" else values.random()
        help = None
        if name == "count":
            text = node.arguments[0].value.span.quoted()
            help = f"to count the queries for which something holds, sum it: `sum({text})`"
        self._report(codes.ARGUMENTS, node.span, f"`{name}()` takes no arguments", help)
        return None

    def _extreme(self, node: syn.Call, name: Function, scope: Scope) -> Value | None:
        """`max(a, b, ...)`: the largest of several values, two at a time."""
        args = self._arguments(node, len(node.arguments), scope)
        if args is None or any(arg is None for arg in args):
            return None
        first, *rest = (arg for arg in args if arg is not None)
        for arg in rest:
            first = values.call(name, first, arg)
        return first

    def _arguments(self, node: syn.Call, count: int, scope: Scope) -> list[Value | None] | None:
        """The values of a call's plain arguments; None after a report if there are not `count` of them."""
        name, given = node.function.text, len(node.arguments)
        for argument in node.arguments:
            if argument.keyword is not None:
                message = f"`{name}` has no argument named `{argument.keyword.text}`"
                self._report(codes.ARGUMENTS, argument.keyword.span, message)
                return None
            if argument.over is not None:
                self._over_without_reduction(name, argument.over)
                return None
        if given != count:
            wants = f"{count} argument{'' if count == 1 else 's'}"
            message = f"`{name}` takes {wants}, but {given} {'is' if given == 1 else 'are'} given"
            self._report(codes.ARGUMENTS, node.span, message)
            return None
        return [self.check(argument.value, scope) for argument in node.arguments]

    def _over_without_reduction(self, name: str, over: syn.Over) -> None:
        if over.axis.text in _LATER_AXES:
            self._not_yet(over.span, f"`over {over.axis.text}`")
            return
        message = f"`{name}` is not a reduction of one value, so `over` has no meaning here"
        self._report(codes.ARGUMENTS, over.span, message, f"the reductions are {listed(REDUCTIONS, 'and')}")

    def _not_yet(self, span: Span, what: str) -> None:
        self._report(codes.NOT_YET, span, f"{what} is not available in this version of kvdsl")

    # -- reductions --------------------------------------------------------------------------------------------------

    def _reduction(self, node: syn.Call, op: ReduceOp, scope: Scope) -> Value | None:
        if len(node.arguments) != 1 or node.arguments[0].keyword is not None:
            self._report(codes.ARGUMENTS, node.span, f"`{op}` reduces exactly one value", f"for example `{op}(attn)`")
            return None
        argument = node.arguments[0]
        axis = Axis.QUERY if argument.over is None else self._axis(argument.over)
        body = self.check(argument.value, scope)
        return None if axis is None or body is None else self._reduced(node, op, axis, body)

    def _axis(self, over: syn.Over) -> Axis | None:
        if over.last is not None:
            self._not_yet(over.span, "`over last N queries`")
            return None
        name = over.axis.text
        if name in _LATER_AXES:
            self._not_yet(over.span, f"`over {name}`")
            return None
        if name not in _AXES:
            help = did_you_mean(name, _AXES) or f"the axes are {listed(_AXES, 'and')}"
            self._report(codes.AXIS, over.axis.span, f"unknown axis `{name}`", help)
            return None
        return _AXES[name]

    def _reduced(self, node: syn.Call, op: ReduceOp, axis: Axis, body: Value) -> Value | None:
        argument = node.arguments[0].value
        if axis is Axis.QUERY and body.observes:
            self._nested(node, op)
            return None
        if axis not in body.axes:
            self._no_axis(node, op, axis, body)
            return None
        if op == "last" and axis is not Axis.QUERY:
            self._report(codes.ARGUMENTS, node.span, "`last` reduces over queries only")
            return None
        if axis is Axis.QUERY and any(isinstance(part, Random) for part in walk(body.expr)):
            message = "`random()` has no value for a single query"
            self._report(codes.RANDOM, argument.span, message, "draw it outside of the reduction")
            return None
        return values.reduce(op, axis, body)

    def _nested(self, node: syn.Call, op: ReduceOp) -> None:
        inner = _inner_reduction(node.arguments[0].value)
        span = node.arguments[0].value.span if inner is None else inner.span
        help = None
        if inner is not None and inner.function.text != "count":
            text = inner.arguments[0].value.span.quoted()
            help = f"over the cached tokens it would be `{inner.function.text}({text} over slots)`"
        message = f"a reduction over queries cannot stand inside `{op}(...)`, which is one itself"
        self._report(codes.NESTED, span, message, help)

    def _no_axis(self, node: syn.Call, op: ReduceOp, axis: Axis, body: Value) -> None:
        name = node.function.text
        if name == "dot":
            message = "`dot` multiplies and sums over dims, but neither of its arguments has any"
            self._report(codes.REDUCTION, node.span, message, "for example `dot(q, k)`")
            return
        plural = {value: name for name, value in _AXES.items()}
        text = node.arguments[0].value.span.quoted()
        help = "leave the reduction out"
        if body.axes:
            others = [plural[other] for other in (Axis.SLOT, Axis.DIM, Axis.QUERY) if other in body.axes]
            call = f"{name}({text})" if others[0] == "queries" else f"{name}({text} over {others[0]})"
            help = f"did you mean `{call}`?"
        message = f"`{text}` has no {plural[axis]} to reduce over: it is {axes_in_words(body.axes)}"
        self._report(codes.REDUCTION, node.arguments[0].value.span, message, help)


def _is_function(definition: Definition | None) -> bool:
    return isinstance(definition, LetName) and definition.let.names is not None


def _inner_reduction(node: syn.Expr) -> syn.Call | None:
    """The first reduction over queries that is written in an expression."""
    if isinstance(node, syn.Call):
        over = node.arguments[0].over if node.arguments else None
        reduces = node.function.text == "count" or (node.function.text in REDUCTIONS and len(node.arguments) == 1)
        if reduces and (over is None or over.axis.text == "queries"):
            return node
        parts: tuple[syn.Expr, ...] = tuple(argument.value for argument in node.arguments)
    elif isinstance(node, syn.Binary):
        parts = (node.left, node.right)
    else:
        parts = (node.operand,) if isinstance(node, syn.Unary) else ()
    return next((found for found in map(_inner_reduction, parts) if found is not None), None)


assert set(REDUCTIONS) < set(get_args(ReduceOp))
