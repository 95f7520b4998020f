"""Which backend serves a tensor: Triton on GPUs, C++ on CPUs, torch anywhere."""

from __future__ import annotations

import torch

from kvdsl.errors import KvdslError, warn
from kvdsl.runtime.backend import Backend
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.torch.backend import TorchBackend

NAMES = ("auto", "cpu", "triton", "torch")


def choose(spec: PolicySpec, name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for tensors of this device and dtype.

    Args:
        name: `auto` takes the fastest backend that works here and falls back to torch with a warning. Any other name must work.

    Raises:
        KvdslError: if the named backend is unknown or cannot serve such tensors.
    """
    check_name(name)
    dtype = computed_in(spec, dtype)
    if name == "torch":
        return TorchBackend()
    fused = {"cpu": _cpu, "cuda": _triton}.get(device.type) if name == "auto" else {"cpu": _cpu, "triton": _triton}[name]
    if fused is None:
        return TorchBackend()
    try:
        return fused(spec, device, dtype)
    except KvdslError as error:
        if name != "auto":
            raise
        _warn_once(f"`{spec.stem}` runs on the torch backend: {error}")
        return TorchBackend()


def computed_in(spec: PolicySpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a backend's vectors in a model of this dtype: float32 if it dequantizes keys and values."""
    return dtype if spec.kv_dtype == "model" else torch.float32


def check_name(name: str) -> None:
    """Raise KvdslError if no backend has this name."""
    if name not in NAMES:
        raise KvdslError(f"there is no backend `{name}`; choose one of {', '.join(NAMES)}")


def _cpu(spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> Backend:
    from kvdsl.runtime.cpu.backend import CpuBackend

    return CpuBackend(spec, device, dtype)


def _triton(spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> Backend:
    try:
        from kvdsl.runtime.gpu.backend import TritonBackend
    except ImportError as error:
        raise KvdslError(f"Triton cannot be imported ({error}); `pip install triton`") from error
    return TritonBackend(spec, device, dtype)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warn(message)
