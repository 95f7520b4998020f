"""The C++ backend: one fused call a decode step. Prompts are served by torch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.runtime import graph, replacing, statistics
from kvdsl.runtime.angles import angles
from kvdsl.runtime.attention import in_rows
from kvdsl.runtime.blocks import BlockState
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.prefill import prefill
from kvdsl.runtime.prompt import Prompt
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
ABI = 5
"""`KVDSL_ABI` of kvdsl/args.hpp."""

TILE = 32
"""`block` of kvdsl/attend.hpp: slots of a tile of the sketch."""

STAGES = ("place", "renew", "look", "choose", "attend", "finish")
"""`Stage` of kvdsl/laps.hpp."""

_NO_FREE_SLOT, _OUT_OF_MEMORY, _NOT_LIVE, _NO_FREE_BLOCK = 1, 2, 4, 8


class DecodeArgs(ctypes.Structure):
    """Mirrors kvdsl/args.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "out", "keys", "values", "table", "position", "state", "ring_rows", "seen", "real", "params", "sinks",
            "rank", "half_keys", "near", "far", "sketch", "prompt", "sketch_keys", "page_bounds", "seconds",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in (
            "batch", "kv_heads", "group", "key_dim", "value_dim", "slots", "tokens", "params_per_row",
            "window", "layer", "head_offset", "threads", "rope_pairs", "rope_offset", "rope_interleaved",
            "sketch_width", "pages", "block_size", "blocks", "anew",
        )),
        ("seed", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


class PromptArgs(ctypes.Structure):
    """Mirrors the one of kvdsl/prompt.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lse", "newest", "adds_up")),
        ("first", ctypes.c_int32),
    )


class CpuBackend:
    """Serves one policy's layers on a CPU.

    Raises:
        KvdslError: if the policy has no C++, nothing can build it, or the tensors are not on a CPU in a dtype it knows.
    """

    name = "cpu"
    seconds: Tensor | None = None
    """Where to add up the time of every stage, float64 [len(STAGES)], if anybody asks."""

    def __init__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise KvdslError(f"the cpu backend needs tensors on a CPU, not on {device}")
        if dtype not in _DTYPES:
            raise KvdslError(f"the cpu backend knows float32, bfloat16 and float16, not {dtype}")
        if not spec.cpu_source.exists():
            raise KvdslError(f"`{spec.stem}` has no C++ kernels (`kvdsl explain {spec.stem}` says why)")
        library = _library(spec.cpu_source, spec.stem)
        self.served = graph.enlist(self, spec, dtype)
        self._decode = getattr(library, f"kvdsl_decode_{_DTYPES[dtype]}")
        self._replace = getattr(library, f"kvdsl_replace_{_DTYPES[dtype]}")
        self._observe = getattr(library, f"kvdsl_observe_{_DTYPES[dtype]}") if spec.reads_attention else None

    def __deepcopy__(self, memo: dict[int, object]) -> CpuBackend:
        """Itself: it holds nothing of a cache, so that copies of one share it."""
        return self

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """See `kvdsl.runtime.prefill.prefill`."""
        out = prefill(state, call, self._fold)
        state.keep_halves(call.rope)
        return out

    def _fold(self, prompt: Prompt, lse: Tensor) -> None:
        """See `kvdsl.runtime.statistics.observe`, which serves where attention sees keys turned away from their text."""
        if self._observe is None or prompt.turns:
            statistics.observe(prompt, lse)
            return
        held, args, told = _prompt_args(prompt, lse)
        _check(self._observe(ctypes.byref(args), ctypes.byref(told)))
        del held

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: place, attend, observe, settle; [batch, tokens, query_heads, value_dim]."""
        state.make_room(call.query.shape[2])
        state.keep_halves(call.rope)
        anew = state.keep_copies(TILE)
        batch, query_heads, tokens, _ = call.query.shape
        out = call.query.new_empty(batch, tokens, query_heads, call.value.shape[-1])
        held, args = decode_args(state, call, out, anew=anew, seconds=self.seconds)
        _check(self._decode(ctypes.byref(args)))
        del held
        return out

    def replace(self, state: SlotState, slots: Tensor, call: AttentionCall) -> None:
        """See `kvdsl.runtime.torch_backend.TorchBackend.replace`."""
        replacing.check_text(state)
        replacing.check_count(slots, call)
        state.forget_copies()
        state.keep_halves(call.rope)
        where = slots.int().contiguous()
        held, args = decode_args(state, call, call.query)
        _check(self._replace(ctypes.byref(args), ctypes.c_void_p(where.data_ptr())))
        del held


def _check(status: int) -> None:
    if status & (_NO_FREE_SLOT | _NO_FREE_BLOCK):
        what = "slot" if status & _NO_FREE_SLOT else "block"
        raise KvdslError(f"no {what} is free: the cache's tensors were changed from outside; call `reset()`")
    if status & _NOT_LIVE:
        raise KvdslError(replacing.NOT_LIVE)
    if status & _OUT_OF_MEMORY:
        raise MemoryError("no memory for the kernel's work space")


def decode_args(
    state: SlotState, call: AttentionCall, out: Tensor, *, anew: bool = False, seconds: Tensor | None = None
) -> tuple[tuple[object, ...], DecodeArgs]:
    """The kernel's arguments, and what must live as long as they do.

    Args:
        anew: whether what is kept beside the keys must be made from them.
        seconds: float64 [len(STAGES)], gets what the threads spend in each stage, added up.

    Raises:
        KvdslError: if the new tokens are not of the cache's dtype and sizes: the kernel gets bare pointers.
    """
    keys, values = state.stored
    table = state.table if isinstance(state, BlockState) else None
    shapes = [(x.dtype, x.shape[:2], x.shape[-1]) for x in (call.key, call.value)]
    if shapes != [(x.dtype, state.position.shape[:2], x.shape[-1]) for x in (keys, values)]:
        raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")
    query, key, value = (in_rows(x) for x in (call.query, call.key, call.value))
    real = None if call.real is None else call.real.to(torch.uint8).contiguous()
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    ring_rows = state.ring_rows()
    rope = call.rope if state.spec.compact else None
    turns = None if rope is None else angles(rope, int(state.seen.max()) + call.key.shape[2])
    held = (query, key, value, real, sinks, ring_rows, turns)
    batch, kv_heads, tokens, key_dim = key.shape
    pointers = (
        query, key, value, out, keys, values, table, state.position,
        state.columns, ring_rows, state.seen, real, state.numbers, sinks,
        state.rank if state.spec.compact else None, None if turns is None or not state.spec.rope_cached else state.half_keys,
        *((None, None) if turns is None else (turns.near, turns.far)),
        *((state.sketch, state.prompt, state.sketch_keys) if state.spec.sketches else (None, None, None)),
        state.page_bounds if "page" in state.spec.numbers else None, seconds,
    )  # fmt: skip
    stride = ctypes.c_int64 * 3
    return held, DecodeArgs(
        *(None if x is None or x.numel() == 0 else x.data_ptr() for x in pointers),
        *(stride(*x.stride()[:3]) for x in (query, key, value)),
        batch, kv_heads, query.shape[1] // kv_heads, key_dim, value.shape[-1], state.slots, tokens, state.numbers.shape[-1],
        call.window or 0, state.layer, state.head_offset, torch.get_num_threads(),
        *((0, 0, 0) if rope is None else (rope.pairs, rope.offset, rope.layout == "interleaved")),
        state.sketch.shape[-1] if state.spec.sketches else 0, state.page_bounds.shape[2] if "page" in state.spec.numbers else 0,
        *((0, 0) if table is None else (keys.shape[2], keys.shape[1])), anew,
        state.seed & 0xFFFFFFFF, call.scaling, call.softcap or 0.0,
    )  # fmt: skip


def _prompt_args(prompt: Prompt, lse: Tensor) -> tuple[tuple[object, ...], DecodeArgs, PromptArgs]:
    """What the kernel is told of a prompt that attention has passed, and what must live as long."""
    state, call, kept = prompt.state, prompt.call, prompt.kept
    query, key, value = (in_rows(x) for x in (call.query, kept["keys"], kept["values"]))
    position, columns, numbers = kept["position"], kept["columns"], prompt.numbers.contiguous()
    ring_rows, lse, newest = state.ring_rows(), lse.contiguous(), prompt.position.contiguous()
    args = DecodeArgs(
        batch=len(position), kv_heads=prompt.heads, group=prompt.group, key_dim=key.shape[-1], value_dim=value.shape[-1],
        slots=prompt.slots, tokens=prompt.tokens, params_per_row=numbers.shape[-1], window=call.window or 0, layer=state.layer,
        head_offset=state.head_offset, threads=torch.get_num_threads(), seed=state.seed & 0xFFFFFFFF, scale=call.scaling,
        softcap=call.softcap or 0.0,
    )  # fmt: skip
    tensors = {
        "query": query, "key": key, "value": value, "position": position, "state": columns, "ring_rows": ring_rows,
        "params": numbers, "sinks": None if call.sinks is None else call.sinks.float().contiguous(),
    }  # fmt: skip
    for name, tensor in tensors.items():
        setattr(args, name, None if tensor is None or tensor.numel() == 0 else tensor.data_ptr())
    for name, tensor in (("query_stride", query), ("key_stride", key), ("value_stride", value)):
        setattr(args, name, (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
    adds_up = torch.tensor([rule in ("sum", "squares") for rule in state.spec.column_rules], dtype=torch.uint8)
    told = PromptArgs(lse.data_ptr(), newest.data_ptr(), adds_up.data_ptr(), statistics.first_query(prompt))
    return (tuple(tensors.values()), lse, newest, adds_up), args, told


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
