"""The lets and functions that are being inlined, and reports from inside of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvdsl import codes
from kvdsl.codes import Code
from kvdsl.diagnostics import Label, Sink
from kvdsl.ir.nodes import Axis
from kvdsl.sema import values
from kvdsl.sema.reductions import Over
from kvdsl.sema.scope import LetName
from kvdsl.source import Span
from kvdsl.syntax import habits

NO_ARGUMENTS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Handed:
    """A range passed to a function. It applies to reductions in the body that name no axis, or the same one.

    Attributes:
        named: whether the range names an axis. A bare `where` or `by` applies to every reduction.
        taken: whether a reduction has used the range.
    """

    over: Over
    named: bool
    taken: bool = False

    def to(self, own: Over, bare: bool) -> Over:
        """Return the range of a reduction that has `own`; `bare` if its source has none."""
        axis = Axis.SLOT if self.over.axis is Axis.OTHER else self.over.axis
        if self.named and not bare and own.axis is not axis:
            return own
        self.taken = True
        both = [one.where for one in (own, self.over) if one.where is not None]
        where = values.call("and", *both) if len(both) == 2 else next(iter(both), None)
        return replace(self.over if self.named else own, where=where, by=self.over.by or own.by)


@dataclass(frozen=True)
class Use:
    """An inlined let or function, the place that uses it, and the text of its arguments."""

    definition: LetName
    span: Span
    arguments: Mapping[str, str]
    handed: Handed | None = None

    def filled(self, text: str) -> str:
        """Replace parameters by arguments in a text that quotes the body."""
        return re.sub(r"`[^`]*`", lambda code: habits.fill(code[0], self.arguments), text)

    def definition_in_words(self) -> str:
        """Return the definition as text, such as "`f(x)` is `x + 1`"."""
        let = self.definition.let
        head = let.name.span.file.text[let.name.span.start : let.value.span.start].strip().removesuffix("=").strip()
        return f"`{head}` is `{let.value.span.quoted()}`"


class Uses:
    """The uses around an expression, the outermost first. Reports name the place that uses a definition."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._uses: list[Use] = []

    @contextmanager
    def entered(
        self, definition: LetName, span: Span, arguments: Mapping[str, str] = NO_ARGUMENTS, handed: Handed | None = None
    ) -> Iterator[bool]:
        """Enter a definition; yield False after a report if it is already being inlined."""
        if any(use.definition is definition for use in self._uses):
            name = definition.let.name
            message = f"`{name.text}` is defined by itself"
            self.sink.report(codes.CYCLE, name.span, message, labels=[Label(span, "used here again")])
            yield False
            return
        self._uses.append(Use(definition, span, arguments, handed))
        try:
            yield True
        finally:
            self._uses.pop()

    @property
    def handed(self) -> Handed | None:
        """The range passed to the innermost function."""
        return self._uses[-1].handed if self._uses else None

    @property
    def prelude(self) -> Use | None:
        """The outermost use of the prelude; None outside of it."""
        return next((use for use in self._uses if use.definition.prelude), None)

    def names(self) -> set[str]:
        """Return the names that are being defined."""
        return {use.definition.let.name.text for use in self._uses}

    def outermost(self, span: Span) -> Span:
        """Return the place of the outermost use; the span itself outside of definitions."""
        return self._uses[0].span if self._uses else span

    def place(self, span: Span) -> Span:
        """Return the span itself, or for a span in the prelude the place that uses it."""
        return span if self.prelude is None else self.prelude.span

    def report(self, code: Code, span: Span, message: str, help: str | None = None, labels: Iterable[Label] = ()) -> None:
        """Report an error; inside the prelude, at the place that uses it."""
        self.reporting(code, span, message, help, labels)()

    def reporting(
        self, code: Code, span: Span, message: str, help: str | None, labels: Iterable[Label] = ()
    ) -> Callable[[], None]:
        """Return a function that reports an error of this place later."""
        if (prelude := self.prelude) is not None:
            return partial(self.sink.report, code, prelude.span, prelude.filled(message), prelude.definition_in_words())
        used = [Label(use.span, "used here") for use in reversed(self._uses)]
        return partial(self.sink.report, code, span, message, help, [*labels, *used[:1]])
