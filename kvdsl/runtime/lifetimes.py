"""Copying, pickling and weak links of objects in a cache, and tensors that outlive a forward."""

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
    """Base of objects that refer to others. `copy` copies all attributes; `pickle` replaces those in `LINKS` by None, to be set again."""

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
    """A weak reference that survives copying and pickling: the copy refers to the copied object."""

    def __init__(self, referent: T) -> None:
        self._reference = weakref.ref(referent)

    def __call__(self) -> T:
        """Return the object.

        Raises:
            ReferenceError: if its owner is gone.
        """
        found = self._reference()
        if found is None:
            raise ReferenceError("the owner of this object is gone")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Weakly[T]:
        return Weakly(copy.deepcopy(self(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Weakly, (self(),)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Allocate ordinary tensors in this block, outside autograd and inference mode, so that any mode can update them later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class once(Generic[T]):
    """A cached property: the object stores the first result under the method's name."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object, kind: type) -> once[T] | T:
        """Compute and store the value. Later reads find the object's own attribute first."""
        if owner is None:
            return self
        found = self.find(owner)
        owner.__dict__[self.find.__name__] = found  # setattr fails on a frozen object
        return found
