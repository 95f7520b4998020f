"""The C++ backend: one fused call a decode step. Prompts are served by torch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.runtime.angles import angles
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.prefill import prefill
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec

_FUNCTIONS = {
    torch.float32: "kvdsl_decode_f32",
    torch.bfloat16: "kvdsl_decode_bf16",
    torch.float16: "kvdsl_decode_f16",
}
ABI = 3
"""`KVDSL_ABI` of kvdsl/args.hpp."""

_NO_FREE_SLOT, _OUT_OF_MEMORY = 1, 2


class DecodeArgs(ctypes.Structure):
    """Mirrors kvdsl/args.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "out", "keys", "values", "position", "state", "ring_rows", "seen", "real", "params", "sinks",
            "rank", "near", "far",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in (
            "batch", "kv_heads", "group", "key_dim", "value_dim", "slots", "tokens", "params_per_row",
            "window", "layer", "head_offset", "threads", "rope_pairs", "rope_offset", "rope_interleaved",
        )),
        ("seed", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


class CpuBackend:
    """Serves one policy's layers on a CPU.

    Raises:
        KvdslError: if the policy has no C++, nothing can build it, or the tensors are not on a CPU in a dtype it knows.
    """

    name = "cpu"

    def __init__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise KvdslError(f"the cpu backend needs tensors on a CPU, not on {device}")
        if dtype not in _FUNCTIONS:
            raise KvdslError(f"the cpu backend knows float32, bfloat16 and float16, not {dtype}")
        if not spec.cpu_source.exists():
            raise KvdslError(f"`{spec.stem}` has no C++ kernels (`kvdsl explain {spec.stem}` says why)")
        self._decode = getattr(_library(spec.cpu_source, spec.stem), _FUNCTIONS[dtype])

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """See `kvdsl.runtime.prefill.prefill`."""
        return prefill(state, call)

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: place, attend, observe, settle; [batch, tokens, query_heads, value_dim]."""
        state.make_room(call.query.shape[2])
        batch, query_heads, tokens, _ = call.query.shape
        out = call.query.new_empty(batch, tokens, query_heads, call.value.shape[-1])
        held, args = decode_args(state, call, out)
        status = self._decode(ctypes.byref(args))
        del held
        if status & _NO_FREE_SLOT:
            raise KvdslError("no slot is free: the cache's tensors were changed from outside; call `reset()`")
        if status & _OUT_OF_MEMORY:
            raise MemoryError("no memory for the kernel's work space")
        return out


def decode_args(state: SlotState, call: AttentionCall, out: Tensor) -> tuple[tuple[object, ...], DecodeArgs]:
    """The kernel's arguments, and what must live as long as they do.

    Raises:
        KvdslError: if the new tokens are not of the cache's dtype and sizes: the kernel gets bare pointers.
    """
    shapes = [(x.dtype, x.shape[:2], x.shape[-1]) for x in (call.key, call.value)]
    if shapes != [(x.dtype, x.shape[:2], x.shape[-1]) for x in (state.keys, state.values)]:
        raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")
    query, key, value = (_last_dim_contiguous(x) for x in (call.query, call.key, call.value))
    real = None if call.real is None else call.real.to(torch.uint8).contiguous()
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    ring_rows = _ring_rows(state)
    rope = call.rope if state.spec.compact else None
    turns = None if rope is None else angles(rope, int(state.seen.max()) + call.key.shape[2])
    held = (query, key, value, real, sinks, ring_rows, turns)
    batch, kv_heads, tokens, key_dim = key.shape
    pointers = (
        query, key, value, out, state.keys, state.values, state.position,
        state.columns, ring_rows, state.seen, real, state.numbers, sinks,
        state.rank if state.spec.compact else None, *((None, None) if turns is None else (turns.near, turns.far)),
    )  # fmt: skip
    stride = ctypes.c_int64 * 3
    return held, DecodeArgs(
        *(None if x is None or x.numel() == 0 else x.data_ptr() for x in pointers),
        *(stride(*x.stride()[:3]) for x in (query, key, value)),
        batch, kv_heads, query.shape[1] // kv_heads, key_dim, value.shape[-1], state.slots, tokens, state.numbers.shape[-1],
        call.window or 0, state.layer, state.head_offset, torch.get_num_threads(),
        *((0, 0, 0) if rope is None else (rope.pairs, rope.offset, rope.layout == "interleaved")),
        state.seed & 0xFFFFFFFF, call.scaling, call.softcap or 0.0,
    )  # fmt: skip


def _ring_rows(state: SlotState) -> Tensor | None:
    """The row of `state.columns` with which each ring begins, int32 [rings]."""
    if not state.ring_sizes:
        return None
    starts = accumulate(state.ring_sizes[:-1], initial=len(state.spec.columns))
    return torch.tensor(list(starts), dtype=torch.int32)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _library(source: Path, stem: str) -> ctypes.CDLL:
    from kvdsl.build.cxx import shared_library

    path = shared_library(source, stem)
    try:
        return _open(path)
    except OSError:
        path.unlink(missing_ok=True)  # a broken file, perhaps of a disk that was full: build it once more
    try:
        return _open(shared_library(source, stem))
    except OSError as error:
        raise KvdslError(f"the C++ kernels of `{stem}` cannot be loaded ({error}); set KVDSL_CACHE_DIR elsewhere") from error


@lru_cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if library.kvdsl_abi() != ABI:
        raise KvdslError(f"{path} was built for another runtime: delete it and try again")
    return library
