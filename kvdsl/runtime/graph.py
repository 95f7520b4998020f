"""A decode step in a graph of `torch.compile`.

`torch.compile` can trace the torch backend. The other backends call kernels with bare pointers, so their step is one operator,
`kvdsl::decode`, which declares the tensors that it reads and changes. Its other arguments are the same for every token and for every
cache of a policy. Otherwise torch would recompile the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend

if TYPE_CHECKING:
    from kvdsl.runtime.backend import Backend, Working

_operators = torch.library.Library("kvdsl", "FRAGMENT")
_operators.define(
    "decode(str served, Tensor query, Tensor key, Tensor value, Tensor? real, Tensor? sinks, Tensor? supplied, Tensor? slopes, "
    "Tensor(a!)[] changed, Tensor(b!)[] work, Tensor[] read, *, str[] workspace, str rope, float scaling, float softcap, "
    "int window, int layer, int head_offset, int seed, int[] ring_sizes, bool evicts, bool selects, bool even) -> Tensor"
)


def step(backend: Backend, state: SlotState, call: AttentionCall) -> Tensor:
    """Serve one decoded token in a form that `torch.compile` can trace. Returns [batch, 1, query_heads, value_dim].

    Args:
        state: allocated, and of fixed size.
    """
    if not backend.served:
        return TorchBackend().steps(state, call)
    out: Tensor = torch.ops.kvdsl.decode(*arguments(backend, state, call), **constants(state, call))
    return out


def arguments(backend: Backend, state: SlotState, call: AttentionCall) -> tuple[Any, ...]:
    """Return the operator's positional arguments: the backend's name and the tensors."""
    held = state.tensors()
    changed, read = [held[name] for name in _changed(state)], [held[name] for name in _read(state)]
    work = [] if state.workspace is None else list(state.workspace.tensors.values())
    vectors = call.query, call.key, call.value
    return backend.served, *vectors, call.real, call.sinks, call.supplied, call.slopes, changed, work, read


def constants(state: SlotState, call: AttentionCall) -> dict[str, Any]:
    """Return the operator's keyword arguments, which stay the same from token to token."""
    return {
        "workspace": [] if state.workspace is None else list(state.workspace.tensors),
        "rope": "" if call.rope is None else call.rope.name,
        "scaling": call.scaling,
        "softcap": call.softcap or 0.0,
        "window": call.window or 0,
        "layer": state.layer,
        "head_offset": state.head_offset,
        "seed": state.seed,
        "ring_sizes": state.column_index.ring_sizes,
        "evicts": state.evicts,
        "selects": state.selects,
        "even": state.even,
    }


def _changed(state: SlotState) -> list[str]:
    return [name for name, one in state.declared.items() if one.changes]


def _read(state: SlotState) -> list[str]:
    return [name for name, one in state.declared.items() if not one.changes]


_served: dict[str, tuple[Backend, PolicySpec]] = {}


def enlist(backend: Backend, spec: PolicySpec, dtype: torch.dtype) -> str:
    """Register a backend under a name for the operator. All backends of the same policy and dtype share one name."""
    names = (f"{backend.name} {spec.stem} {dtype} {number}" for number in count())
    return next(name for name in names if _served.setdefault(name, (backend, spec))[1] == spec)


# -- the operator ------------------------------------------------------------------------------------------------------


def _decode(
    served: str, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, sinks: Tensor | None, supplied: Tensor | None,
    slopes: Tensor | None, changed: Sequence[Tensor], work: Sequence[Tensor], read: Sequence[Tensor], *,
    workspace: Sequence[str], rope: str, scaling: float, softcap: float, window: int, layer: int, head_offset: int, seed: int,
    ring_sizes: Sequence[int], evicts: bool, selects: bool, even: bool,
) -> Tensor:  # fmt: skip
    backend, spec = _served[served]
    state = slot_state(spec, {}, layer=layer, head_offset=head_offset, seed=seed)
    tensors = {**dict(zip(_changed(state), changed, strict=True)), **dict(zip(_read(state), read, strict=True))}
    settled = {"evicts": evicts, "selects": selects, "even": even}
    state.adopt(tensors, window=window or None, ring_sizes=tuple(ring_sizes), **settled)
    turns = Rope.named(rope) if rope else None
    call = AttentionCall(
        query, key, value, real, scaling, softcap or None, window or None, sinks, turns, supplied, slopes=slopes
    )
    if work:
        cast("Working", backend).work_in(state, call, dict(zip(workspace, work, strict=True)))
    return backend.decode(state, call)


def _shape(served: str, query: Tensor, key: Tensor, value: Tensor, *others: Any, **constants: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


for _device in ("CPU", "CUDA"):
    _operators.impl("decode", _decode, _device)
torch.library.register_fake("kvdsl::decode", _shape, lib=_operators)
