"""What the kernels are given: the structures that headers of include/kvdsl declare, and a layer's call of them, prepared once.

From token to token only the addresses of what is new are written.
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
    """The fields of a struct, as a header declares them, a line each."""
    text = (INCLUDE / "kvdsl" / header).read_text(encoding="utf-8")
    (body,) = re.findall(rf"^struct {struct} {{$(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    for kind, pointer, name, count in _FIELD.findall(body):
        one: type[Any] = ctypes.c_void_p if pointer else _TYPES[kind]
        yield name, one * int(count) if count else one


class DecodeArgs(ctypes.Structure):
    """The one of kvdsl/args.hpp, which says what its fields are."""

    _fields_ = tuple(_fields("args.hpp", "DecodeArgs"))


class PromptArgs(ctypes.Structure):
    """The one of kvdsl/prompt.hpp."""

    _fields_ = tuple(_fields("prompt.hpp", "PromptArgs"))


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; nowhere if there is none, or an empty one."""
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def strides_of(numbers: Tensor) -> dict[str, int]:
    """How far a row's and a KV head's numbers lie apart in a policy's table, contiguous [batch, (kv_heads,) numbers]."""
    return {"params_per_row": numbers.stride(0), "params_per_head": numbers.stride(1) if numbers.dim() == 3 else 0}


def point(args: ctypes.Structure, **tensors: Tensor | None) -> None:
    """Have the arguments point to tensors."""
    for name, tensor in tensors.items():
        setattr(args, name, address(tensor))


class Prepared:
    """What the kernel is told of a state and of one kind of call.

    It holds while the state's tensors are the same objects.

    Raises:
        KvdslError: if the new tokens are not of the cache's dtype and sizes: the kernel gets bare pointers.
    """

    def __init__(self, state: SlotState, call: AttentionCall) -> None:
        state.check_fits(call.key, call.value, *state.position.shape[:2])
        self._same = SameTensors(state)
        self._kind = _kind(call)
        self._ring_rows = state.column_index.ring_rows()
        self._args = _told_of_slots(state, self._ring_rows)
        _tell_tokens(self._args, call)
        self._spec = state.spec
        self._rope = call.rope if state.spec.compact else None
        self._seen = (ctypes.c_int32 * len(state.seen)).from_address(state.seen.data_ptr())
        self._angles: Angles | None = None

    def serves(self, state: SlotState, call: AttentionCall) -> bool:
        """Whether all that was written holds for this call."""
        return self._same.holds(state) and self._kind == _kind(call)

    def for_one_thread(self) -> int:
        """Where the arguments lie, as long as this lives: from now on of one thread, and without what differs from token to token."""
        self._args.threads = 1
        return ctypes.addressof(self._args)

    def run(
        self, kernel: Callable[..., int], call: AttentionCall, out: Tensor | None, *more: Any, seconds: Tensor | None = None,
        made: Tensor | None = None, taken: Tensor | None = None,
    ) -> int:  # fmt: skip
        """The status of a kernel that gets these arguments.

        Args:
            out: gets the attention's output, [batch, tokens, query_heads, value_dim]; None where nobody attends.
            more: what the kernel takes beside.
            seconds: float64 [len(STAGES)], gets what the threads spend in each stage, added up.
            made, taken: bool [tokens, batch, kv_heads, choices, slots], get what is chosen for the layers above, or say what one below
                chose.
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
        """Have tables for every turn that there may be in a text of that length, where keys are turned at all."""
        if self._rope is not None and (self._angles is None or length > self._angles.reach):
            self._angles = angles(self._rope, length)
            point(self._args, near=self._angles.near, far=self._angles.far)


def _kind(call: AttentionCall) -> tuple[object, ...]:
    """What the arguments say of a call, but for addresses."""
    vectors = (call.query, call.key, call.value)
    return (
        *((x.dtype, x.shape, x.stride()) for x in vectors), call.scaling, call.softcap, call.window, call.rope,
    )  # fmt: skip


def _tell_tokens(args: DecodeArgs, call: AttentionCall) -> None:
    for name in ("query", "key", "value"):
        getattr(args, f"{name}_stride")[:] = in_rows(getattr(call, name)).stride()[:3]
    args.group, args.tokens = call.query.shape[1] // call.key.shape[1], call.key.shape[2]
    args.window, args.scale, args.softcap = call.window or 0, call.scaling, call.softcap or 0.0
    if call.rope is not None:
        args.rope_pairs, args.rope_offset = call.rope.pairs, call.rope.offset
        args.rope_interleaved = call.rope.pairing == "interleaved"


def _told_of_slots(state: SlotState, ring_rows: Tensor) -> DecodeArgs:
    batch, kv_heads, slots = state.position.shape
    keys, values, (key_dim, value_dim) = state.layout.key_pool, state.layout.value_pool, state.dims
    args = DecodeArgs(
        batch=batch, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, slots=slots,
        kv_dtype=KV_DTYPES.index(state.spec.kv_dtype),
        **strides_of(state.numbers), layer=state.layer, head_offset=state.head_offset, seed=state.seed & 0xFFFFFFFF,
    )  # fmt: skip
    point(
        args, keys=keys, values=values, position=state.position, state=state.columns, ring_rows=ring_rows,
        seen=state.seen, params=state.numbers,
    )  # fmt: skip
    if isinstance(state.layout, Blocks):
        args.blocks, args.block_size = state.layout.blocks, state.layout.size
        point(args, table=state.layout.table)
    if isinstance(state.layout, Flat):
        point(args, first_rows=state.layout.first_rows)
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
