"""Names and their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeGuard

from kvdsl.ir.nodes import Given, Tensor
from kvdsl.sema.values import Value
from kvdsl.syntax import nodes as syn


@dataclass(eq=False)
class ParamName:
    """A param."""

    name: str
    used: bool = False


@dataclass(eq=False)
class TensorName:
    """A tensor."""

    tensor: Tensor
    used: bool = False


@dataclass(eq=False)
class GivenName:
    """A value from the caller."""

    given: Given
    used: bool = False


@dataclass(eq=False)
class LetName:
    """A let or function, with the scope of its definition, in which its body is resolved."""

    let: syn.Let
    scope: Scope
    prelude: bool = False
    used: bool = False


@dataclass(eq=False)
class Bound:
    """An evaluated function argument; None after a reported error."""

    value: Value | None
    used: bool = True


@dataclass(eq=False)
class SlotName:
    """The other slot: `j` in `over slots as j`."""

    used: bool = False


Definition = ParamName | TensorName | GivenName | LetName | Bound | SlotName


def is_function(definition: Definition | None) -> TypeGuard[LetName]:
    """Return whether a name is a function's."""
    return isinstance(definition, LetName) and definition.let.parameters is not None


class Scope:
    """A set of names inside an outer scope."""

    def __init__(self, names: dict[str, Definition], outer: Scope | None = None) -> None:
        self.names, self.outer = names, outer

    def find(self, name: str) -> Definition | None:
        """Return the innermost definition of a name."""
        return next((scope.names[name] for scope in self._outward() if name in scope.names), None)

    def nearer_slot(self, name: str) -> str | None:
        """Return a slot named in a scope inside that of `name`; None without one."""
        inside = takewhile(lambda scope: name not in scope.names, self._outward())
        return next((other for scope in inside for other, found in scope.names.items() if isinstance(found, SlotName)), None)

    def function(self, name: str) -> LetName | None:
        """Return the innermost function of a name. Values do not hide it, such as a param `page`."""
        found = (scope.names.get(name) for scope in self._outward())
        return next((one for one in found if is_function(one)), None)

    def known(self) -> Iterator[str]:
        """Yield every name that can be read here."""
        for scope in self._outward():
            yield from scope.names

    def _outward(self) -> Iterator[Scope]:
        """Yield this scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer
