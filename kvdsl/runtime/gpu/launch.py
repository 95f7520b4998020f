"""Kernel launches on the tensors' device, for every Triton release that kvdsl supports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from kvdsl.errors import KvdslError

_OF_NVIDIA = frozenset({"maxnreg"})
"""Options that Triton rejects for AMD GPUs."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes this device current. Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device is an NVIDIA GPU of compute capability 9."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]) -> Any:
    """Run the kernel with the arguments that it names. Disable fused multiply-add: kernels floor counts, and one bit decides the result.

    Returns:
        the compiled kernel; None in the interpreter.
    """
    if torch.version.hip:
        options = {name: value for name, value in options.items() if name not in _OF_NVIDIA}
    return kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **options, enable_fp_fusion=False)


def precision_of(kv_dtype: str, *, nvidia: bool = not torch.version.hip) -> str:
    """Return the input precision of float32 matrix products.

    Keys and values of a `kv_dtype` other than `model` are decoded in registers, and IEEE products would leave too few of them. On NVIDIA,
    tensor cores compute three TF32 products instead.
    """
    return "tf32x3" if nvidia and kv_dtype != "model" else "ieee"


def signed(word: int) -> int:
    """Return the low 32 bits as a signed number: kernels take seeds as int32."""
    return (word + 2**31) % 2**32 - 2**31


OLDEST = (3, 3)
"""The first Triton release whose kernels accept tuples."""


def check_release(version: str = triton.__version__) -> None:
    """Raise KvdslError if this Triton release cannot compile the kernels."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise KvdslError(f"the triton backend needs Triton 3.3 or later (torch 2.7 brings it), and this is {version}")


def tool(name: str) -> str:
    """Return the path of a program that ships with Triton: `cuobjdump` or `nvdisasm`."""
    if hasattr(triton, "knobs"):  # from 3.4 on
        return str(getattr(triton.knobs.nvidia, name).path)
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
