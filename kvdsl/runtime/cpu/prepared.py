"""Arguments of the C++ kernels: the structs declared in include/kvdsl, and a layer's call, prepared once.

From token to token only the addresses of new vectors change.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvdsl.build.cxx import INCLUDE
from kvdsl.memory import KV_DTYPES
from kvdsl.runtime.angles import Angles, angles
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.slots import SameTensors, SlotState
from kvdsl.runtime.supplied import supplied_of
from kvdsl.runtime.torch.attention import in_rows

_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "float": ctypes.c_float}
_FIELD = re.compile(r"^  (?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;", re.MULTILINE)


def _fields(header: str, struct: str) -> Iterator[tuple[str, type[Any]]]:
    """Yield a struct's fields from its header, where each has a line of its own."""
    text = (INCLUDE / "kvdsl" / header).read_text(encoding="utf-8")
    (body,) = re.findall(rf"^struct {struct} {{$(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    for kind, pointer, name, count in _FIELD.findall(body):
        one: type[Any] = ctypes.c_void_p if pointer else _TYPES[kind]
        yield name, one * int(count) if count else one


class DecodeArgs(ctypes.Structure):
    """`DecodeArgs` of kvdsl/args.hpp, which documents the fields."""

    _fields_ = tuple(_fields("args.hpp", "DecodeArgs"))


class PromptArgs(ctypes.Structure):
    """`PromptArgs` of kvdsl/prompt.hpp."""

    _fields_ = tuple(_fields("prompt.hpp", "PromptArgs"))


def address(tensor: Tensor | None) -> int | None:
    """Return a tensor's address; None for no tensor or an empty one."""
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def strides_of(numbers: Tensor) -> dict[str, int]:
    """Return the strides of rows and heads in a policy's table, contiguous [batch, (kv_heads,) numbers]."""
    return {"params_per_row": numbers.stride(0), "params_per_head": numbers.stride(1) if numbers.dim() == 3 else 0}


def point(args: ctypes.Structure, **tensors: Tensor | None) -> None:
    """Set pointers to tensors."""
    for name, tensor in tensors.items():
        setattr(args, name, address(tensor))


class Prepared:
    """The arguments for a state and one kind of call, valid while the state's tensors are the same objects.

    Raises:
        KvdslError: if new tokens differ from the cache in dtype or size: the kernel receives bare pointers.
    """

    def __init__(self, state: SlotState, call: AttentionCall) -> None:
        state.check_fits(call.key, call.value, *state.position.shape[:2])
        self._same = SameTensors(state)
        self._kind = _kind(call)
        self._ring_rows = state.column_index.ring_rows()
        self._args = _args_of(state, self._ring_rows)
        _set_call(self._args, call)
        self._spec = state.spec
        self._rope = call.rope if state.spec.compact else None
        self._seen = (ctypes.c_int32 * len(state.seen)).from_address(state.seen.data_ptr())
        self._angles: Angles | None = None

    def serves(self, state: SlotState, call: AttentionCall) -> bool:
        """Whether the prepared arguments are valid for this call."""
        return self._same.holds(state) and self._kind == _kind(call)

    def for_one_thread(self) -> int:
        """Set one thread, and return the arguments' address, valid during this object's lifetime. Per-token fields are unset."""
        self._args.threads = 1
        return ctypes.addressof(self._args)

    def run(
        self, kernel: Callable[..., int], call: AttentionCall, out: Tensor | None, *more: Any, seconds: Tensor | None = None,
        made: Tensor | None = None, taken: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Call a kernel and return its status.

        Args:
            out: receives the output, [batch, tokens, query_heads, value_dim]; None without attention.
            more: further arguments of the kernel.
            seconds: float64 [len(STAGES)], accumulates the threads' time per stage.
            made, taken: bool [tokens, batch, kv_heads, choices, slots], receive the selection for other layers, or contain another layer's.
        """
        args = self._args
        query, key, value = in_rows(call.query), in_rows(call.key), in_rows(call.value)
        real = None if call.real is None else call.real.contiguous()
        sinks, slopes = (None if x is None else x.float().contiguous() for x in (call.sinks, call.slopes))
        args.query, args.key, args.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        args.real, args.sinks, args.out, args.seconds = address(real), address(sinks), address(out), address(seconds)
        args.slopes, args.made, args.taken = address(slopes), address(made), address(taken)
        args.threads = torch.get_num_threads()
        supplied = supplied_of(self._spec, call) if self._spec.supplied else None
        args.supplied = address(supplied)
        if self._rope is not None:
            self.reach(max(self._seen) + args.tokens)
        return kernel(ctypes.byref(args), *more)

    def reach(self, length: int) -> None:
        """Provide tables for every shift in a text of that length, if keys are rotated."""
        if self._rope is not None and (self._angles is None or length > self._angles.reach):
            self._angles = angles(self._rope, length)
            point(self._args, near=self._angles.near, far=self._angles.far)


def _kind(call: AttentionCall) -> tuple[object, ...]:
    """Return everything in the arguments that depends on the call, apart from addresses."""
    vectors = (call.query, call.key, call.value)
    return (
        *((x.dtype, x.shape, x.stride()) for x in vectors), call.scaling, call.softcap, call.window, call.rope,
    )  # fmt: skip


def _set_call(args: DecodeArgs, call: AttentionCall) -> None:
    for name in ("query", "key", "value"):
        getattr(args, f"{name}_stride")[:] = in_rows(getattr(call, name)).stride()[:3]
    args.group, args.tokens = call.query.shape[1] // call.key.shape[1], call.key.shape[2]
    args.window, args.scale, args.softcap = call.window or 0, call.scaling, call.softcap or 0.0
    if call.rope is not None:
        args.rope_pairs, args.rope_offset = call.rope.pairs, call.rope.offset
        args.rope_interleaved = call.rope.pairing == "interleaved"


def _args_of(state: SlotState, ring_rows: Tensor) -> DecodeArgs:
    batch, kv_heads, slots = state.position.shape
    keys, values, (key_dim, value_dim) = state.layout.key_pool, state.layout.value_pool, state.dims
    key_dtype, value_dtype = map(KV_DTYPES.index, (state.format.key, state.format.value))
    args = DecodeArgs(
        batch=batch, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, slots=slots,
        key_dtype=key_dtype, value_dtype=value_dtype,
        **strides_of(state.numbers), layer=state.layer, head_offset=state.head_offset, seed=state.seed & 0xFFFFFFFF,
    )  # fmt: skip
    point(
        args, keys=keys, values=values, position=state.position, state=state.columns, ring_rows=ring_rows,
        seen=state.seen, params=state.numbers,
    )  # fmt: skip
    match state.layout:
        case Blocks() as blocks:
            args.blocks, args.block_size = blocks.blocks, blocks.size
            point(args, table=blocks.table)
        case Flat() as flat:
            point(args, first_rows=flat.first_rows)
    if state.spec.tensors is not None:
        point(args, constants=state.constants)
    if state.spec.compact:
        point(args, rank=state.rank)
    if state.spec.rope_cached:
        point(args, half_keys=state.half_keys)
    if state.spec.sketches:
        args.sketch_width = state.sketch.shape[-1]
        point(args, sketch=state.sketch, prompt=state.prompt, sketch_keys=state.sketch_keys)
    if "copied" in state.declared:
        point(args, copied=state.copied)
    if state.spec.bounds_pages:
        args.pages = state.page_bounds.shape[2]
        point(args, page_bounds=state.page_bounds)
    return args
