"""How long things live: what goes along when an object is copied or pickled, who keeps whom alive, and tensors that outlive a forward."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch

T = TypeVar("T")
Self = TypeVar("Self", bound="Linked")


class Linked:
    """`copy` takes everything along; `pickle` leaves None where `LINKS` are, for somebody to put them back."""

    LINKS: ClassVar[tuple[str, ...]] = ()

    def __copy__(self: Self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(self.LINKS)


class Weakly(Generic[T]):
    """Refers to something that others own. A copy refers to the copy, and what is pickled to what is loaded with it."""

    def __init__(self, referent: T) -> None:
        self._reference = weakref.ref(referent)

    def __call__(self) -> T:
        """What it refers to.

        Raises:
            ReferenceError: if its owner has gone.
        """
        found = self._reference()
        if found is None:
            raise ReferenceError("the owner of what is asked for has gone")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Weakly[T]:
        return Weakly(copy.deepcopy(self(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Weakly, (self(),)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """What is allocated in this block belongs to no graph and to no inference mode: written in one mode, it can be updated in any other."""
    with torch.inference_mode(False), torch.no_grad():
        yield


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
