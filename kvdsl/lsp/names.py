"""The names in a file, and their definitions. Broken statements have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.sema.files import prelude_syntax
from kvdsl.sema.modules import Module
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

Kind = Literal["param", "tensor", "given", "let", "function", "argument", "policy", "file", "input", "built-in"]


@dataclass(frozen=True)
class Name:
    """An occurrence of a name.

    Attributes:
        target: the name in its definition, possibly in another file; None for built-in names.
        defines: whether this is its definition, or an override.
        statement: the definition of a param, tensor, given value, let or function.
    """

    span: Span
    kind: Kind
    target: Span | None
    defines: bool = False
    statement: syn.Named | None = None

    @property
    def text(self) -> str:
        """The name's text."""
        return self.span.text


def _named(span: Span, statement: syn.Named, target: Span | None = None) -> Name:
    """Return the name defined by a statement; `target` is the original definition of an override."""
    function = getattr(statement, "parameters", None) is not None
    return Name(
        span,
        "function" if function else statement.keyword,
        target or statement.name.span,
        defines=target is not None,
        statement=statement,
    )


@dataclass(frozen=True)
class Names:
    """All names of a file, in order."""

    all: tuple[Name, ...]

    @cached_property
    def by_start(self) -> Mapping[int, Name]:
        """The names by start offset."""
        return {name.span.start: name for name in self.all}

    def at(self, offset: int) -> Name | None:
        """Return the name at or right before an offset."""
        found = [name for name in self.all if name.span.start <= offset <= name.span.end]
        return found[-1] if found else None


def same_place(a: Span | None, b: Span | None) -> bool:
    """Return whether two spans are the same place, possibly in two readings of a file."""
    if a is None or b is None or a.start != b.start:
        return False
    return a.file is b.file or (a.file.path is not None and b.file.path is not None and _same_file(a, b))


def _same_file(a: Span, b: Span) -> bool:
    assert a.file.path is not None
    assert b.file.path is not None
    return a.file.path.resolve() == b.file.path.resolve()


def ancestry(policy: syn.Policy, module: Module) -> list[tuple[syn.Policy, Module]]:
    """Return the policy, its parent, and so on, up to the first that is not found."""
    line = [(policy, module)]
    while (parent := line[-1][0].parent) is not None:
        found = next((pair for pair in line[-1][1].policies() if pair[0].name.text == parent.text), None)
        if found is None or any(found[0] is one for one, _ in line):
            break
        line.append(found)
    return line


def visible_lets(module: Module) -> dict[str, syn.Let]:
    """Return the lets and functions that a file's policy can read: the prelude's, imported ones, the file's and the policy's."""
    found = {let.name.text: let for let in prelude_syntax().lets}
    found |= {let.name.text: let for let, _ in reversed(list(module.lets()))}
    for policy in module.syntax.policies[:1]:
        for one, _ in reversed(ancestry(policy, module)):
            found |= {let.name.text: let for let in one.of(syn.Let)}
    return found


def collect(module: Module) -> Names:
    """Return the names of a file."""
    found = sorted(_Collector(module).run(), key=lambda name: (name.span.start, name.span.end))
    return Names(tuple(found))


