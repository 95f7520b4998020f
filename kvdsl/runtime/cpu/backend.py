"""The C++ backend: one fused call per decode step, and one per prompt for attention and observation."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime import graph
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.prepared import DecodeArgs, Prepared, PromptArgs, address, point, strides_of
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.shared import choices_of
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import eviction, statistics, tokens
from kvdsl.runtime.torch.attention import in_rows
from kvdsl.runtime.torch.backend import check_agreement, one_by_one
from kvdsl.runtime.torch.eviction import Held
from kvdsl.runtime.torch.prefill import attend_and_observe, prefill
from kvdsl.runtime.torch.prompt import Prompt

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

TILE = 32
"""`block` of src/attend.hpp: slots per tile of a sketch."""

STAGES = ("place", "renew", "look", "choose", "attend", "finish")
"""`Stage` of src/laps.hpp."""

_NO_FREE_SLOT, _OUT_OF_MEMORY, _NOT_LIVE, _NO_FREE_BLOCK, _NOT_TAME = 1, 2, 4, 8, 16


class CpuBackend:
    """Serves one policy's layers on a CPU.

    Raises:
        KvdslError: if the policy has no C++, it cannot be compiled, or the device or dtype is not supported.
    """

    name = "cpu"
    seconds: Tensor | None = None
    """Accumulates the time of every stage, float64 [len(STAGES)], if set."""

    def __init__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise KvdslError(f"the cpu backend needs tensors on a CPU, not on {device}")
        if dtype not in _DTYPES:
            raise KvdslError(f"the cpu backend supports float32, bfloat16 and float16, not {dtype}")
        if not spec.cpu_source.exists():
            raise KvdslError(spec.without("cpu"))
        library = _library(spec.cpu_source, spec.stem)
        self._stem, self.torch_evicts = spec.stem, spec.torch_evicts
        self.served = "" if spec.torch_evicts else graph.enlist(self, spec, dtype)
        self._decode = getattr(library, f"kvdsl_decode_{_DTYPES[dtype]}")
        self._replace = getattr(library, f"kvdsl_replace_{_DTYPES[dtype]}")
        self._prefill = getattr(library, f"kvdsl_prefill_{_DTYPES[dtype]}")
        self._settle = getattr(library, "kvdsl_settle", None)

    def __deepcopy__(self, memo: dict[int, object]) -> CpuBackend:
        """Return itself: it has no state of a cache."""
        return self

    @property
    def kernel(self) -> ctypes.c_void_p:
        """Address of the decode function.

        Raises:
            KvdslError: if torch evicts, so that this is not a whole step.
        """
        if self.torch_evicts:
            raise KvdslError(f"torch evicts under `{self._stem}` (`kvdsl explain` says why), and only C++ can here")
        return ctypes.cast(self._decode, ctypes.c_void_p)

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        out = prefill(state, call, self._attend, self._evict)
        copies.keep_halves(state, call.rope)
        if not state.room.grows:  # a step in a graph cannot allocate tensors for the next one
            copies.keep(state, TILE)
        return out

    def _attend(self, prompt: Prompt) -> Tensor:
        """Attend in C++, or by torch if keys are rotated to compact positions, distances count, or numbers may not be finite."""
        if prompt.turns or prompt.call.slopes is not None:
            return attend_and_observe(prompt)
        query, value = prompt.call.query, prompt.call.value
        out = query.new_empty(len(query), prompt.tokens, query.shape[1], value.shape[-1])
        return out if self._pass(prompt, out) else attend_and_observe(prompt, self._observe)

    def _observe(self, prompt: Prompt, _: Tensor) -> None:
        self._pass(prompt, None)

    def _pass(self, prompt: Prompt, out: Tensor | None) -> bool:
        """Observe the prompt's queries, and attend if there is an `out`.

        Returns:
            False, with nothing done, if attention may meet numbers that are not finite.
        """
        held, args, of_prompt = _prompt_args(prompt, out)
        status = self._prefill(ctypes.byref(args), ctypes.byref(of_prompt))
        del held
        if status == _NOT_TAME:
            return False
        check(status)
        return True

    def _evict(self, held: Held) -> bool:
        """Settle a prompt; see `kvdsl.runtime.torch.eviction.Kernel`. Policies that read keys at a settle have no such kernel."""
        if self._settle is None:
            return False
        state, position, numbers = held.state, held.position, held.numbers.contiguous()
        batch, heads, slots = position.shape
        args = DecodeArgs(
            batch=batch, kv_heads=heads, group=1, slots=slots, tokens=1, key_dim=held.kept["keys"].shape[-1], **strides_of(numbers),
            window=state.window or 0, layer=state.layer, head_offset=state.head_offset, threads=torch.get_num_threads(),
            seed=state.seed & 0xFFFFFFFF,
        )  # fmt: skip
        tensors = {
            "position": position, "state": held.kept["columns"], "ring_rows": state.column_index.ring_rows(), "params": numbers,
            "since": state.prompt_from, "seen": held.newest + 1, "real": held.rows,
            "constants": state.constants if state.spec.tensors is not None else None,
        }  # fmt: skip
        point(args, **tensors)
        check(self._settle(ctypes.byref(args), None))
        return True

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Serve new tokens one by one: place, attend, observe, settle. Returns [batch, tokens, query_heads, value_dim]."""
        state.make_room(call.query.shape[2])
        if not self.torch_evicts:
            return self._steps(state, call)
        check_agreement(state, call.query.shape[2])
        with plain_tensors():
            return torch.cat([self._step_and_evict(state, one) for one in one_by_one(call)], 1)

    def _step_and_evict(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Decode one token in C++, which evicts nothing, and evict in torch."""
        state.scaling, state.rope = call.scaling, call.rope
        real = tokens.new_positions(state, call)[:, 0] >= 0
        if state.spec.hard_cap:
            eviction.make_room(eviction.held_in_slots(state, real))
        out = self._steps(state, call)
        eviction.settle_slots(state, real)
        return out

    def _steps(self, state: SlotState, call: AttentionCall) -> Tensor:
        step = self.step(state, call)
        batch, query_heads, tokens, _ = call.query.shape
        out = call.query.new_empty(batch, tokens, query_heads, call.value.shape[-1])
        made = taken = None
        if state.choices is not None:
            count = choices_of(state.spec.group, query_heads // call.key.shape[1])
            made, taken = state.choices.of_forward(state.layer, state.position, tokens, count)
        check(step.run(self._decode, call, out, seconds=self.seconds, made=made, taken=taken))
        if made is not None and state.choices is not None:
            state.choices.make_several(made)
        return out

    def replace(self, state: SlotState, slots: Tensor, call: AttentionCall) -> None:
        tokens.check_text(state)
        tokens.check_count(slots, call)
        state.forget_copies(halves=False)
        where = slots.int().contiguous()
        check(self.step(state, call).run(self._replace, call, None, ctypes.c_void_p(where.data_ptr())))

    @staticmethod
    def step(state: SlotState, call: AttentionCall) -> Prepared:
        """Return the state's prepared call, made again if its tensors or the kind of call have changed."""
        step = _steps.get(state)
        if step is None or not step.serves(state, call):
            with plain_tensors():
                copies.keep_halves(state, call.rope)
                copies.forget_length(state)
                copies.keep(state, TILE)
                step = _steps[state] = Prepared(state, call)
        return step


_steps: weakref.WeakKeyDictionary[SlotState, Prepared] = weakref.WeakKeyDictionary()
"""Every state's last prepared call."""


def check(status: int) -> None:
    """Raise KvdslError or MemoryError unless a kernel's status is ok."""
    if status & (_NO_FREE_SLOT | _NO_FREE_BLOCK):
        what = "slot" if status & _NO_FREE_SLOT else "block"
        raise KvdslError(f"no {what} is free: the cache's tensors were changed from outside; call `reset()`")
    if status & _NOT_LIVE:
        raise KvdslError(tokens.NOT_LIVE)
    if status & _OUT_OF_MEMORY:
        raise MemoryError("no memory for the kernel's workspace")


def _prompt_args(prompt: Prompt, out: Tensor | None) -> tuple[tuple[object, ...], DecodeArgs, PromptArgs]:
    """Return the tensors that the arguments point to, and the arguments of a prompt."""
    state, call, kept = prompt.state, prompt.call, prompt.kept
    query, key, value = (in_rows(x) for x in (call.query, kept["keys"], kept["values"]))
    position, columns, numbers = kept["position"], kept["columns"], prompt.numbers.contiguous()
    ring_rows, newest = state.column_index.ring_rows(), prompt.position.contiguous()
    args = DecodeArgs(
        batch=len(position), kv_heads=prompt.heads, group=prompt.group, key_dim=key.shape[-1], value_dim=value.shape[-1],
        slots=prompt.slots, tokens=prompt.tokens, **strides_of(numbers), window=call.window or 0, layer=state.layer,
        head_offset=state.head_offset, threads=torch.get_num_threads(), seed=state.seed & 0xFFFFFFFF, scale=call.scaling,
        softcap=call.softcap or 0.0,
    )  # fmt: skip
    tensors = {
        "query": query, "key": key, "value": value, "position": position, "state": columns, "ring_rows": ring_rows,
        "params": numbers, "constants": state.constants if state.spec.tensors is not None else None,
        "sinks": None if call.sinks is None else call.sinks.float().contiguous(),
    }  # fmt: skip
    point(args, **tensors)
    for name, tensor in (("query_stride", query), ("key_stride", key), ("value_stride", value)):
        setattr(args, name, (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
    adds_up = _adding_up(state.spec.column_rules)
    first = statistics.first_query(prompt) if state.spec.reads_attention else prompt.tokens
    of_prompt = PromptArgs(address(out), newest.data_ptr(), adds_up.data_ptr(), first)
    return (tuple(tensors.values()), newest, adds_up), args, of_prompt


@lru_cache
def _adding_up(rules: tuple[str, ...]) -> Tensor:
    return torch.tensor([rule in ("sum", "squares") for rule in rules], dtype=torch.uint8, device="cpu")


def _library(source: Path, stem: str) -> ctypes.CDLL:
    from kvdsl.build.cxx import kernel_library, open_library

    return open_library(partial(kernel_library, source, stem), stem)
