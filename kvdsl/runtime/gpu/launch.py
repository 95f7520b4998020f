"""Launching kernels with the arguments that they name, on the device that holds them, under any release of Triton that kvdsl works with."""

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
"""Options that Triton refuses for AMD's GPUs."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where launches go meanwhile: to this device and its stream. Triton asks for the current one, whatever the tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's compute capability 9."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]) -> Any:
    """Run the kernel; it gets those of the arguments that it names. Products are rounded: counts are floored, where one bit decides.

    Returns:
        what Triton compiled, None in the interpreter.
    """
    if torch.version.hip:
        options = {name: value for name, value in options.items() if name not in _OF_NVIDIA}
    return kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **options, enable_fp_fusion=False)


def precision_of(kv_dtype: str, *, nvidia: bool = not torch.version.hip) -> str:
    """The precision of products of float32 matrices. Keys and values of another `kv_dtype` than `model` lie in registers, where products
    of float32 numbers leave too little room; NVIDIA's tensor cores multiply them in three parts.
    """
    return "tf32x3" if nvidia and kv_dtype != "model" else "ieee"


def signed(word: int) -> int:
    """The low 32 bits as a signed number: a seed, as kernels take it."""
    return (word + 2**31) % 2**32 - 2**31


OLDEST = (3, 3)
"""The first release whose kernels take tuples."""


def check_release(version: str = triton.__version__) -> None:
    """Raise KvdslError under a release that cannot compile the kernels."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise KvdslError(f"the triton backend needs Triton 3.3 or later (torch 2.7 brings it), and this is {version}")


def tool(name: str) -> str:
    """Where a program lies that comes with Triton: `cuobjdump` or `nvdisasm`."""
    if hasattr(triton, "knobs"):  # from 3.4 on
        return str(getattr(triton.knobs.nvidia, name).path)
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
