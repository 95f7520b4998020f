"""Check expressions and turn them into IR; lets and functions are inlined where they are used.

A function's body is checked in the scope of its definition, with its arguments already evaluated. So a name in an argument never
captures one of the body. An expression with an error has the value None, which suppresses further reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean
from kvdsl.helps import Help, add, instead, offer
from kvdsl.ir.nodes import Axis, Expr
from kvdsl.ir.ops import ELEMENTWISE, LOGICAL, NAMED_FUNCTIONS, NAMED_INPUTS, REDUCTIONS, ReductionRow
from kvdsl.ir.visitors import depth_of, walk
from kvdsl.passes.fold import value_of
from kvdsl.passes.known import known
from kvdsl.sema import values
from kvdsl.sema.arguments import example, how_to_call, match_arguments, without_ranges
from kvdsl.sema.forms import Forms
from kvdsl.sema.reductions import Over, in_fewer_words, vector
from kvdsl.sema.scope import Bound, Definition, GivenName, LetName, ParamName, Scope, SlotName, TensorName, is_function
from kvdsl.sema.statics import Bounded, Part
from kvdsl.sema.uses import Handed
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.shape import MAX_DEPTH

MAX_PARTS = 1_000
MAX_STEPS = 20_000

_PRELUDE_DEPTH = 20
"""The deepest nesting of the prelude's functions in each other."""


