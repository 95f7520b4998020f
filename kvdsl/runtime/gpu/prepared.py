"""A layer's launches, prepared: from token to token only the addresses of what is new are filled in.

Triton looks at every argument at every launch, to find the kernel that was compiled for such. With forty arguments that takes longer
than most of these kernels run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.launch import launch
from kvdsl.runtime.state.slots import SameTensors, SlotState

_ALIGNED = 16
"""Bytes: a kernel is compiled for pointers that are multiples of this, or for others."""


@dataclass(frozen=True)
class Launch:
    """One launch: see `kvdsl.runtime.gpu.launch.launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


class Prepared:
    """The launches of one token, made once and to be made again for others.

    It holds while the state's tensors are the same objects, and calls are of one kind, in one workspace.

    Args:
        fresh: the tensors that every token has of its own, by the names that the kernels have for them; None: not there.
    """

    def __init__(
        self, launches: Iterable[Launch], state: SlotState, call: AttentionCall, fresh: Mapping[str, Tensor | None]
    ) -> None:
        self._kind = _kind(state, call, fresh)
        self._runs = [_Run(one, fresh) for one in launches]
        self._same = SameTensors(state)
        self._angles = [run.angles for run in self._runs]  # they outlive their cache of tables

    def serves(self, state: SlotState, call: AttentionCall, fresh: Mapping[str, Tensor | None]) -> bool:
        """Whether all that was prepared holds for this call."""
        return self._same.holds(state) and self._kind == _kind(state, call, fresh)

    def run(self, fresh: Mapping[str, Tensor | None]) -> None:
        """Launch everything for another token."""
        addresses = {name: _address(tensor) for name, tensor in fresh.items()}
        for one in self._runs:
            one(addresses)


class _Run:
    """A launch, made when this is."""

    def __init__(self, one: Launch, fresh: Mapping[str, Tensor | None]) -> None:
        compiled = launch(one.kernel, one.grid, one.arguments, one.options)
        names = one.kernel.arg_names
        self.angles = one.arguments["angles"]
        self._run = compiled[(*one.grid, 1, 1)[:3]]
        self._values = [_address(one.arguments[name]) for name in names]
        self._places = [(n, name) for n, name in enumerate(names) if name in fresh]

    def __call__(self, addresses: Mapping[str, Any]) -> None:
        values = self._values.copy()
        for n, name in self._places:
            values[n] = addresses[name]
        self._run(*values)


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _kind(state: SlotState, call: AttentionCall, fresh: Mapping[str, Tensor | None]) -> tuple[object, ...]:
    """What the launches say of a call, but for addresses."""
    tensors = [None if x is None else (x.dtype, x.shape, x.data_ptr() % _ALIGNED == 0) for x in fresh.values()]
    layer = (state.layer, state.head_offset, state.seed, state.evicts, state.selects, state.even)
    return (*tensors, *layer, call.scaling, call.softcap, call.window, call.rope)
