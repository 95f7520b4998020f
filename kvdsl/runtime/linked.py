"""Objects that hold something of their process: they are copied with it, and pickled without."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

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