class _Collector:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.outer: dict[str, syn.Let] = {let.name.text: let for let in prelude_syntax().lets}
        for let, _ in reversed(list(module.lets())):
            self.outer[let.name.text] = let
        self.inner: dict[str, syn.Named] = {}

    def run(self) -> Iterator[Name]:
        syntax = self.module.syntax
        for statement in syntax.imports:
            yield from self._import(statement)
        for let in syntax.lets:
            yield from self._let(let, let.name.span)
        for policy in syntax.policies:
            yield from self._policy(policy)
        for test in syntax.tests:
            yield from self._test(test)

    def _import(self, statement: syn.Import) -> Iterator[Name]:
        text = statement.name.text
        for imported in self.module.imports:
            path = imported.file.path
            if path is not None and path.stem == text.rpartition("/")[2].removesuffix(".kv"):
                yield Name(statement.name.span, "file", imported.file.span(0, 0))

    def _policy(self, policy: syn.Policy) -> Iterator[Name]:
        yield Name(policy.name.span, "policy", policy.name.span, defines=True)
        line = ancestry(policy, self.module)
        if policy.parent is not None:
            yield self._extended(policy.parent)
        self.inner = self._defined(line)
        for statement in policy.statements:
            yield from self._statement(statement)
        self.inner = {}

    def _extended(self, word: syn.Word) -> Name:
        found = next((one for one, _ in self.module.policies() if one.name.text == word.text), None)
        return Name(word.span, "policy", None if found is None else found.name.span)

    def _defined(self, line: list[tuple[syn.Policy, Module]]) -> dict[str, syn.Named]:
        """Return the params, tensors, given values and lets of a policy; for overrides, the first definition."""
        found: dict[str, syn.Named] = {}
        for policy, _ in reversed(line):
            for statement in policy.statements:
                if isinstance(statement, syn.Named):
                    found.setdefault(statement.name.text, statement)
        return found

    # -- statements ------------------------------------------------------------------------------------------------------

    def _statement(self, statement: syn.Statement) -> Iterator[Name]:
        match statement:
            case syn.Let():
                yield from self._let(statement, self._first(statement))
            case syn.Param() | syn.Tensor() | syn.Given():
                yield _named(statement.name.span, statement, self._first(statement))
                yield from self._inside(statement, {})
            case _:
                yield from self._inside(statement, {})

    def _first(self, statement: syn.Named) -> Span:
        """Return the name in the original definition of what a statement defines or overrides."""
        return self.inner.get(statement.name.text, statement).name.span

    def _let(self, let: syn.Let, target: Span) -> Iterator[Name]:
        yield _named(let.name.span, let, target)
        local = {one.name.text: one.name for one in let.parameters or ()}
        for one in let.parameters or ():
            yield Name(one.name.span, "argument", one.name.span, defines=True)
            if one.default is not None:
                yield from self._expr(one.default, local)
        yield from self._expr(let.value, local)

    # -- expressions -----------------------------------------------------------------------------------------------------

    def _inside(self, node: object, local: Mapping[str, syn.Word]) -> Iterator[Name]:
        """Yield the names in the expressions of a node."""
        for operand in syn.operands(node):
            yield from self._expr(operand, local)

    def _expr(self, node: syn.Expr, local: Mapping[str, syn.Word]) -> Iterator[Name]:
        match node:
            case syn.Name():
                yield self._read(node.span, node.name, local)
            case syn.Call(function=word):
                function = self._read(word.span, word.text, {})
                yield function
                yield from self._keywords(node, function)
        yield from self._inside(node, local)

    def _keywords(self, call: syn.Call, function: Name) -> Iterator[Name]:
        parameters = getattr(function.statement, "parameters", None)
        if parameters is not None:
            spans = {one.name.text: one.name.span for one in parameters}
            words = [argument.keyword for argument in call.arguments if argument.keyword is not None]
            yield from (Name(word.span, "argument", spans.get(word.text)) for word in words)

    def _read(self, span: Span, text: str, local: Mapping[str, syn.Word]) -> Name:
        if text in local:
            return Name(span, "argument", local[text].span)
        found = self.inner.get(text) or self.outer.get(text)
        if found is not None:
            return _named(span, found)
        return Name(span, "input" if text in NAMED_INPUTS and text not in NAMED_FUNCTIONS else "built-in", None)

    # -- tests -----------------------------------------------------------------------------------------------------------

    def _test(self, test: syn.Test) -> Iterator[Name]:
        known: dict[str, syn.Named] = {}
        for step in test.steps:
            match step:
                case syn.Use(policy=policy):
                    yield self._extended(policy)
                    used = next((pair for pair in self.module.policies() if pair[0].name.text == policy.text), None)
                    known = {} if used is None else self._defined(ancestry(*used))
                case syn.Set(name=name):
                    yield from _names_of(known, syn.Param, name)
            for token in step.tokens:
                yield from _names_of(known, syn.Given, *(one.name for one in token.brought if one.name is not None))


def _names_of(known: Mapping[str, syn.Named], kind: type[syn.Named], *words: syn.Word) -> Iterator[Name]:
    """Yield the words that name a param, or a given value."""
    for word in words:
        if word.text in known and isinstance(known[word.text], kind):
            yield _named(word.span, known[word.text])