class Expressions(Forms):
    """Checker of expressions, which reports to a sink.

    Args:
        lenient: whether to accept unknown names, because a definition may be in unreadable text.

    Attributes:
        vectors: reductions over queries that would need a vector per token, each with its report.
    """

    def __init__(self, sink: Sink, lenient: bool = False) -> None:
        super().__init__(sink)
        self.sink, self.lenient = sink, lenient
        self.vectors: dict[Expr, Callable[[], None]] = {}
        self._lets: dict[LetName, Value | None] = {}
        self._unknown: set[Span] = set()
        self._depth = 0
        self._steps = 0

    def check(self, node: syn.Expr, scope: Scope) -> Value | None:
        """Return the value of an expression, or None after a report."""
        if isinstance(node, syn.Broken):  # reported, perhaps because it is too deep
            return None
        self._depth += 1
        self._steps += 1
        try:
            if self._is_too_deep() or self._steps > MAX_STEPS:
                if self._steps <= MAX_STEPS + 1:  # report once: everything after it is too large as well
                    self._too_large(node.span)
                return None
            value = self._dispatch(node, scope)
        finally:
            self._depth -= 1
        if value is not None and (value.parts > MAX_PARTS or value.depth > MAX_DEPTH):
            self._too_large(node.span)
            return None
        return value

    def _is_too_deep(self) -> bool:
        """Return whether the source is nested too deep, not counting the prelude's own nesting."""
        return self._depth > MAX_DEPTH and (self._depth > MAX_DEPTH + _PRELUDE_DEPTH or self.uses.prelude is None)

    def _dispatch(
        self, node: syn.Constant | syn.Name | syn.Unary | syn.Binary | syn.Call | syn.Member, scope: Scope
    ) -> Value | None:
        match node:
            case syn.Constant():
                return values.number(node.value)
            case syn.Name():
                return self._name(node, scope)
            case syn.Unary():
                return self._unary(node, scope)
            case syn.Binary():
                return self._binary(node, scope)
            case syn.Member():
                return self._member(node, scope)
            case syn.Call():
                return self._call(node, scope)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _speaks_of(self, span: Span) -> bool:
        """Return whether to report an unknown name at a place: once, and not in unreadable files."""
        if self.lenient or self.sink.full or span in self._unknown:
            return False
        self._unknown.add(span)
        return True

    def _too_large(self, span: Span) -> None:
        message = "the expression is too large, with its lets and functions put in"
        help = f"an expression has at most {MAX_PARTS:,} parts, nested at most {MAX_DEPTH} deep"
        self.sink.report(codes.TOO_DEEP, self.uses.outermost(span), message, help)

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, node: syn.Name, scope: Scope) -> Value | None:
        definition = scope.find(node.name)
        if definition is not None:
            return self._defined(node, definition, scope)
        if node.name in NAMED_INPUTS:
            return values.read_input(node.name)
        if node.name in NAMED_FUNCTIONS:
            written = offer(f"write `{node.name}()`") if node.name in ("count", "random") else example(node.name)
            help = habits.of_name(node.name) or written
            self._report(codes.NOT_A_FUNCTION, node.span, f"`{node.name}` is a function, not a value", help)
            return None
        if not self._speaks_of(node.span):
            return None
        known = {*_values_of(scope), *NAMED_INPUTS} - self.uses.names()
        help_text = habits.of_name(node.name) or did_you_mean(node.name, known)
        more = f", `let {node.name} = ...`, or `given {node.name}`, a number of each token, if it is yours"
        help_text = help_text or add(f"add `param {node.name} = 1`", more)
        self._report(codes.UNKNOWN_NAME, node.span, f"unknown name `{node.name}`", help_text)
        return None

    def _defined(self, node: syn.Name, definition: Definition, scope: Scope) -> Value | None:
        definition.used = True
        match definition:
            case Bound(value=value):
                is_of_slot = value is not None and Axis.OTHER in value.axes
                return None if is_of_slot and self._is_farther(node.name, node.span, scope) else value
            case ParamName(name=name):
                return values.read_param(name)
            case TensorName(tensor=tensor) if "rank" in tensor.axes:
                help = offer(f"write `project(k, {node.name})`", ", say")
                self._report(codes.PROJECT, node.span, f"`{node.name}` is a matrix, which projects vectors", help)
            case TensorName(tensor=tensor):
                return values.read_tensor(tensor)
            case GivenName(given=given):
                return values.read_given(given)
            case SlotName():
                help = offer(f"write `{node.name}.position`, say")
                self._report(codes.OTHERS, node.span, f"`{node.name}` is a slot, not a value", help)
            case LetName(let=syn.Let(parameters=None)):
                return self.let(definition, node.span)
            case LetName(let=let):
                names = (parameter.name.text for parameter in let.parameters or ())
                form = f"its form is `{node.name}({', '.join(names)})`"
                self._report(codes.NOT_A_FUNCTION, node.span, f"`{node.name}` is a function, not a value", form)
        return None

    def let(self, definition: LetName, span: Span) -> Value | None:
        """Return the value of a let used at a place."""
        if definition not in self._lets:
            with self.uses.entered(definition, span) as free:
                if not free:
                    return None
                self._lets[definition] = self.check(definition.let.value, definition.scope)
        return self._lets[definition]

    def _member(self, node: syn.Member, scope: Scope) -> Value | None:
        """Check `j.position`, a value of the slot j."""
        owner, definition = node.owner.text, scope.find(node.owner.text)
        match definition:
            case SlotName():
                definition.used = True
                body = self.check(node.value, scope)
                if self._is_farther(owner, node.span, scope):
                    return None
                return None if body is None else self.reductions.other(node.value.span, body, f"{owner}.({{}})", node.span)
            case Bound(value=None):
                return None
        text, value = node.span.quoted(), node.value.span.quoted()
        help = offer(f"name a slot: `sum({text} over slots as {owner})`, say", at=node.span)
        if isinstance(node.value, syn.Name) and value in NAMED_FUNCTIONS:
            help = offer(f"write `{value}({owner})`", at=node.span)
        self._report(codes.OTHERS, node.owner.span, f"`{owner}` is no slot, so `{text}` has no meaning", help)
        return None

    def _is_farther(self, name: str, span: Span, scope: Scope) -> bool:
        """Report a slot other than the nearest named one, or a value of it; return whether it is one."""
        nearer = scope.nearer_slot(name)
        if nearer is None:
            return False
        message = f"this compares a slot with `{nearer}`, so it cannot read `{span.quoted()}` of a third slot"
        help = "to read the reduction of slot j, write `j.(sum(i.age over slots as i where i.age < age))`"
        self._report(codes.OTHERS, span, message, help)
        return True

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
        op = node.op
        if op in LOGICAL:
            sides = ((left, node.left.span), (right, node.right.span))
            if not all([self.condition(value, span, f"`{op}`") for value, span in sides]):
                return None
        if op in ("/", "%") and right.constant == 0:
            self._report(codes.NO_VALUE, node.span, f"`{node.span.quoted()}` divides by zero")
            return None
        return self._finite(values.call(op, left, right), (left, right), node.span)

    def condition(self, value: Value, span: Span, what: str) -> bool:
        """Return whether a value is a condition, as `what` needs; report it otherwise."""
        if value.condition:
            return True
        text = span.quoted()
        self._report(
            codes.CONDITION,
            span,
            f"{what} needs a condition, but `{text}` is a {'vector' if Axis.DIM in value.axes else 'number'}",
            self._compared(value, text),
        )
        return False

    def _compared(self, value: Value, text: str) -> Help:
        """Return a help that turns numbers into a condition."""
        number = text if Axis.DIM not in value.axes else f"norm2({text})"
        if Axis.QUERY in value.axes and not self.reductions.around:
            number = f"mean({number})"
        return offer(f"compare it: `{number} > {1 if Axis.DIM in value.axes else 0}`")

    def _finite(self, value: Value, args: tuple[Value, ...], span: Span) -> Value | None:
        if value.constant is None and all(arg.constant is not None for arg in args):
            self._report(codes.NO_VALUE, span, f"`{span.quoted()}` has no finite value")
            return None
        return value

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        function, definition = scope.function(name), scope.find(name)
        if function is not None and function.let.parameters is not None:
            function.used = True
            return self._expand(node, function, function.let.parameters, scope)
        if isinstance(definition, Bound) and definition.value is None:
            return None
        if definition is not None or name in NAMED_INPUTS - NAMED_FUNCTIONS:
            message = f"`{name}` is not a function"
            self._report(
                codes.NOT_A_FUNCTION, node.function.span, message, instead("leave out the parentheses", name, node.span)
            )
            return None
        if name in ("max", "min") and len(node.arguments) > 1:
            return self._extreme(node, name, scope)
        if name in REDUCTIONS:
            return self._reduction(node, REDUCTIONS[name], scope)
        if name in NAMED_FUNCTIONS:
            return self._function(node, scope)
        if not self._speaks_of(node.function.span):
            return None
        functions = {name for name in scope.known() if is_function(scope.find(name))}
        habit = habits.FUNCTIONS.get(name)
        help = did_you_mean(name, NAMED_FUNCTIONS | functions) if habit is None else habit.filled(node)
        help = help or f"a function of yours is a `let`: `let {name}(x) = ...`"
        self._report(codes.UNKNOWN_FUNCTION, node.function.span, f"unknown function `{name}`", help)
        return None

    def _expand(
        self, node: syn.Call, definition: LetName, parameters: tuple[syn.Parameter, ...], scope: Scope
    ) -> Value | None:
        """Inline a function. A default may read what the body reads, and earlier parameters."""
        written = match_arguments(node, parameters, self._report)
        if written is None:
            return None
        ranging = [argument for argument in node.arguments if argument.ranges is not None]
        ranged = ranging[0] if ranging else None
        if len(ranging) > 1 and ranging[1].ranges is not None:
            message = f"only one argument of `{node.function.text}` can have a range"
            self._report(codes.ARGUMENTS, ranging[1].ranges, message, without_ranges(ranging[1].ranges))
            return None
        handed, inside = self.uses.handed, scope
        if ranged is not None:
            over, inside = self.ranges.of(ranged, scope, Over())
            if over is None:
                return None
            handed = Handed(over, named=ranged.over is not None)
        arguments = {
            name: Bound(self.check(value, inside if ranged is not None and value is ranged.value else scope))
            for name, value in written.items()
        }
        bound: dict[str, Definition] = {}
        inner = Scope(bound, definition.scope)
        defaults = {one.name.text: one.default for one in parameters if one.default is not None}
        texts = {name: value.span.quoted(40) for name, value in (defaults | written).items()}
        with self.uses.entered(definition, node.span, texts, handed) as free:
            if not free:
                return None
            for parameter in parameters:
                name, default = parameter.name.text, parameter.default
                bound[name] = arguments[name] if default is None or name in arguments else Bound(self.check(default, inner))
            value = self.check(definition.let.value, inner)
        if value is not None and ranged is not None and handed is not None and not handed.taken:
            assert ranged.ranges is not None
            message = f"`{node.function.text}` reduces nothing `{ranged.ranges.quoted()}`"
            self._report(codes.ARGUMENTS, ranged.ranges, message, without_ranges(ranged.ranges))
            return None
        return None if value is None else self._known(value, node)

    def _known(self, value: Value, node: syn.Call) -> Value:
        """Return the value of an inlined call as a single operation if an equivalent one exists."""
        made = known(value.expr)
        if made is value.expr:
            return value
        for part in walk(value.expr):
            if part in self.vectors:
                self.vectors.setdefault(made, self.vectors[part])
        if made.kind == "reduce" and made.argument is not None:
            decay = Part(made.argument, self.uses.place(node.arguments[-1].value.span))
            self.bounded.append(Bounded(f"the decay of `{node.function.text}`", decay, 0, 1))
        return replace(value, expr=made, parts=sum(1 for _ in walk(made)), depth=depth_of(made), constant=value_of(made))

    def _function(self, node: syn.Call, scope: Scope) -> Value | None:
        name = node.function.text
        if name in self.FORMS:
            handed = self.uses.handed
            if name == "fold" and handed is not None and handed.named and handed.over == Over():
                handed.taken = True
            return self.FORMS[name](self, node, scope)
        args = self._arguments(node, ELEMENTWISE[name], scope)
        if args is None or any(arg is None for arg in args):
            return None
        known = tuple(arg for arg in args if arg is not None)
        if name == "where" and not self.condition(known[0], node.arguments[0].value.span, "`where`"):
            return None
        return self._finite(values.call(name, *known), known, node.span)

    def _extreme(self, node: syn.Call, name: str, scope: Scope) -> Value | None:
        """Check `max(a, b, ...)`: fold the arguments two at a time."""
        args = self._arguments(node, len(node.arguments), scope)
        if args is None or any(arg is None for arg in args):
            return None
        first, *rest = (arg for arg in args if arg is not None)
        for arg in rest:
            first = values.call(name, first, arg)
        return first

    # -- reductions --------------------------------------------------------------------------------------------------

    def _reduction(self, node: syn.Call, row: ReductionRow, scope: Scope) -> Value | None:
        """Check `sum(x)`, `sum(x over dims)`, `ema(x, d)`. The first argument is reduced and may have a range."""
        op = row.name
        if len(node.arguments) != 1 + bool(row.argument) or node.arguments[0].keyword is not None:
            what = f"one value, and takes `{row.argument}`" if row.argument else "exactly one value"
            self._report(codes.ARGUMENTS, node.span, f"`{op}` reduces {what}", how_to_call(node))
            return None
        if not self._plain(node.function.text, node.arguments[1:]):
            return None
        over, inner = self.ranges.of(node.arguments[0], scope, Over())
        self.reductions.around.append(node)
        body = self.check(node.arguments[0].value, inner)
        self.reductions.around.pop()
        if over is not None and body is not None:
            over, body = self.ranges.with_pages(node, *in_fewer_words(over, body, self.ranges.is_page))
        argument = None
        if row.argument:
            argument = self._fixed(node.arguments[1].value, scope, f"the `{row.argument}` of `{op}`", 0, 1)
        if over is None or body is None or (row.argument and argument is None):
            return None
        made = self.reductions.reduce(node, op, over, body, argument)
        if made is not None and over.range != "text" and over.axis is Axis.QUERY and Axis.DIM in body.axes:
            message, help = vector(node, body)
            self.vectors.setdefault(
                made.expr, self.uses.reporting(codes.VECTOR, node.arguments[0].value.span, message, help)
            )
        return made


def _values_of(scope: Scope) -> Iterator[str]:
    """Return the names that are read without arguments."""
    return (name for name in scope.known() if not is_function(scope.find(name)))
