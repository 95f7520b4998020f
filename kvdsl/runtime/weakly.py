"""References that keep nobody alive: what holds tensors goes as soon as its owner does, and does not wait for Python to look for cycles."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Generic, TypeVar

Referent = TypeVar("Referent")


class Weakly(Generic[Referent]):
    """Refers to something that others own. A copy refers to the copy, and what is pickled to what is loaded with it."""

    def __init__(self, referent: Referent) -> None:
        self._reference = weakref.ref(referent)

    def __call__(self) -> Referent:
        """What it refers to.

        Raises:
            ReferenceError: if its owner has gone.
        """
        found = self._reference()
        if found is None:
            raise ReferenceError("the owner of what is asked for has gone")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Weakly[Referent]:
        return Weakly(copy.deepcopy(self(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Weakly, (self(),)
