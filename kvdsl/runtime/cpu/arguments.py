"""What the kernels are given: structures that mirror those of include/kvdsl, and tensors as addresses."""

from __future__ import annotations

import ctypes

from torch import Tensor


class DecodeArgs(ctypes.Structure):
    """Mirrors kvdsl/args.hpp field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "out", "keys", "values", "table", "first_rows", "position", "state", "ring_rows", "since",
            "seen", "real", "params", "constants", "supplied", "sinks", "slopes", "rank", "half_keys", "near", "far", "sketch", "prompt",
            "sketch_keys", "page_bounds", "copied", "made", "taken", "seconds",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in (
            "batch", "kv_heads", "group", "key_dim", "value_dim", "slots", "tokens", "params_per_row", "params_per_head",
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
        *((name, ctypes.c_void_p) for name in ("out", "newest", "adds_up")),
        ("first", ctypes.c_int32),
    )


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
