"""The lets of the prelude, of a file and its imports, and of a library without a policy."""

from __future__ import annotations

from collections.abc import Iterable

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.modules import Module
from kvdsl.sema.names import check_definition
from kvdsl.sema.scope import Bound, Definition, LetName, Scope
from kvdsl.syntax import nodes as syn


def prelude_scope(prelude: syn.Module) -> Scope:
    """Return a scope with the prelude's names."""
    scope = Scope({})
    for let in prelude.lets:
        scope.names[let.name.text] = LetName(let, scope, prelude=True)
    return scope


def module_scope(module: Module, prelude: Scope, sink: Sink, known: dict[Module, Scope] | None = None) -> Scope:
    """Return a scope with a file's lets and imported lets. Each let is resolved in the file that defines it.

    Args:
        known: scopes of files already read; updated in place.
    """
    known = {} if known is None else known
    if module in known:
        return known[module]
    scope = known[module] = Scope({}, prelude)
    first: dict[str, tuple[syn.Let, Module]] = {}
    inner = {other: module_scope(other, prelude, sink, known) for other in module.imports}
    for let, where in module.lets():
        name = let.name.text
        if where is module and not check_definition(let, sink):
            scope.names[name] = Bound(None)
        elif name in first:
            own, whose = first[name]
            imported = whose is module and where is not module
            there, label = (
                (own, Label(let.name.span, "imported from here")) if imported else (let, Label(own.name.span, "first here"))
            )
            help = "give it another name" if imported else None
            sink.report(codes.DUPLICATE, there.name.span, f"`{name}` is defined twice", help, labels=[label])
        else:
            first[name] = let, where
            scope.names[name] = LetName(let, scope if where is module else inner[where])
    return scope


def check_library(module: Module, prelude: Scope, sink: Sink) -> None:
    """Check the lets of a file without a policy."""
    scope = module_scope(module, prelude, sink)
    check_lets(list(scope.names.values()), Expressions(sink, lenient=module.broken))


def check_lets(definitions: Iterable[Definition], expressions: Expressions) -> None:
    """Check unused lets. Of functions only names are checked, since the arguments are unknown."""
    for definition in syn.of_kind(definitions, LetName):
        let = definition.let
        if let.parameters is None:
            expressions.let(definition, let.name.span)
            continue
        unknown: dict[str, Definition] = {}
        for parameter in let.parameters:
            if parameter.default is not None:
                expressions.check(parameter.default, Scope(unknown, definition.scope))
            unknown[parameter.name.text] = Bound(None)
        expressions.check(let.value, Scope(unknown, definition.scope))
