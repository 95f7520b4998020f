"""A decode step in a graph of `torch.compile`.

The torch backend is made of operations that a compiler can trace. The others call kernels with bare pointers, so their step is
one operator, `kvdsl::decode`, which says what it reads and what it changes. Nothing that it is given differs from token to token,
or from one cache of a policy to the next, but the contents of tensors: else the graph would be compiled anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.torch_backend import TorchBackend

if TYPE_CHECKING:
    from kvdsl.runtime.backends import Backend

READ = ("numbers", "prompt")
"""Tensors of a state that no step changes."""

_SCHEMA = (
    "decode(str served, Tensor query, Tensor key, Tensor value, Tensor? real, Tensor? sinks, Tensor(a!)[] changed, Tensor[] read, "
    "*, str rope, float scaling, float softcap, int window, int layer, int head_offset, int seed, int[] ring_sizes, bool evicts, "
    "bool selects) -> Tensor"
)

_operators = torch.library.Library("kvdsl", "FRAGMENT")
_operators.define(_SCHEMA)


def step(backend: Backend, state: SlotState, call: AttentionCall) -> Tensor:
    """One decoded token of a bounded cache, [batch, 1, query_heads, value_dim], in a form that `torch.compile` can trace.

    Args:
        state: allocated, and not one that grows.
    """
    if isinstance(backend, TorchBackend):
        return backend.decode(state, call)
    out: Tensor = torch.ops.kvdsl.decode(
        backend.served, call.query, call.key, call.value, call.real, call.sinks, *_parted(state),
        rope="" if call.rope is None else call.rope.enlisted, scaling=call.scaling, softcap=call.softcap or 0.0,
        window=call.window or 0, layer=state.layer, head_offset=state.head_offset, seed=state.seed,
        ring_sizes=state.ring_sizes, evicts=state.evicts, selects=state.selects,
    )  # fmt: skip
    return out


def _parted(state: SlotState) -> tuple[list[Tensor], list[Tensor]]:
    """The state's tensors, in the order of `TENSORS`: those that a step may change, and those that it does not."""
    changed = [getattr(state, name) for name in state.TENSORS if name not in READ]
    return changed, [getattr(state, name) for name in state.TENSORS if name in READ]


def _joined(names: tuple[str, ...], changed: Sequence[Tensor], read: Sequence[Tensor]) -> Iterator[Tensor]:
    """What `_parted` took apart."""
    changed_ones, read_ones = iter(changed), iter(read)
    return (next(read_ones if name in READ else changed_ones) for name in names)


# -- what an operator's arguments name ---------------------------------------------------------------------------------

_served: dict[str, tuple[Backend, PolicySpec]] = {}


def enlist(backend: Backend, spec: PolicySpec, dtype: torch.dtype) -> str:
    """The name by which the operator finds the backend; the same for all that serve one policy in one dtype."""
    for number in count():
        name = f"{backend.name} {spec.stem} {dtype} {number}"
        if _served.setdefault(name, (backend, spec))[1] == spec:
            return name
    raise AssertionError


_workspaces: dict[tuple[Any, ...], object] = {}
"""What backends work in from token to token: layers of one shape, which run one after the other in a thread, share it."""


# -- the operator ------------------------------------------------------------------------------------------------------


def _decode(
    served: str, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, sinks: Tensor | None,
    changed: Sequence[Tensor], read: Sequence[Tensor], *, rope: str, scaling: float, softcap: float, window: int, layer: int,
    head_offset: int, seed: int, ring_sizes: Sequence[int], evicts: bool, selects: bool,
) -> Tensor:  # fmt: skip
    backend, spec = _served[served]
    state = SlotState(spec, {}, layer=layer, head_offset=head_offset, seed=seed)
    tensors = _joined(state.TENSORS, changed, read)
    state.adopt(tensors, window=window or None, ring_sizes=tuple(ring_sizes), evicts=evicts, selects=selects)
    place = (served, threading.get_ident(), state.position.shape, state.position.device, state.ring_sizes)
    state.workspace = _workspaces.get(place)
    out = backend.decode(
        state,
        AttentionCall(query, key, value, real, scaling, softcap or None, window or None, sinks, Rope.named(rope) if rope else None),
    )
    if state.workspace is not None:
        _workspaces[place] = state.workspace
    return out


def _shape(served: str, query: Tensor, key: Tensor, value: Tensor, *others: Any, **constants: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


for _device in ("CPU", "CUDA"):
    _operators.impl("decode", _decode, _device)
torch.library.register_fake("kvdsl::decode", _shape, lib=_operators)
