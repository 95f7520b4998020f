"""Prepared launches of a layer: later tokens only replace the addresses of new tensors.

Triton inspects every argument at every launch to find the compiled kernel. With forty arguments this takes longer than most of these
kernels run.
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
"""Bytes. Triton compiles separate kernels for pointers that are multiples of this and for others."""


@dataclass(frozen=True)
class Launch:
    """The arguments of one `kvdsl.runtime.gpu.launch.launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


class Prepared:
    """The launches of one token, run once and repeatable for others.

    They stay valid while the state's tensors are the same objects and calls have the same kind and workspace.

    Args:
        fresh: the tensors that change with every token, by kernel argument; None: absent.
    """

    def __init__(
        self, launches: Iterable[Launch], state: SlotState, call: AttentionCall, fresh: Mapping[str, Tensor | None]
    ) -> None:
        self._kind = _kind(state, call, fresh)
        self._runs = [_Run(one, fresh) for one in launches]
        self._same = SameTensors(state)
        self._angles = [run.angles for run in self._runs]  # keep the tables alive: their own cache may drop them

    def serves(self, state: SlotState, call: AttentionCall, fresh: Mapping[str, Tensor | None]) -> bool:
        """Return whether the prepared launches are valid for this call."""
        return self._same.holds(state) and self._kind == _kind(state, call, fresh)

    def run(self, fresh: Mapping[str, Tensor | None]) -> None:
        """Run all launches for another token."""
        addresses = {name: _address(tensor) for name, tensor in fresh.items()}
        for one in self._runs:
            one(addresses)


class _Run:
    """One launch. Constructing it runs the launch once; calling it repeats the launch with other addresses."""

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
    """Return all of a call that the launches depend on, except addresses."""
    tensors = [None if x is None else (x.dtype, x.shape, x.data_ptr() % _ALIGNED == 0) for x in fresh.values()]
    layer = (state.layer, state.head_offset, state.seed, state.evicts, state.selects, state.even)
    return (*tensors, *layer, call.scaling, call.softcap, call.window, call.rope)
