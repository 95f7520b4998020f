"""A property that is found when it is first read, and traced by `torch.compile` on every Python.

`functools.cached_property` takes a lock before Python 3.12, which a graph cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """A method without arguments as an attribute: the object keeps what the first reading found."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object, kind: type) -> once[T] | T:
        """Called only while the object has no attribute of that name: one of its own comes before the class's."""
        if owner is None:
            return self
        found = self.find(owner)
        owner.__dict__[self.find.__name__] = found  # not by setattr: a frozen object may keep it, too
        return found
