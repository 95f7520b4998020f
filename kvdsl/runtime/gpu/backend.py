"""The Triton backend: two launches a layer and token. Of a prompt torch's attention, and one launch or two for its statistics.

In a step nothing waits for the device, and everything that the kernels work in is allocated once, so that it can be captured in a
CUDA graph.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kvdsl.runtime import rings, statistics
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.prompt import observe
from kvdsl.runtime.gpu.sizes import ATTEND_OPTIONS, EVERYTHING, SETTLE_OPTIONS, Sizes
from kvdsl.runtime.prefill import prefill
from kvdsl.runtime.prompt import Prompt
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PROCESSORS_IN_THE_INTERPRETER = 8


class TritonBackend:
    """Serves one policy's layers on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        KvdslError: if the policy has no Triton kernels, or if they cannot take such tensors.
    """

    name = "triton"

    def __init__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> None:
        if not spec.triton_source.exists():
            raise KvdslError(f"`{spec.stem}` has no Triton kernels (`kvdsl explain {spec.stem}` says why)")
        if device.type != "cuda" and not interpreted():
            raise KvdslError(
                f"the triton backend needs tensors on a GPU, not on {device} (or TRITON_INTERPRET=1, to try it out)"
            )
        if dtype not in DTYPES:
            raise KvdslError(f"the triton backend knows float32, bfloat16 and float16, not {dtype}")
        self.kernels = kernels_of(spec.triton_source)
        self._dot = tl.float32 if interpreted() else DTYPES[dtype]

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """See `kvdsl.runtime.prefill.prefill`."""
        return prefill(state, call, self._fold)

    def _fold(self, prompt: Prompt, lse: Tensor) -> None:
        """See `kvdsl.runtime.statistics.observe`, which serves where attention sees keys turned away from their text."""
        if prompt.turns:
            statistics.observe(prompt, lse)
        else:
            observe(self.kernels, self._dot, prompt, lse)

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: attend, place, observe, settle; [batch, tokens, query_heads, value_dim].

        Raises:
            KvdslError: if the new tokens are not of the cache's dtype and sizes: the kernels get bare pointers.
        """
        shapes = [(x.dtype, x.shape[:2], x.shape[-1]) for x in (call.key, call.value)]
        if shapes != [(x.dtype, x.shape[:2], x.shape[-1]) for x in (state.keys, state.values)]:
            raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")
        tokens = call.query.shape[2]
        state.make_room(tokens)
        steps = [self._decode_one(state, call, t) for t in range(tokens)]
        return steps[0] if tokens == 1 else torch.cat(steps, dim=1)

    def _decode_one(self, state: SlotState, call: AttentionCall, t: int) -> Tensor:
        query, key, value = (x[:, :, t].contiguous() for x in (call.query, call.key, call.value))
        batch, heads, value_dim = value.shape
        sizes = Sizes(query.shape[1] // heads, key.shape[-1], value_dim, key.element_size())
        work = workspace(state, self.kernels, sizes)
        out = query.new_empty(batch, 1, query.shape[1], value_dim)
        real = work.every_row if call.real is None else call.real[:, t].contiguous()
        given = work.tensors | {
            "query": query, "new_key": key, "new_value": value, "out": out, "real": real,
            "sinks": out if call.sinks is None else call.sinks.contiguous(),
            "keys": state.keys, "values": state.values, "position": state.position, "columns": state.columns,
            "seen": state.seen, "numbers": state.numbers,
            "slots": state.slots, "splits": work.splits, "per_split": work.per_split,
            "scaling": call.scaling, "softcap": call.softcap or 0.0, "window": call.window or EVERYTHING,
            "seed": _signed(state.seed), "layer": state.layer, "first_head": state.head_offset,
            "LOGITS": "logits" in self.kernels.settle.arg_names, "DOT": self._dot, "SINKS": call.sinks is not None,
        }  # fmt: skip
        _launch(attend, (work.splits, heads, batch), given | sizes.attend(), ATTEND_OPTIONS)
        _launch(self.kernels.settle, (heads, batch), given | sizes.settle(work.splits), SETTLE_OPTIONS)
        return out


def _launch(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], options: dict[str, int]) -> None:
    kernel[grid](**{name: given[name] for name in kernel.arg_names}, **options, enable_fp_fusion=False)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number."""
    return (word + 2**31) % 2**32 - 2**31


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, which takes tensors on CPUs."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache
def kernels_of(source: Path) -> Any:
    """The module of generated kernels."""
    spec = importlib.util.spec_from_file_location(f"{source.parent.name}.{source.stem}", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what the kernels work in ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workspace:
    """Tensors of one layer that live from one launch to the next; nothing in them outlives a token.

    Attributes:
        fits: the shapes that it was made for.
        every_row: bool [batch], all True.
        tensors: by the name that the kernels have for them.
        splits, per_split: see `Sizes.splits`.
    """

    fits: tuple[Any, ...]
    every_row: Tensor
    tensors: dict[str, Tensor]
    splits: int
    per_split: int


def workspace(state: SlotState, kernels: Any, sizes: Sizes) -> Workspace:
    """The layer's workspace, made when its slots are new or have grown."""
    fits = (state.position.shape, state.position.device, state.ring_sizes, sizes, kernels.SCORES)
    if not isinstance(state.workspace, Workspace) or state.workspace.fits != fits:
        state.workspace = _allocate(state, kernels, sizes, fits)
    return state.workspace


def _allocate(state: SlotState, kernels: Any, sizes: Sizes, fits: tuple[Any, ...]) -> Workspace:
    batch, heads, slots = state.position.shape
    splits, per_split = sizes.splits(slots, batch * heads, _processors(state.position.device))
    starts = rings.starts(len(state.spec.columns), state.ring_sizes)
    logits = slots if "logits" in kernels.settle.arg_names else 0

    def floats(*shape: int) -> Tensor:
        return state.columns.new_empty(batch, heads, *shape)

    tensors = {
        "part": floats(splits, sizes.group, sizes.value_dim),
        "top": floats(splits, sizes.group),
        "total": floats(splits, sizes.group),
        "logits": floats(sizes.group, logits),
        "new_logits": floats(sizes.group),
        "work": floats(kernels.SCORES, slots),
        "kept": floats(slots).to(torch.int8),
        "first_free": floats(splits).to(torch.int32),
        "held": floats(splits).to(torch.int32),
        "newest": torch.empty_like(state.seen),
        "ring_rows": torch.tensor(starts, dtype=torch.int32).to(state.seen.device),
    }
    every_row = torch.ones(batch, dtype=torch.bool, device=state.seen.device)
    return Workspace(fits, every_row, tensors, splits, per_split)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_IN_THE_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count
