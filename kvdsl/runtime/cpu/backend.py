"""The C++ backend: one fused call a decode step. Prompts are served by torch."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime import graph
from kvdsl.runtime.angles import angles
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import replacing, statistics
from kvdsl.runtime.torch.attention import in_rows
from kvdsl.runtime.torch.prefill import prefill
from kvdsl.runtime.torch.prompt import Prompt

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

TILE = 32
"""`block` of src/attend.hpp: slots of a tile of the sketch."""

STAGES = ("place", "renew", "look", "choose", "attend", "finish")
"""`Stage` of src/laps.hpp."""

_NO_FREE_SLOT, _OUT_OF_MEMORY, _NOT_LIVE, _NO_FREE_BLOCK = 1, 2, 4, 8


class DecodeArgs(ctypes.Structure):
    """Mirrors kvdsl/args.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "out", "keys", "values", "table", "first_rows", "position", "state", "ring_rows", "seen",
            "real", "params", "sinks", "rank", "half_keys", "near", "far", "sketch", "prompt", "sketch_keys", "page_bounds", "copied",
            "seconds",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in (
            "batch", "kv_heads", "group", "key_dim", "value_dim", "slots", "tokens", "params_per_row",
            "window", "layer", "head_offset", "threads", "rope_pairs", "rope_offset", "rope_interleaved",
            "sketch_width", "pages", "block_size", "blocks",
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
            raise KvdslError(f"`{spec.stem}` has no C++ kernels (`kvdsl explain` says why)")
        library = _library(spec.cpu_source, spec.stem)
        self.served = graph.enlist(self, spec, dtype)
        self._decode = getattr(library, f"kvdsl_decode_{_DTYPES[dtype]}")
        self._replace = getattr(library, f"kvdsl_replace_{_DTYPES[dtype]}")
        self._observe = getattr(library, f"kvdsl_observe_{_DTYPES[dtype]}") if spec.reads_attention else None

    def __deepcopy__(self, memo: dict[int, object]) -> CpuBackend:
        """Itself: it holds nothing of a cache, so that copies of one share it."""
        return self

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """See `kvdsl.runtime.torch.prefill.prefill`."""
        out = prefill(state, call, self._fold)
        copies.keep_halves(state, call.rope)
        if not state.grows:  # now, because a step in a graph could not leave what it allocates to the next
            copies.keep(state, TILE)
        return out

    def _fold(self, prompt: Prompt, lse: Tensor) -> None:
        """See `kvdsl.runtime.torch.statistics.observe`, which serves where attention sees keys turned away from their text."""
        if self._observe is None or prompt.turns:
            statistics.observe(prompt, lse)
            return
        held, args, told = _prompt_args(prompt, lse)
        _check(self._observe(ctypes.byref(args), ctypes.byref(told)))
        del held

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: place, attend, observe, settle; [batch, tokens, query_heads, value_dim]."""
        state.make_room(call.query.shape[2])
        copies.keep_halves(state, call.rope)
        copies.forget_length(state)
        copies.keep(state, TILE)
        batch, query_heads, tokens, _ = call.query.shape
        out = call.query.new_empty(batch, tokens, query_heads, call.value.shape[-1])
        held, args = decode_args(state, call, out, seconds=self.seconds)
        _check(self._decode(ctypes.byref(args)))
        del held
        return out

    def replace(self, state: SlotState, slots: Tensor, call: AttentionCall) -> None:
        """See `kvdsl.runtime.torch.backend.TorchBackend.replace`."""
        replacing.check_text(state)
        replacing.check_count(slots, call)
        copies.forget(state)
        copies.keep_halves(state, call.rope)
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
    state: SlotState, call: AttentionCall, out: Tensor, *, seconds: Tensor | None = None
) -> tuple[tuple[object, ...], DecodeArgs]:
    """The kernel's arguments, and what must live as long as they do.

    Args:
        seconds: float64 [len(STAGES)], gets what the threads spend in each stage, added up.

    Raises:
        KvdslError: if the new tokens are not of the cache's dtype and sizes: the kernel gets bare pointers.
    """
    state.check_fits(call.key, call.value)
    args, ring_rows = _slots_args(state)
    query, key, value = (in_rows(x) for x in (call.query, call.key, call.value))
    real = None if call.real is None else call.real.to(torch.uint8).contiguous()
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    rope = call.rope if state.spec.compact else None
    turns = None if rope is None else angles(rope, int(state.seen.max()) + call.key.shape[2])
    _point(args, query=query, key=key, value=value, out=out, real=real, sinks=sinks, seconds=seconds)
    args.query_stride[:], args.key_stride[:], args.value_stride[:] = query.stride()[:3], key.stride()[:3], value.stride()[:3]
    args.group, args.tokens = query.shape[1] // key.shape[1], key.shape[2]
    args.window, args.scale, args.softcap = call.window or 0, call.scaling, call.softcap or 0.0
    args.threads = torch.get_num_threads()
    if rope is None or turns is None:
        _point(args, near=None, far=None, half_keys=None)
    else:
        _point(args, near=turns.near, far=turns.far, half_keys=state.half_keys if state.spec.rope_cached else None)
        args.rope_pairs, args.rope_offset, args.rope_interleaved = rope.pairs, rope.offset, rope.pairing == "interleaved"
    return (query, key, value, real, sinks, ring_rows, turns), args


def _point(args: DecodeArgs, **tensors: Tensor | None) -> None:
    """Have the arguments point to tensors; to nothing where there is none, or an empty one."""
    for name, tensor in tensors.items():
        setattr(args, name, None if tensor is None or tensor.numel() == 0 else tensor.data_ptr())


@dataclass(frozen=True)
class _Slots:
    """What the kernel was last told of a state, whose part about the slots holds while the tensors are these.

    Attributes:
        tensors: the state's, in their order; weak, so that nothing lives longer for having been pointed to.
        ring_rows: lives here.
    """

    tensors: tuple[weakref.ref[Tensor], ...]
    args: DecodeArgs
    ring_rows: Tensor

    def hold(self, state: SlotState) -> bool:
        """Whether nothing has been allocated anew."""
        return all(known() is tensor for known, tensor in zip(self.tensors, state.tensors().values(), strict=True))


_known: weakref.WeakKeyDictionary[SlotState, _Slots] = weakref.WeakKeyDictionary()


def _slots_args(state: SlotState) -> tuple[DecodeArgs, Tensor]:
    """The arguments with what they say of the slots, which is not written anew for every token; and the ring rows."""
    found = _known.get(state)
    if found is None or not found.hold(state):
        found = _known[state] = _described(state)
    return found.args, found.ring_rows


def _described(state: SlotState) -> _Slots:
    spec, ring_rows = state.spec, state.ring_rows()
    batch, kv_heads, slots = state.position.shape
    layout = state.layout
    keys, values = layout.key_pool, layout.value_pool
    args = DecodeArgs(
        batch=batch, kv_heads=kv_heads, key_dim=keys.shape[-1], value_dim=values.shape[-1], slots=slots,
        params_per_row=state.numbers.shape[-1], layer=state.layer, head_offset=state.head_offset, seed=state.seed & 0xFFFFFFFF,
    )  # fmt: skip
    _point(
        args, keys=keys, values=values, position=state.position, state=state.columns, ring_rows=ring_rows,
        seen=state.seen, params=state.numbers,
    )  # fmt: skip
    if isinstance(layout, Blocks):
        args.blocks, args.block_size = layout.blocks, layout.size
        _point(args, table=layout.table)
    if isinstance(layout, Flat):
        _point(args, first_rows=layout.first_rows)
    if spec.compact:
        _point(args, rank=state.rank)
    if spec.sketches:
        args.sketch_width = state.sketch.shape[-1]
        _point(args, sketch=state.sketch, prompt=state.prompt, sketch_keys=state.sketch_keys)
    if "copied" in state.declared:
        _point(args, copied=state.copied)
    if "page" in spec.numbers:
        args.pages = state.page_bounds.shape[2]
        _point(args, page_bounds=state.page_bounds)
    return _Slots(tuple(weakref.ref(tensor) for tensor in state.tensors().values()), args, ring_rows)


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
    from kvdsl.build.cxx import kernel_library

    path = kernel_library(source, stem)
    try:
        return _open(path)
    except OSError:  # as it was built, but not for this machine's libraries: build it once more
        with suppress(OSError):
            path.unlink()
    try:
        return _open(kernel_library(source, stem))
    except OSError as error:
        raise KvdslError(f"the C++ kernels of `{stem}` cannot be loaded ({error}); set KVDSL_CACHE_DIR elsewhere") from error


@lru_cache
def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
