"""A stub of a GPU's driver: kernels are compiled for an H100, and launched nowhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu import backend as triton_backend
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench.decode import Shape, new_tokens, rotation, steady_state

CPU = torch.device("cpu")
GIVEN = {"sparcas": {"tokens": 16.0, "dims": 16.0}}
BEFORE_ARGUMENTS = 9
"""Of a launcher: its grid, the stream, the kernel, and what hooks get."""


def stub_driver(patch: pytest.MonkeyPatch, told: Callable[..., None]) -> None:
    """Have Triton launch nowhere, and tell what a launcher would be given."""

    class Launcher:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, *passed: Any) -> None:
            told(*passed)

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448}, load_binary=lambda *_: (1, 1, 32, 0, 1024)
    )
    stub = SimpleNamespace(
        utils=utils, launcher_cls=Launcher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0, get_current_stream=lambda _: 0,
    )  # fmt: skip
    patch.setattr(driver, "_active", stub)


def served(policy: str, shape: Shape) -> tuple[TritonBackend, SlotState, list[AttentionCall]]:
    """A backend that takes tensors on CPUs, what a layer has cached, and a few tokens."""
    spec = kvdsl.load(policy).spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "interpreted", lambda: True)
        server = TritonBackend(spec, CPU, torch.float16)
    server._dot = tl.float16
    rope = rotation(shape.head_dim) if spec.compact else None
    calls = [AttentionCall(*token, None, 0.125, rope=rope) for token in new_tokens(shape, count=3)]
    return server, steady_state(spec, shape, **GIVEN.get(policy, {})), calls
