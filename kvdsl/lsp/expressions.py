"""The expressions of a text: the one at a place, and its axes, state and value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvdsl.diagnostics import Sink
from kvdsl.explain.facts import State, state_of
from kvdsl.ir.nodes import Axis, Number
from kvdsl.ir.nodes import Policy as Checked
from kvdsl.lsp import Document
from kvdsl.passes.fold import value_of
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.scope import Bound, Definition, Scope
from kvdsl.sema.values import Value
from kvdsl.syntax import nodes as syn


@dataclass(frozen=True)
class Placed:
    """An expression, and the parameters of the function around it."""

    node: syn.Expr
    local: tuple[str, ...] = ()


def statements(document: Document) -> list[syn.Statement]:
    """Return the statements of the file's lets and policies."""
    if document.module is None:
        return []
    syntax = document.module.syntax
    return [*syntax.lets, *(one for policy in syntax.policies for one in policy.statements)]


def roots(document: Document) -> Iterator[Placed]:
    """Yield the whole expression of each statement."""
    for statement in statements(document):
        names = tuple(one.name.text for one in getattr(statement, "parameters", None) or ())
        yield from (Placed(operand, names) for operand in syn.operands(statement))


def expression_at(document: Document, offset: int) -> Placed | None:
    """Return the smallest expression at an offset; on an operator or function name, the whole operation."""
    for root in roots(document):
        if root.node.span.start <= offset <= root.node.span.end:
            node, inner = root.node, [root.node]
            while inner:
                node = inner[0]
                inner = [one for one in syn.operands(node) if one.span.start <= offset <= one.span.end]
            return Placed(node, root.local)
    return None


def value(document: Document, placed: Placed) -> Value | None:
    """Return the checked expression; None after errors, and if it depends on a function's argument."""
    if document.checker is None or document.module is None:
        return None
    unknown: dict[str, Definition] = {name: Bound(None) for name in placed.local}
    scope = Scope(unknown, document.checker.scope)
    return Expressions(Sink(), lenient=True).check(placed.node, scope)


def axes_in_words(axes: frozenset[Axis]) -> str:
    """Print axes, such as `query × slot`, or `a number`."""
    return " × ".join(axis.value for axis in Axis if axis in axes) or "a number"


def state(document: Document, found: Value) -> tuple[State, ...]:
    """Return the state columns that an expression needs if it ranks tokens."""
    if found.axes != frozenset({Axis.SLOT}):
        return ()
    params = () if document.policy is None else document.policy.params
    ranking = Checked(name="P", stem="p", params=params, budget=Number(value=1), score=found.expr)
    return state_of(ranking, {} if document.facts is None else document.facts.values)


def number(document: Document, found: Value) -> float | None:
    """Return the value with params at their defaults; None if it depends on a prompt."""
    return value_of(found.expr, {} if document.facts is None else document.facts.values)
