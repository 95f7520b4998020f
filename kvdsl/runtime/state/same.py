"""Whether what was written down of a state's tensors, their addresses say, is still true."""

from __future__ import annotations

import weakref
from operator import attrgetter, is_

from kvdsl.runtime.state.slots import SlotState


class SameTensors:
    """The tensors of a state as they were, known weakly, so that none lives longer for having been pointed to."""

    def __init__(self, state: SlotState) -> None:
        in_layout = [one.name for one in state.layout.DECLARED]
        self._tensors_of = attrgetter(*(f"layout.{name}" if name in in_layout else name for name in state.declared))
        self._tensors = [weakref.ref(tensor) for tensor in self._tensors_of(state)]

    def holds(self, state: SlotState) -> bool:
        """Whether they are the same objects still."""
        return all(map(is_, self._tensors_of(state), [known() for known in self._tensors]))
